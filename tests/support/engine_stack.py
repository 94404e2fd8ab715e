"""The loader and the engine as separate processes, as in production, over a file store that holds a kit's adapters."""

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgpack

from slora.client.client import RemoteEngine
from slora.client.replica_group import ReplicaGroup
from slora.core.messages import Message, unpack
from slora.core.request import TokenDelta
from slora_adapters.loader.loader_process import LoaderConfig
from slora_adapters.peft.adapter import AdapterLimits, bundle
from slora_adapters.peft.peft_directory import read_adapter
from slora_adapters.process.wire import encode
from slora_adapters.store.file_store import FileStore
from slora_adapters.version import AdapterVersion
from tests.support.engine_zygote import ForkedModule
from tests.support.model_kit import ModelKit
from tests.support.slow_engine import VARIABLE, slowed

# The longest that a test waits for an expected event. A busy machine needs a minute to start an engine.
WAIT_S = 300.0
_ROOT = Path(__file__).parents[2]
_SLOW_FILE = "slow"
SOURCES = os.pathsep.join(str(_ROOT / folder) for folder in (".", "kernels", "adapters", "api"))


def over_the_wire(message: Message) -> Any:
    """Returns the message as the other end gets it."""
    return unpack(msgpack.unpackb(encode(message.pack())[4:], strict_map_key=False))


class ChildProcess:
    """Runs `python -P -m module` with a pipe to its stdin, as the supervisor does."""

    def __init__(self, module: str, config: str, log: Path) -> None:
        self._log = log
        environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
        environment[VARIABLE] = str(log.with_name(_SLOW_FILE))
        with log.open("ab") as errors:
            self._process = ForkedModule(
                module, "--config", config, environment=environment, errors=errors.fileno(), sources=SOURCES
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close_stdin(self) -> None:
        self._process.stdin.close()

    def wait(self) -> int:
        """Waits for the exit and returns the exit code. Standard output must be empty."""
        code = self._process.wait(WAIT_S)
        self._process.stdin.close()
        with self._process.stdout as output:
            assert output.read() == b""
        return code

    def kill(self) -> None:
        self._process.kill()
        self.wait()


class EngineStack:
    """One loader and one engine. versions: adapter versions of the kit by kind. They belong to the tenant `tenant`."""

    def __init__(self, root: Path, kit: ModelKit, num_pages: int, **settings: int | str) -> None:
        self.socket = root / "engine.sock"
        self.usage_directory = root / "usage"
        self._root = root
        self._kit = kit
        self._loader_socket = root / "loader.sock"
        pool_bytes = kit.pool_bytes(num_pages)
        self._settings = {"device": "cpu", "dtype": "float32", "pool_bytes": pool_bytes}
        self._settings |= settings
        self._shape = kit.spec.shape("float32")
        self.store = FileStore(root / "store")
        self.versions = {kind: self.put(path) for kind, path in kit.adapters.items()}
        self.loader: ChildProcess | None = None
        self.engine: ChildProcess | None = None

    def put(self, directory: Path, tenant: str = "tenant") -> AdapterVersion:
        adapter = read_adapter(directory, self._shape, AdapterLimits())
        self.store.put(adapter.digest, bundle(adapter, directory, self._root))
        return AdapterVersion(tenant, adapter.digest)

    def ensure_running(self) -> None:
        """Starts the processes that do not run."""
        self.start_loader()
        if self.engine is None or not self.engine.running:
            self.engine = self.start_engine()

    def start_loader(self) -> None:
        """Starts the loader if it does not run."""
        if self.loader is None or not self.loader.running:
            config = LoaderConfig(
                self._loader_socket,
                store=str(self._root / "store"),
                shape=self._shape,
                dtype="float32",
                host_cache_bytes=16 << 20,
                num_ranks=int(self._settings.get("tensor_parallel_size", 1)),
            )
            self.loader = self._start("slora_adapters.loader.loader_process", config.to_json())

    def start_engine(
        self, module: str = "slora.engine.process", socket: Path | None = None, **settings: int | str
    ) -> ChildProcess:
        engine = {"model": str(self._kit.directory), **self._settings, **settings}
        paths = {
            "socket": str(socket or self.socket),
            "loader_socket": str(self._loader_socket),
            "usage_directory": str(self.usage_directory),
        }
        return self._start(module, json.dumps({**paths, "engine": engine}))

    def slowed(self) -> AbstractContextManager[None]:
        """Slows the engines down, so that a long stream that begins in the context does not end in it."""
        return slowed(self._root / _SLOW_FILE)

    def stop(self) -> None:
        for process in (self.engine, self.loader):
            if process is not None and process.running:
                process.kill()

    def _start(self, module: str, config: str) -> ChildProcess:
        return ChildProcess(module, config, self._root / f"{module}.log")


@contextmanager
def open_stack(kit: ModelKit, num_pages: int, **settings: int | str) -> Iterator[EngineStack]:
    """A stack whose processes the test starts."""
    # Not tmp_path, because the path of a Unix socket may have at most 107 bytes.
    with tempfile.TemporaryDirectory() as root:
        stack = EngineStack(Path(root), kit, num_pages, **settings)
        try:
            yield stack
        finally:
            stack.stop()


@asynccontextmanager
async def connect(stack: EngineStack, *, until_ready: bool = True) -> AsyncIterator[RemoteEngine]:
    """A client of the stack's engine. By default it is connected."""
    client = RemoteEngine(stack.socket)
    running = asyncio.create_task(client.run())
    try:
        if until_ready:
            await wait_until(lambda: client.ready)
        yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {WAIT_S} s"
        await asyncio.sleep(0.005)


async def one_by_one(stream: AsyncGenerator[list[TokenDelta], None]) -> AsyncGenerator[TokenDelta, None]:
    """The deltas of `EngineClient.generate` one at a time. Closing it closes the stream."""
    async with aclosing(stream):
        async for arrived in stream:
            for delta in arrived:
                yield delta


def find_owner(group: ReplicaGroup, request_id: str) -> str | None:
    """The name of the replica that computes a request now; None if none does."""
    answer = group.answers.get(request_id)
    return None if answer is None else answer.settlement.owner
