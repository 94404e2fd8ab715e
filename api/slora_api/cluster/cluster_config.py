"""The settings of a cluster, and the cluster file that holds them.

A cluster file is YAML with one setting in each line: those of `ClusterSettings`, and all settings of `slora serve`, by
name. It is read strictly. A flag takes precedence over the file, and the file over the environment.

The secret that all API processes and engines of a cluster share, and what the processes that talk to Ray are told.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from slora.core.engine_address import MAX_SECRET_BYTES
from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.core.messages import find_protocol
from slora.core.setting import SettingRefused, SettingSpec, setting_specs
from slora.models.model_spec import find_model
from slora_adapters.errors import find_nearest
from slora_adapters.peft.hub_reference import HubReference
from slora_adapters.process.durable_file import create_durably
from slora_api.core.package_version import find_package_version
from slora_api.core.settings import (
    ClusterSettings,
    Settings,
    cluster_setting_specs,
    read_settings,
    server_setting_specs,
)

# What a replica needs, beside the settings of its engine.
_REPLICA_SETTINGS = (
    *("data_dir", "store", "store_environment", "redis", "database", "host_cache_bytes"),
    *("log_format", "stall_seconds"),
)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """All settings of a cluster. texts: those that were given, by name, as `read_settings` takes them."""

    cluster: ClusterSettings
    server: Settings
    texts: Mapping[str, str]

    @staticmethod
    def read(texts: Mapping[str, str], environment: Mapping[str, str]) -> "ClusterConfig":
        """Raises SettingRefused or ConfigError."""
        cluster, server = read_cluster_settings(texts, environment), read_settings(texts, environment)
        if cluster.max_replicas is not None and cluster.max_replicas < server.replicas:
            raise ConfigError(
                f"max_replicas is {cluster.max_replicas}, below replicas {server.replicas}: raise max_replicas, or "
                "lower replicas"
            )
        engine = server.engine
        reference = HubReference.of_model(find_model(engine.model, engine.model_impl))
        if reference is not None:
            # All replicas serve the same commit. Each host downloads it.
            server = replace(server, engine=replace(engine, model=Path(str(reference))))
        return ClusterConfig(cluster, server, texts)

    @property
    def data_dir(self) -> Path:
        return Path(self.server.data_dir).resolve()

    @property
    def secret_file(self) -> Path:
        if self.cluster.secret_file:
            return Path(self.cluster.secret_file).resolve()
        return self.data_dir / "cluster-secret"

    def replica_texts(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The settings that a replica needs, by name, for `read_settings` on its host.

        Paths are absolute, and must exist on every host.
        """
        texts: dict[str, str] = {}
        engine_settings = {spec.name for spec in setting_specs(EngineConfig)}
        for spec in server_setting_specs():
            text = self.texts.get(spec.name) or environment.get(spec.variable)
            if text and (spec.name in engine_settings or spec.name in _REPLICA_SETTINGS):
                texts[spec.name] = text
        engine = self.server.engine
        model = HubReference.of_model(engine.model) or engine.model.resolve()
        paths = {"model": str(model), "data_dir": str(self.data_dir)}
        return {**texts, **paths, "model_name": engine.served_name, "store": self._store}

    @property
    def _store(self) -> str:
        store = self.server.store or str(self.data_dir / "adapters")
        return store if "://" in store else str(Path(store).resolve())

    def version(self, environment: Mapping[str, str], secret: bytes) -> str:
        """Returns a text that changes if the replicas must be replaced: with their settings, their installation and the
        secret. It is derived with the secret, so it reveals no password in a setting.
        """
        facts = [self.replica_texts(environment), find_package_version(), find_protocol()]
        return hmac.new(secret, json.dumps(facts, sort_keys=True).encode(), hashlib.sha256).hexdigest()[:12]


def read_cluster_settings(texts: Mapping[str, str], environment: Mapping[str, str]) -> ClusterSettings:
    """Raises SettingRefused."""
    values: dict[str, Any] = {}
    for spec in cluster_setting_specs():
        if text := texts.get(spec.name) or environment.get(spec.variable):
            values[spec.name] = spec.parse(text, spec.name)
    return ClusterSettings(**values)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that occurs twice, of which YAML would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for at, key in enumerate(keys):
            if key in keys[:at]:
                raise ConfigError(f"{key} occurs twice: remove one of the two lines")
        return super().construct_mapping(node, deep)


def read_cluster_file(path: Path) -> dict[str, str]:
    """Returns the settings of a cluster file as texts. Raises ConfigError."""
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except OSError as error:
        raise ConfigError(f"the cluster file {path} cannot be read: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"cluster file {path}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the cluster file {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict) or not raw:
        raise ConfigError(f"the cluster file {path} has no settings: write lines such as `replicas: 2`")
    specs = {spec.name: spec for spec in (*cluster_setting_specs(), *server_setting_specs())}
    texts: dict[str, str] = {}
    for key, value in raw.items():
        if key not in specs:
            close = find_nearest(str(key), specs)
            hint = f"did you mean {close}?" if close else "docs/cluster.md lists all settings"
            raise ConfigError(f"cluster file {path}: {key!r} is not a setting; {hint}")
        texts[key] = text = _read_scalar(path, specs[key], value)
        try:
            specs[key].parse(text, key)
        except SettingRefused as error:
            raise ConfigError(f"cluster file {path}: {error}") from None
    return texts


def _read_scalar(path: Path, spec: SettingSpec, value: object) -> str:
    if isinstance(value, bool):  # YAML reads `on` and `off` as booleans.
        return "on" if value else "off"
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"cluster file {path}: {spec.name} is {value!r}; it must be {spec.kind.accepted}")


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


@dataclass(frozen=True, slots=True)
class FollowerConfig:
    """Where the follower finds the replicas, and where it writes them.

    address: HOST:PORT of Ray's head, or auto for the Ray of this host. address_file: a file that contains the address,
    once Ray has started; None: use `address`.
    """

    cluster_name: str
    address: str
    address_file: Path | None
    replicas: Path

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @staticmethod
    def from_json(text: str) -> "FollowerConfig":
        raw = json.loads(text)
        address_file = None if raw["address_file"] is None else Path(raw["address_file"])
        return FollowerConfig(**{**raw, "replicas": Path(raw["replicas"]), "address_file": address_file})


@dataclass(frozen=True, slots=True)
class RayCommand:
    """name: deploy, status or stop. texts: the settings that were given, by name, which may contain passwords.

    address: HOST:PORT of Ray's head, or auto. host: see `Deployment`. as_json: whether to print JSON.
    """

    name: str
    texts: Mapping[str, str]
    address: str
    host: str | None = None
    as_json: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "RayCommand":
        return RayCommand(**json.loads(text))
