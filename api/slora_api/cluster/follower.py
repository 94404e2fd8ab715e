"""The process that keeps the list of engines of an API host up to date: `slora_api.cluster.follower --config JSON`.

It reads the registry in Ray's head and writes a file, so API processes never import Ray. While Ray's head is away, the
file keeps the last known engines.
"""

import argparse
import asyncio
import logging
import os
import sys

from ray._private.services import canonicalize_bootstrap_address

from slora_adapters.process.children import end_with_stdin
from slora_adapters.process.heartbeat import Heartbeat, WorkProgress
from slora_adapters.process.logs import LOG_FORMATS, set_up_logging
from slora_api.cluster.cluster_config import FollowerConfig
from slora_api.cluster.replica_registry import ReplicaRegistry, Sightings
from slora_api.core.threads import control_thread
from slora_api.processes.replica_list import write_replicas

logger = logging.getLogger("slora.follower")

_PERIOD_S = 0.25
_RETRY_S = 1.0


async def _follow(config: FollowerConfig) -> None:
    registry: ReplicaRegistry | None = None
    address, trouble, sightings = "", "", Sightings()
    while True:
        try:
            if (found := _find_address(config)) != address or registry is None:
                # Ray's head has been restarted elsewhere.
                registry = await control_thread(ReplicaRegistry, found, config.cluster_name)
                address, sightings = found, Sightings()
            entries = await control_thread(registry.list)
            await control_thread(write_replicas, config.replicas, sightings.select_alive(entries))
            if trouble:
                logger.info("the list of replicas can be read again")
            trouble = ""
        except FileNotFoundError:
            pass  # The local cluster is starting.
        except Exception as error:  # Ray's errors have no common class.
            if not trouble:
                logger.error("the list of replicas cannot be read, so the last one stays in use: %s", error)
            trouble = str(error)
            registry = None
        await asyncio.sleep(_RETRY_S if trouble else _PERIOD_S)


def _find_address(config: FollowerConfig) -> str:
    """Raises FileNotFoundError while a local cluster is starting."""
    if config.address_file is not None:
        return config.address_file.read_text(encoding="utf-8")
    address: str | None = canonicalize_bootstrap_address(config.address)
    if address is None:
        raise ConnectionError("no Ray runs on this host: start it, or give ray_address")
    return address


async def _run(config: FollowerConfig, heartbeat: Heartbeat) -> None:
    heartbeat.begin_serving()
    beating = asyncio.create_task(heartbeat.run(lambda: WorkProgress(0, is_busy=False)))
    try:
        await _follow(config)
    finally:
        beating.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description="Follows the replicas of a cluster of slora.")
    parser.add_argument("--config", required=True, help="FollowerConfig as JSON")
    parser.add_argument("--heartbeat", type=int, help="file descriptor of the shared page for heartbeats")
    parser.add_argument("--log-format", choices=LOG_FORMATS, default="text")
    arguments = parser.parse_args()
    set_up_logging(arguments.log_format, "follower")
    end_with_stdin()
    heartbeat = Heartbeat(arguments.heartbeat, computes_here=False)
    asyncio.run(_run(FollowerConfig.from_json(arguments.config), heartbeat))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
