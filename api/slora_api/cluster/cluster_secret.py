"""The secret that all API processes and engines of a cluster share."""

import secrets

from slora.core.engine_address import MAX_SECRET_BYTES
from slora.core.errors import ConfigError
from slora_adapters.process.durable_file import create_durably
from slora_api.cluster.cluster_config import ClusterConfig

_MIN_SECRET_BYTES = 32


def read_secret(config: ClusterConfig, *, create: bool = False) -> bytes:
    """Returns the secret of the cluster. create: whether to make the file if it does not exist. Raises ConfigError."""
    path = config.secret_file
    if create and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        create_durably(path, secrets.token_hex(32).encode())
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"the secret of the cluster cannot be read from {path}: {error.strerror}; copy it from the host where "
            "`slora deploy` ran, or name it with secret_file"
        ) from error
    if not _MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"the secret in {path} has {len(secret)} bytes; it must have {_MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}: "
            "delete the file, and `slora deploy` makes a new one"
        )
    return secret
