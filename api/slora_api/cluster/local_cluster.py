"""The files of a cluster on one machine (`slora deploy --local`), by which other commands find it."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slora.core.errors import ConfigError
from slora_adapters.process.durable_file import create_durably, replace_durably
from slora_api.cluster.cluster_config import ClusterConfig

LOCAL_HOST = "127.0.0.1"
# Ray sends nothing to its makers, and logs to its own files only.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """The files of a local cluster, in a folder of the data directory."""

    directory: Path

    @staticmethod
    def of(data_dir: Path) -> "LocalCluster":
        return LocalCluster(data_dir / "cluster")

    @property
    def config(self) -> Path:
        """The settings, as the last `slora deploy` gave them. They may contain passwords."""
        return self.directory / "config.json"

    @property
    def _token(self) -> Path:
        return self.directory / "ray-token"

    @property
    def address_file(self) -> Path:
        return self.directory / "ray-address"

    def create(self, config: ClusterConfig) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        create_durably(self._token, secrets.token_hex(32).encode())
        self.address_file.unlink(missing_ok=True)
        self.write(config)

    def write(self, config: ClusterConfig) -> None:
        replace_durably(self.config, json.dumps(dict(config.texts)).encode())

    def read_address(self) -> str:
        """Returns the address of Ray's head. Raises ConfigError while there is none."""
        try:
            return self.address_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(
                f"no local cluster runs on {self.directory.parent}: start it with `slora deploy --local`"
            ) from None

    def write_address(self, address: str) -> None:
        replace_durably(self.address_file, address.encode())

    def variables(self) -> Mapping[str, str]:
        """Variables with which Ray and its clients find the token. Set them before Ray is imported."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            # In spite of its name, Ray reads this variable on Linux, too: without clusters of several hosts, its
            # processes listen on the loopback interface only.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            **QUIET,
            # Ray would start a worker for each core that it counts.
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            # On a busy machine, Ray's own processes start slowly.
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_agent_register_timeout_ms": "300000",
        }
