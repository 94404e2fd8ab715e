"""Ray on one machine, for `slora deploy --local`: `slora_api.cluster.local_ray --config PATH`.

This process starts Ray, deploys the replicas, and stays. Ray and the replicas end with it, however it ends. Ray listens
on the loopback interface only, and requires a token, because any program that can reach Ray can run code in it.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
from pathlib import Path

from ray._private.node import Node
from ray._private.parameter import RayParams

from slora.core.errors import ConfigError
from slora.core.setting import SettingRefused
from slora_adapters.process.children import end_with_stdin
from slora_adapters.process.heartbeat import Heartbeat, WorkProgress
from slora_adapters.process.logs import LOG_FORMATS, set_up_logging
from slora_api.cluster.cluster_config import ClusterConfig
from slora_api.cluster.deployment import DeployFailed, Deployment, connect_to_ray
from slora_api.cluster.local_cluster import LOCAL_HOST, LocalCluster
from slora_api.core.key_masking import mask_keys

logger = logging.getLogger("slora.ray")

_REFUSED_EXIT, _TRY_LATER_EXIT = 2, os.EX_TEMPFAIL
# Ray's object store holds nothing of slora. This is a little more than the least that Ray accepts.
_OBJECT_STORE_BYTES = 80_000_000
# Ray counts cores, but does not bind processes to them. On one machine, the number of replicas is the user's choice.
_NUM_CPUS = 4096


def _start_ray(directory: str) -> str:
    """Starts Ray and returns the address of its head. Ray ends with this process.

    `ray.init` would also start an autoscaler of hosts and a reader of logs, which one machine does not need.
    """
    parameters = RayParams(
        node_ip_address=LOCAL_HOST,
        num_cpus=_NUM_CPUS,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        dashboard_host=LOCAL_HOST,
        include_log_monitor=False,
        no_monitor=True,
        temp_dir=directory,
    )
    node = Node(parameters, head=True, shutdown_at_exit=True, spawn_reaper=True)
    address: str = node.gcs_address
    connect_to_ray(address)
    return address


def _run(local: LocalCluster, directory: str, heartbeat: Heartbeat) -> None:
    config = ClusterConfig.read(json.loads(local.config.read_bytes()), os.environ)
    address = _start_ray(directory)
    deployment = Deployment(config, LOCAL_HOST)
    version = deployment.apply()
    local.write_address(address)
    deployment.wait(version)
    heartbeat.begin_serving()
    asyncio.run(heartbeat.run(lambda: WorkProgress(0, is_busy=False)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Ray on one machine. `slora deploy --local` starts it.")
    parser.add_argument("--directory", type=Path, required=True, help="the folder of the local cluster")
    parser.add_argument("--ray-directory", required=True, help="where Ray keeps its logs and sockets")
    parser.add_argument("--heartbeat", type=int, help="file descriptor of the shared page for heartbeats")
    parser.add_argument("--log-format", choices=LOG_FORMATS, default="text")
    arguments = parser.parse_args()
    set_up_logging(arguments.log_format, "cluster", mask=mask_keys)
    heartbeat = Heartbeat(arguments.heartbeat, computes_here=False)
    end_with_stdin()
    try:
        _run(LocalCluster(arguments.directory), arguments.ray_directory, heartbeat)
    except (ConfigError, SettingRefused, DeployFailed) as error:
        logger.error("%s", error)
        heartbeat.explain(str(error))
        return _REFUSED_EXIT
    except Exception as error:  # Ray's errors have no common class. A busy machine starts Ray too slowly.
        logger.error("Ray did not start: %s", error)
        heartbeat.explain(f"Ray did not start: {error}")
        return _TRY_LATER_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
