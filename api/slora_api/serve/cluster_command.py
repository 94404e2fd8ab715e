"""`slora deploy` and `slora cluster`. This module does not import Ray, because its children need other variables.

Which versions of Ray this release works with. Ray's API of request routers is alpha, so any other may differ.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slora.core.errors import ConfigError, SloraError
from slora.core.setting import SettingRefused
from slora_api.cli.declaration import VARIABLES, argument, command, setting_flags
from slora_api.cluster.cluster_config import (
    ClusterConfig,
    FollowerConfig,
    RayCommand,
    read_cluster_file,
    read_cluster_settings,
    read_secret,
)
from slora_api.cluster.local_cluster import LOCAL_HOST, QUIET, LocalCluster
from slora_api.core.data_dir import find_lock_holder
from slora_api.core.settings import cluster_setting_specs, server_setting_specs
from slora_api.processes.replica_list import ReplicaListFiles
from slora_api.processes.supervisor import Child
from slora_api.serve.host import ClusterEngines
from slora_api.serve.serve import run_server

_Command = Callable[[argparse.Namespace], int]

_SERIES = "2.60"


def check_ray_version(version: str) -> None:
    """Raises ConfigError for a Ray that is too old or too new."""
    if version.split(".")[:2] != _SERIES.split("."):
        raise ConfigError(
            f"Ray {version} is installed, but this release needs Ray {_SERIES}: run pip install 'slora[ray]' on every "
            "host of the cluster"
        )


def _explained(command: _Command) -> _Command:
    """Prints the reason of a failure instead of a traceback."""

    @wraps(command)
    def run(arguments: argparse.Namespace) -> int:
        try:
            check_ray_version(version("ray"))
            return command(arguments)
        except PackageNotFoundError:
            print("slora: this command needs the package ray: pip install 'slora[ray]'", file=sys.stderr)
            return 2
        except (ConfigError, SettingRefused) as error:
            print(f"slora: {error}", file=sys.stderr)
            return 2
        except (SloraError, OSError) as error:
            print(f"slora: {error}", file=sys.stderr)
            return 1

    return run


_FILE = argument(
    "file", nargs="?", metavar="FILE", help="cluster file: YAML with settings, which flags override"
)
_SPECS = (*cluster_setting_specs(), *server_setting_specs())
# Settings by which a command finds a running cluster.
_PLACE = setting_flags([spec for spec in _SPECS if spec.name in ("cluster_name", "ray_address", "data_dir")])


@command(
    "deploy",
    None,
    argument(
        "--local",
        action="store_true",
        help="start Ray, the engines and an API server on this machine; if they run on --data-dir already, change them",
    ),
    _FILE,
    setting_flags(_SPECS),
    epilog=VARIABLES,
)
@_explained
def deploy(arguments: argparse.Namespace) -> int:
    texts = _read_texts(arguments)
    config = ClusterConfig.read(texts, os.environ)
    local = _find_local(texts)
    if local is None and arguments.local:
        return _serve_locally(config)
    exit_code = _call_ray("deploy", texts, local)
    if local is not None and exit_code == 0:
        local.write(config)  # A restart of Ray takes these settings, too.
    return exit_code


@command(
    "cluster serve",
    "run an API server that uses the engines of a cluster",
    _FILE,
    setting_flags(_SPECS),
    epilog=VARIABLES,
)
@_explained
def serve(arguments: argparse.Namespace) -> int:
    texts = _read_texts(arguments)
    config = ClusterConfig.read(texts, os.environ)
    read_secret(config)
    return _run_server(config, [], os.environ, config.cluster.ray_address, None)


@command("cluster status", "show the replicas of a cluster", _FILE, _PLACE, epilog=VARIABLES, has_json=True)
@_explained
def show(arguments: argparse.Namespace) -> int:
    texts = _read_texts(arguments)
    return _call_ray("status", texts, _find_local(texts), as_json=arguments.json)


@command("cluster stop", "drain and end all replicas of a cluster", _FILE, _PLACE, epilog=VARIABLES)
@_explained
def stop(arguments: argparse.Namespace) -> int:
    texts = _read_texts(arguments)
    return _call_ray("stop", texts, _find_local(texts))


def _read_texts(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the settings of the cluster file and the flags. A flag takes precedence."""
    texts = read_cluster_file(Path(arguments.file)) if arguments.file else {}
    for spec in _SPECS:
        if (text := getattr(arguments, spec.name, None)) is not None:
            texts[spec.name] = text
    return texts


def _find_local(texts: Mapping[str, str]) -> LocalCluster | None:
    """Returns the local cluster that runs on the data directory; None if there is none."""
    data_dir = Path(texts.get("data_dir") or os.environ.get("SLORA_DATA_DIR") or "data").resolve()
    local = LocalCluster.of(data_dir)
    return local if local.config.exists() and find_lock_holder(data_dir) is not None else None


def _call_ray(
    name: str, texts: Mapping[str, str], local: LocalCluster | None, *, as_json: bool = False
) -> int:
    """Runs a `RayCommand` in a process with the variables that Ray needs. Returns its exit code."""
    variables: Mapping[str, str] = QUIET
    if local is None:
        command = RayCommand(name, texts, read_cluster_settings(texts, os.environ).ray_address, None, as_json)
    else:
        variables = local.variables()
        command = RayCommand(name, texts, local.read_address(), LOCAL_HOST, as_json)
    return subprocess.run(
        [sys.executable, "-P", "-m", "slora_api.cluster.ray_command"],
        input=command.to_json(),
        env={**os.environ, **variables},
        check=False,
        encoding="utf-8",
    ).returncode


def _serve_locally(config: ClusterConfig) -> int:
    """Runs a server and, below it, Ray with the replicas."""
    local = LocalCluster.of(config.data_dir)
    local.create(config)
    read_secret(config, create=True)
    environment = {**os.environ, **local.variables()}
    # Not in the data directory: the path of a Unix socket may have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="slora-ray-", ignore_cleanup_errors=True) as directory:
        # The settings are in a file, which only the owner can read.
        arguments = ["--log-format", config.server.log_format, "--directory", str(local.directory)]
        arguments += ["--ray-directory", directory]
        head = Child(
            "Ray cluster", "slora_api.cluster.local_ray", arguments, environment, waits_for_others=True
        )
        return _run_server(config, [head], environment, "", local.address_file)


def _run_server(
    config: ClusterConfig,
    children: list[Child],
    environment: Mapping[str, str],
    address: str,
    address_file: Path | None,
) -> int:
    files = ReplicaListFiles(config.data_dir / "cluster" / "replicas.json", config.secret_file)
    files.replicas.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    follower = FollowerConfig(config.cluster.cluster_name, address, address_file, files.replicas)
    arguments = ["--log-format", config.server.log_format, "--config", follower.to_json()]
    children.append(
        Child(
            "cluster follower",
            "slora_api.cluster.follower",
            arguments,
            environment,
            waits_for_others=True,
        )
    )
    return run_server(config.server, config.texts, ClusterEngines(files, children))
