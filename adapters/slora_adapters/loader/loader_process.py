"""The loader process: `slora_adapters.loader.loader_process --config JSON`. It loads adapters on demand over a Unix
socket.

Each loader process creates its own arena. An engine that outlives the loader keeps its mapping of the old arena. So the
engine can never use offsets of one arena to read another.

The process exits when its standard input is closed, so it never outlives its parent. It prints nothing on standard
output. Exit code 2 means that the configuration can never work. Exit code 75 means that the store does not answer yet.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from slora_adapters.errors import StoreUnavailable, StoreUnfit
from slora_adapters.loader.host_cache import CachedAdapter, HostCache
from slora_adapters.loader.loader import LOADS_PER_TENANT, NUM_THREADS, Loader, ServedFormat
from slora_adapters.loader.loader_messages import (
    Message,
    decode_version,
    encode_cache,
    encode_failed,
    encode_hello,
    encode_loaded,
)
from slora_adapters.loader.source import FetchFailed
from slora_adapters.peft.adapter import AdapterLimits
from slora_adapters.peft.tensor_file import STORAGE
from slora_adapters.process.children import end_with_stdin
from slora_adapters.process.heartbeat import Heartbeat, WorkProgress
from slora_adapters.process.logs import LOG_FORMATS, set_up_logging
from slora_adapters.process.wire import BrokenFrame, read_message, write_message
from slora_adapters.store.store_url import open_store
from slora_adapters.version import AdapterVersion
from slora_kernels.layout import ModelShape

logger = logging.getLogger("slora.loader")

# A nice value that gives the engine priority on shared cores, so that a load does not delay the tokens of running
# requests. A load uses the CPU time that the engine leaves, but at least a tenth of a core.
_NICE = 10
_SWITCH_INTERVAL_S = 5e-4
# _REFUSED_EXIT: the configuration can never work; argparse exits with the same code. _TRY_LATER_EXIT: the store may
# answer later.
_REFUSED_EXIT = 2
_TRY_LATER_EXIT = os.EX_TEMPFAIL


@dataclass(frozen=True, slots=True)
class LoaderConfig:
    """Settings of a loader process, passed as one JSON object."""

    socket: Path  # path of the Unix socket to which engines connect
    store: str  # URL for `open_store`
    shape: ModelShape  # of the base model, as the engine determined it
    dtype: str  # of the base model
    warm: str | None = None  # URL of a warm tier for `open_store`
    host_cache_bytes: int = 2 << 30  # size of the arena that is shared with engines
    max_lora_rank: int = 64
    num_threads: int = NUM_THREADS
    loads_per_tenant: int = LOADS_PER_TENANT
    num_ranks: int = 1  # the number of tensor-parallel ranks of the engine

    def served(self) -> ServedFormat:
        limits = AdapterLimits(max_lora_rank=self.max_lora_rank, served_dtype=self.dtype)
        return ServedFormat(self.shape, self.dtype, limits, self.num_ranks)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "socket": str(self.socket)})

    @staticmethod
    def from_json(text: str) -> "LoaderConfig":
        """Parses a config. Raises ValueError if the text is not a valid config."""
        raw = json.loads(text)
        unknown = raw.keys() - {field.name for field in fields(LoaderConfig)}
        if unknown:
            raise ValueError(f"unknown loader settings: {', '.join(sorted(unknown))}")
        try:
            shape = ModelShape.from_plain(raw["shape"])
            config = LoaderConfig(**{**raw, "socket": Path(raw["socket"]), "shape": shape})
        except (KeyError, TypeError) as error:
            raise ValueError(f"loader settings are missing or have the wrong type: {error}") from error
        if config.dtype not in STORAGE:
            raise ValueError(f"dtype {config.dtype!r} is not one of {', '.join(STORAGE)}")
        return config


class _EngineClient:
    """One connected engine and its held copies. The copies are released when the engine disconnects."""

    def __init__(self, loader: Loader, writer: asyncio.StreamWriter) -> None:
        self._loader = loader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._held: defaultdict[AdapterVersion, list[CachedAdapter]] = defaultdict(list)
        self._gone = False
        # The number of cache changes up to the last message to the engine, and the cache content at that time.
        self._num_changes = 0
        self._told: dict[AdapterVersion, int] = {}

    def tell_cache(self) -> None:
        """Sends the changes of the cache since the last call."""
        found = self._loader.read_cache(self._num_changes)
        if found is None:
            return
        self._num_changes, contents = found
        added = [(version, size) for version, size in contents.items() if self._told.get(version) != size]
        removed = [version for version in self._told if version not in contents]
        self._told = contents
        write_message(self._writer, encode_cache(added, removed))

    def obey(self, message: Message) -> None:
        if message["op"] == "purge":
            self._loader.purge(str(message["tenant"]))
            return
        version = decode_version(message)
        match message["op"]:
            case "load":
                number = message["number"]
                self._loader.load(version, lambda result: self._call_in_loop(result, number))
            case "release":
                if self._held[version]:
                    self._loader.release(self._held[version].pop(0))
            case "discard":
                self._loader.discard(version)
            case op:
                raise BrokenFrame(f"an engine sent the unknown op {op!r}")

    def leave(self) -> None:
        self._gone = True
        for entries in self._held.values():
            for entry in entries:
                self._loader.release(entry)
        self._held.clear()

    def _call_in_loop(self, result: CachedAdapter | FetchFailed, number: int) -> None:
        """Sends the result of a load. May be called from any thread, because `Loader` calls it on its own threads or on
        the event loop.
        """
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._answer, result, number)

    def _answer(self, result: CachedAdapter | FetchFailed, number: int) -> None:
        if isinstance(result, FetchFailed):
            if not self._gone:
                write_message(self._writer, encode_failed(result, number))
        elif self._gone:
            self._loader.release(result)
        else:
            self._held[result.version].append(result)
            write_message(self._writer, encode_loaded(result, number, self._loader.paces))
        if not self._gone:
            self.tell_cache()


class LoaderServer:
    """Serves engines on a Unix socket, from one asyncio loop that only handles small frames."""

    def __init__(self, loader: Loader, cache: HostCache) -> None:
        self._loader = loader
        self._cache = cache

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one engine until it disconnects."""
        client = _EngineClient(self._loader, writer)
        try:
            _pass_descriptor(writer, self._cache.descriptor)
            write_message(writer, encode_hello(self._cache.num_bytes))
            client.tell_cache()
            while (message := await read_message(reader)) is not None:
                client.obey(message)
                client.tell_cache()
                await writer.drain()
        except (BrokenFrame, ConnectionError) as error:
            logger.error("the connection to an engine failed: %s", error)
        finally:
            client.leave()
            writer.close()


def _pass_descriptor(writer: asyncio.StreamWriter, descriptor: int) -> None:
    """Sends the descriptor with one byte. The transport has written nothing yet, so the byte is the first one that the
    engine receives.
    """
    transport_socket = writer.get_extra_info("socket")
    with socket.fromfd(transport_socket.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as plain:
        socket.send_fds(plain, [b"A"], [descriptor])


async def _serve(
    config: LoaderConfig, server: LoaderServer, heartbeat: Heartbeat, measure: Callable[[], WorkProgress]
) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    # Ctrl-C in a terminal signals this process too, but the parent decides when this process ends.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    config.socket.unlink(missing_ok=True)
    listener = await asyncio.start_unix_server(server.serve, config.socket)
    heartbeat.begin_serving()
    beating = asyncio.create_task(heartbeat.run(measure))
    await stopped.wait()
    beating.cancel()
    # Not `async with`: from Python 3.12 on, its exit waits until every engine has disconnected.
    listener.close()


def run(config: LoaderConfig, heartbeat: Heartbeat) -> None:
    """Serves until SIGTERM. Raises ValueError or StoreUnfit for a configuration that can never work."""
    store = open_store(config.store, config.warm)
    cache = HostCache(config.host_cache_bytes)
    loader = Loader(
        store,
        cache,
        config.served(),
        num_threads=config.num_threads,
        loads_per_tenant=config.loads_per_tenant,
    )
    asyncio.run(_serve(config, LoaderServer(loader, cache), heartbeat, loader.measure))
    loader.close()
    store.close()


def main() -> int:
    # An @file keeps the configuration out of the process list, because a store's URL may contain a password.
    description = (
        "The loader process of slora. `slora serve` starts it. @FILE reads arguments from the lines of a "
        "file."
    )
    parser = argparse.ArgumentParser(description=description, fromfile_prefix_chars="@")
    parser.add_argument("--config", required=True, help="LoaderConfig as JSON")
    parser.add_argument("--heartbeat", type=int, help="file descriptor of the shared page for heartbeats")
    parser.add_argument("--log-format", choices=LOG_FORMATS, default="text")
    # Between two pieces, a thread that hashes or copies needs the GIL for a moment. With the default interval, the
    # thread would wait 5 ms whenever another thread parses a header.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    os.nice(_NICE)
    arguments = parser.parse_args()
    set_up_logging(arguments.log_format, "loader")
    end_with_stdin()
    heartbeat = Heartbeat(arguments.heartbeat, computes_here=True)
    try:
        run(LoaderConfig.from_json(arguments.config), heartbeat)
    except (ValueError, StoreUnfit, StoreUnavailable, OSError) as error:
        logger.error("%s", error)
        heartbeat.explain(str(error))
        return _REFUSED_EXIT if isinstance(error, ValueError | StoreUnfit) else _TRY_LATER_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
