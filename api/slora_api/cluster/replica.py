"""One replica, as the deployment that Ray Serve places, checks, scales and replaces.

Tokens do not pass through Ray: API processes connect to the engine directly. `generate` is for programs that already
run in the Ray cluster and call the deployment by its handle.

How many replicas the load needs. Ray's controller calls `choose_num_replicas` with what the replicas report.
"""

import asyncio
import json
import logging
import math
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingContext

from slora.client.client import RemoteEngine
from slora.core.engine_address import TcpAddress
from slora.core.engine_state import EngineInfo, EngineStats
from slora.core.errors import ConfigError, EngineUnavailable, SloraError
from slora.core.messages import decode_info, encode_info
from slora.core.request import EngineRequest, TokenDelta
from slora.core.usage_journal import UsageJournal
from slora_adapters.database.database import Database
from slora_adapters.process.children import ENGINE_VARIABLES, pass_on
from slora_api.adapters.base_model import BaseModelFiles, with_local_model
from slora_api.cluster.replica_registry import ANNOUNCE_S, ReplicaRegistry
from slora_api.core.data_dir import DataDir, store_url
from slora_api.core.settings import Settings, read_settings
from slora_api.core.threads import control_thread
from slora_api.processes.children import EnginePlace, Sockets, engine, loader
from slora_api.processes.replica_list import ListedReplica
from slora_api.processes.supervisor import Child, Supervisor
from slora_api.usage.usage_ledger import UsageLedger
from slora_api.usage.usage_shipper import UsageShipper

logger = logging.getLogger("slora.replica")

_BACKLOG = 128
# A draining engine waits up to 5 s for the API processes, and up to 10 s for its current step.
_STOP_S = 20.0


class ReplicaHost:
    """Runs the engine and the loader of one replica, on a thread with an event loop of its own.

    They are supervised as in `slora serve`: an engine that dies or stalls is restarted here, without Ray. Ray replaces
    the replica if its host or its actor is lost, or if the engine cannot start. `start` and `stop` may be called once.

    host: the address of this host at which the engine listens.
    """

    def __init__(self, settings: Settings, name: str, host: str, secret: bytes) -> None:
        self._settings = settings
        self._name = name
        self._failure: Exception | None = None
        self._stalls: dict[str, str] = {}
        # The engine inherits this socket, so it keeps its port when it is restarted.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.address = TcpAddress(host, self._listener.getsockname()[1], secret)
        # In memory, so that a lost replica leaves no copy on the disk.
        self._secret = os.memfd_create("slora-secret")
        os.write(self._secret, secret)
        self._loop = asyncio.SelectorEventLoop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="replica-host", daemon=True)

    @property
    def is_stalled(self) -> bool:
        return bool(self._stalls)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raises the reason if the replica has ended. The supervisor handles a stall, so a stall is no reason."""
        if self._failure is not None:
            raise self._failure
        if not self._thread.is_alive():
            raise SloraError(f"replica {self._name} has ended")

    def stop(self) -> None:
        """Drains the engine: other engines continue its requests. Returns when its processes have ended."""
        with suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_S)
        self._listener.close()
        os.close(self._secret)

    def _run(self) -> None:
        # Ray has set the policy of uvloop, which cannot start child processes from other loops than its own. The policy
        # does not concern loops that already run.
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        try:
            with ExitStack() as stack:
                directory = Path(tempfile.mkdtemp(prefix="slora-"))
                stack.callback(shutil.rmtree, directory, ignore_errors=True)
                self._loop.run_until_complete(self._serve(directory))
        except Exception as error:
            self._failure = error
            logger.error("replica %s ended: %s", self._name, error or type(error).__name__)
        finally:
            self._loop.close()

    async def _serve(self, directory: Path) -> None:
        data = DataDir(Path(self._settings.data_dir))
        data.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        supervisor = Supervisor(
            self._make_children(directory, data),
            self._settings.stall_seconds,
            self._stalls,
            lambda _name: None,
        )
        tasks = [asyncio.create_task(supervisor.run()), asyncio.create_task(self._stopping.wait())]
        if self._settings.database:
            tasks.append(asyncio.create_task(self._ship_usage(data)))
        running, stopping = tasks[:2]
        try:
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
            supervisor.stop()
            await running
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _make_children(self, directory: Path, data: DataDir) -> list[Child]:
        settings, model = self._settings, BaseModelFiles(self._settings)
        sockets, descriptors = Sockets(directory), (self._listener.fileno(), self._secret)
        listens = dict(zip(("listener", "secret"), descriptors, strict=True))
        place = EnginePlace("engine", listens, pass_on(os.environ, ENGINE_VARIABLES), descriptors)
        return [
            loader(settings, model, sockets, store_url(settings, data)),
            engine(settings, model, sockets, data, place),
        ]

    async def _ship_usage(self, data: DataDir) -> None:
        """Ships what the engine has recorded for API processes that died before they recorded it."""
        with ExitStack() as stack:
            database = await control_thread(Database, self._settings.database)
            stack.callback(database.close)
            journal = UsageJournal(data.usage)
            stack.callback(journal.close)
            shipper = UsageShipper(journal, data.usage, UsageLedger(database), retention_days=None)
            stack.callback(shipper.ship)
            await shipper.run()


_POLL_S = 0.05

PRESSURE = "slora_pressure"

# The load of a replica to which Ray scales.
TARGET_LOAD = 0.5


def measure_pressure(stats: EngineStats, max_num_seqs: int) -> float:
    """Returns the load of a replica, divided by the target, `TARGET_LOAD`.

    The load is the larger of two shares: the held pages of the pool, and the requests divided by the sequences of the
    largest batch.

    Worked example: 40% of the pages are held, 300 requests run or wait, and a batch has at most 256 sequences. The
    pressure is 300 / 256 / 0.5 = 2.34, so this load needs 2.34 times as many replicas.
    """
    requests = stats.running + stats.waiting + stats.awaiting_adapter
    load = max(stats.pages_held / stats.pages_total, requests / max_num_seqs)
    return load / TARGET_LOAD


def choose_num_replicas(context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
    """Returns the number of replicas at which each has the target load. Ray applies the bounds and the delays."""
    pressures = (context.aggregated_metrics or {}).get(PRESSURE, {})
    if not pressures:
        return context.target_num_replicas, {}
    mean = sum(pressures.values()) / len(pressures)
    # A replica that has just started has not reported yet. It counts with the mean of the others.
    return max(1, math.ceil(mean * context.current_num_replicas - 1e-6)), {}


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What every replica of a cluster is given.

    texts: settings, see `ClusterConfig.replica_texts`. They may contain passwords.
    host: the address at which engines listen; None for the address of each host within the cluster.
    """

    cluster_name: str
    version: str
    host: str | None
    texts: Mapping[str, str] = field(repr=False)
    secret: bytes = field(repr=False)


class EngineReplica:
    """The actor of one replica. Ray calls all methods on one event loop."""

    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Ray Serve awaits it.
        self._spec = spec
        self._name = serve.get_replica_context().replica_id.unique_id
        self._max_num_seqs = 0
        self._registry = ReplicaRegistry(ray.get_runtime_context().gcs_address, spec.cluster_name)
        settings, _ = await control_thread(
            with_local_model, read_settings(spec.texts, {}), spec.texts, logger.info
        )
        host = spec.host or ray.util.get_node_ip_address()
        self._host = ReplicaHost(settings, self._name, host, spec.secret)
        self._host.start()
        try:
            self._engine = RemoteEngine(self._host.address)
            self._connecting = asyncio.create_task(self._engine.run())
            while not self._engine.ready:
                self._host.check()
                await asyncio.sleep(_POLL_S)
            await self._refuse_stranger(self._engine.info)
        except BaseException:
            await control_thread(self._host.stop)
            raise
        self._announcing = asyncio.create_task(self._announce())

    async def _refuse_stranger(self, info: EngineInfo) -> None:
        """Raises ConfigError if this engine differs from the replicas that the cluster has.

        An upgrade then stops, and the old replicas go on.
        """
        own = json.dumps(encode_info(info))
        agreed = json.loads(await control_thread(self._registry.agree_on_facts, own))
        remedy = "end the cluster with `slora cluster stop` before you deploy it with these settings"
        try:
            difference = decode_info(agreed).explain_difference(info)
        except EngineUnavailable as error:
            raise ConfigError(f"the new replica cannot serve beside the others: {error}") from error
        if difference is not None:
            raise ConfigError(f"the new replica cannot serve beside the others: {difference}; {remedy}")

    async def _announce(self) -> None:
        for beat in count():
            listed = ListedReplica(
                self._name,
                self._host.address.host,
                self._host.address.port,
                self._spec.version,
                self._host.is_stalled,
            )
            try:
                await control_thread(self._registry.announce, listed, beat)
            except Exception as error:  # Ray's head is away. Its errors have no common class.
                logger.warning("replica %s cannot announce itself: %s", self._name, error)
            await asyncio.sleep(ANNOUNCE_S)

    async def check_health(self) -> None:
        """Raises an error if Ray must replace this replica."""
        self._host.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        try:
            stats = await self._engine.stats()
        except EngineUnavailable:  # It is being restarted.
            return {}
        pressure = measure_pressure(stats, self._engine.info.max_num_seqs)
        return {PRESSURE: pressure}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Reports to `AdapterRequestRouter` which adapters this replica has."""
        try:
            stats = await self._engine.stats()
        except EngineUnavailable:
            return {}
        return {
            "resident": [list(version) for version in stats.loaded_adapters],
            "waiting": stats.waiting,
            "running": stats.running,
        }

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:
        """Yields what the engine computes. The caller accounts for the usage: no tenant is billed."""
        async with aclosing(self._engine.generate(replace(request, account=""))) as deltas:
            async for arrived in deltas:
                yield arrived

    def __del__(self) -> None:
        """Ray Serve calls this once before it ends the replica, when no request by handle is left."""
        host = getattr(self, "_host", None)
        if host is None:
            return
        host.stop()
        if (announcing := getattr(self, "_announcing", None)) is not None:
            announcing.cancel()
            self._registry.withdraw(self._name)
