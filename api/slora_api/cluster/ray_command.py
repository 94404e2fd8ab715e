"""The part of `slora deploy` and `slora cluster` that talks to Ray: a process that reads a `RayCommand` from its input.

It is a process of its own, because Ray reads its variables when it is imported.
"""

import os
import sys
import time
from dataclasses import asdict
from typing import Any

import ray

from slora.core.errors import ConfigError, SloraError
from slora.core.setting import SettingRefused
from slora_api.cli.output import print_json, print_records
from slora_api.cluster.cluster_config import ClusterConfig, RayCommand, read_cluster_settings
from slora_api.cluster.deployment import Cluster, Deployment, connect_to_ray
from slora_api.cluster.replica_registry import ANNOUNCE_S

_FAILED_EXIT, _REFUSED_EXIT = 1, 2


def _deploy(command: RayCommand) -> None:
    deployment = Deployment(ClusterConfig.read(command.texts, os.environ), command.host)
    version = deployment.apply()
    deployment.wait(version)
    print(f"slora: deployed; all replicas have version {version}", flush=True)


def _show(command: RayCommand, cluster: Cluster) -> None:
    """Prints the replicas. One that is silent may be lost: it has not announced itself while this command ran."""
    progress = cluster.progress()
    found: dict[str, Any] = {
        "cluster": cluster.name,
        "status": "not deployed" if progress is None else progress.status.lower(),
        "message": "" if progress is None else progress.message,
        "hosts": sum(node["Alive"] for node in ray.nodes()),
        "states": {} if progress is None else {name.lower(): n for name, n in progress.states.items()},
    }
    earlier = dict(cluster.registry.list())
    time.sleep(2 * ANNOUNCE_S)
    replicas = [
        {**asdict(one), "is_silent": earlier.get(one) == beat} for one, beat in cluster.registry.list()
    ]
    if command.as_json:
        print_json({**found, "replicas": replicas})
        return
    states = ", ".join(f"{count} {name}" for name, count in sorted(found["states"].items()))
    print(f"cluster {cluster.name}: {found['status']}; replicas: {states or 'none'}; hosts: {found['hosts']}")
    if found["message"]:
        print(found["message"])
    columns = {
        "replica": lambda one: one["name"],
        "address": lambda one: f"{one['host']}:{one['port']}",
        "version": lambda one: one["version"],
        "state": lambda one: "silent" if one["is_silent"] else "stalled" if one["is_stalled"] else "serves",
    }
    print_records(replicas, columns, as_json=False)


def _run(command: RayCommand) -> None:
    try:
        connect_to_ray(command.address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"Ray does not answer at {command.address} ({' '.join(str(error).split())}): run this on a host of the Ray "
            "cluster, and check ray_address; a local cluster needs the --data-dir of `slora deploy --local`"
        ) from error
    if command.name == "deploy":
        _deploy(command)
        return
    cluster = Cluster(read_cluster_settings(command.texts, os.environ).cluster_name)
    if command.name == "status":
        _show(command, cluster)
    else:
        cluster.delete()
        print(f"slora: all replicas of the cluster {cluster.name} have ended")


def main() -> int:
    try:
        _run(RayCommand.from_json(sys.stdin.read()))
    except (ConfigError, SettingRefused) as error:
        print(f"slora: {error}", file=sys.stderr)
        return _REFUSED_EXIT
    except (SloraError, OSError) as error:
        print(f"slora: {error}", file=sys.stderr)
        return _FAILED_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
