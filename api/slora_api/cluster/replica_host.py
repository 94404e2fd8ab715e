"""The processes of one replica: its engine and its loader, on the host where Ray has placed the replica.

They are supervised as in `slora serve`: an engine that dies or stalls is restarted here, without Ray. Ray replaces the
replica if its host or its actor is lost, or if the engine cannot start.
"""

import asyncio
import logging
import os
import shutil
import socket
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

from slora.core.engine_address import TcpAddress
from slora.core.errors import SloraError
from slora.core.usage_journal import UsageJournal
from slora_adapters.database.database import Database
from slora_adapters.process.children import ENGINE_VARIABLES, pass_on
from slora_api.adapters.base_model_files import BaseModelFiles
from slora_api.core.data_dir import DataDir, store_url
from slora_api.core.settings import Settings
from slora_api.core.threads import control_thread
from slora_api.serve.children import engine, loader
from slora_api.serve.sockets import Sockets
from slora_api.serve.supervisor import Child, Supervisor
from slora_api.usage.usage_ledger import UsageLedger
from slora_api.usage.usage_shipper import UsageShipper

logger = logging.getLogger("slora.replica")

_BACKLOG = 128
# A draining engine waits up to 5 s for the API processes, and up to 10 s for its current step.
_STOP_S = 20.0


class ReplicaHost:
    """Runs one replica on a thread with an event loop of its own. `start` and `stop` may be called once.

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
        place = dict(zip(("listener", "secret"), descriptors, strict=True))
        environment = pass_on(os.environ, ENGINE_VARIABLES)
        return [
            loader(settings, model, sockets, store_url(settings, data)),
            engine(settings, model, sockets, data, "engine", place, environment, descriptors=descriptors),
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
