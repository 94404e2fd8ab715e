"""The engine as a process: `slora.engine.process --config JSON`.

It receives commands and sends tokens over a Unix socket, or over TCP for API processes of other hosts. The main thread
runs an asyncio loop that only moves frames. A second thread owns the engine. The process stops when its standard input
closes, so it does not outlive its parent. It prints nothing on standard output.
"""

import gc

if __name__ == "__main__":
    # Garbage collection stays off until all modules are imported. It would take a sixth of the import time and find no
    # garbage.
    gc.disable()

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from slora.core.engine_address import MAX_SECRET_BYTES, Doorkeeper, detect_dead_peer
from slora.core.engine_config import EngineConfig
from slora.core.engine_state import EngineReport
from slora.core.errors import ConfigError
from slora.core.messages import (
    Abort,
    Add,
    Begun,
    Call,
    Command,
    Drain,
    InvalidMessage,
    Message,
    Outputs,
    Recorded,
    Release,
    Reply,
    Report,
    Served,
    Status,
    Usage,
    encode_info,
    unpack,
)
from slora.core.request import EndedRequest, StepOutput, TokenDelta
from slora.core.usage_journal import UsageJournal
from slora.engine.engine import Engine
from slora.engine.usage_relay import UsageRelay
from slora.engine.worker import EngineWorker, Stop, Wake
from slora.memory.host_memory import PageLockedMemory
from slora.models.model_spec import read_model_spec
from slora.runner.model_part import resolve_device
from slora.runner.process_group import RankGroup, start_group
from slora_adapters.loader.loader_client import LoaderClient
from slora_adapters.peft.packing import ByteArray
from slora_adapters.process.heartbeat import Heartbeat
from slora_adapters.process.logs import LOG_FORMATS, set_up_logging
from slora_adapters.process.wire import BrokenFrame, read_message, write_message

_log = logging.getLogger("slora.engine")
# The number of new objects after which Python collects garbage. A step of 256 sequences creates about 1,500 objects,
# which live only until the next step. With Python's default, each step collects garbage once or twice.
NEW_OBJECTS = 10_000

# An API process with more unread bytes is stuck. Keeping more frames for it would use up the engine's memory. With a
# smaller limit, one tenant could end the connection: 256 answers of 262,144 log-probabilities each have 940 MB.
_MAX_UNREAD_BYTES = 1 << 30
# Exit code: the engine can never work with this model or these settings. Argparse uses the same code for bad arguments.
_REFUSED_EXIT = 2
_BROKEN_EXIT = os.EX_SOFTWARE
_PATHS = ("socket", "loader_socket", "usage_directory")
# Maximum time that a stopping engine waits for its current step.
_MAX_STOP_S = 10.0
# Maximum time that a stopping engine waits for API processes that have not released its requests.
_MAX_DRAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """Settings of the engine process."""

    socket: Path | None  # The path at which the engine listens for API processes; None if it listens on TCP.
    loader_socket: Path  # The path at which the loader listens.
    # The directory of the usage journal, which the API processes of this host write to as well.
    usage_directory: Path
    engine: EngineConfig
    # Inherited descriptors: of a listening TCP socket, and of memory with the secret that its connections must prove
    # to know.
    listener: int | None = None
    secret: int | None = None

    @staticmethod
    def from_json(text: str) -> "ProcessConfig":
        """Reads the settings from JSON. Raises ConfigError for a setting that is unknown, missing or invalid."""
        raw = json.loads(text)
        _refuse_unknown("the engine process", raw, {field.name for field in fields(ProcessConfig)})
        _refuse_unknown("the engine", raw["engine"], {field.name for field in fields(EngineConfig)})
        settings = {**raw["engine"], "model": Path(raw["engine"]["model"])}
        paths = {name: Path(raw[name]) for name in _PATHS if raw.get(name) is not None}
        return ProcessConfig(**{"socket": None, **raw, **paths, "engine": EngineConfig(**settings)})


def _refuse_unknown(owner: str, settings: Mapping[str, object], known: Collection[str]) -> None:
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise ConfigError(
            f"{owner} has no setting {', '.join(unknown)}; the API and the engine must be from the "
            "same installation"
        )


class _Peer:
    """One connected API process. The engine knows its requests as `<peer number>:<request id>`.

    num_taken: number of its requests that the engine's thread has taken.
    """

    def __init__(self, number: int, writer: asyncio.StreamWriter, relay: UsageRelay) -> None:
        self.number = number
        self.relay = relay
        self.num_taken = 0
        # The number of each request that is not taken yet, among those of all API processes.
        self._posted: deque[int] = deque()
        self._writer = writer

    def engine_id(self, request_id: str) -> str:
        return f"{self.number}:{request_id}"

    def send(self, message: Message) -> None:
        self.send_frame(message.pack())

    def send_frame(self, frame: Mapping[str, object]) -> None:
        """Sends a frame. Never waits: the transport keeps what the API process has not read."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            _log.error(
                "API process %d has more than %d unread bytes: closing its connection",
                self.number,
                _MAX_UNREAD_BYTES,
            )
            # Not close(): close() would wait until the peer has read frames that it never reads.
            transport.abort()
            return
        write_message(self._writer, frame)

    def note_posted(self, number: int) -> None:
        """Adds a request. It is taken as soon as the engine's thread has taken `number` requests of all processes."""
        self._posted.append(number)

    def note_taken(self, number: int) -> None:
        while self._posted and self._posted[0] <= number:
            self._posted.popleft()
            self.num_taken += 1


class EngineServer:
    """Moves frames between the API processes and the engine's worker. Runs on the asyncio loop.

    journal: for the usage that no API process has recorded.
    on_stop: called when an API process asks the engine to drain and to end.
    """

    def __init__(
        self,
        worker: EngineWorker,
        hello: Mapping[str, object],
        loader_connected: Callable[[], bool],
        journal: UsageJournal,
        on_stop: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._journal = journal
        self._on_stop = on_stop
        # Peer number -> relay. The peer may have disconnected.
        self.relays: dict[int, UsageRelay] = {}
        self._hello = hello
        self._loader_connected = loader_connected
        self.peers: dict[int, _Peer] = {}
        self._num_peers = self._num_posted = 0
        self._report = EngineReport()
        # Identifies this start of the engine in reports.
        self._engine = secrets.token_hex(8)
        self.is_draining = False
        # Set after each message of an API process, and when one has disconnected.
        self._received = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one API process for as long as it is connected, then aborts its unfinished requests."""
        self._num_peers += 1
        relay = self.relays[self._num_peers] = UsageRelay(self._journal)
        peer = self.peers[self._num_peers] = _Peer(self._num_peers, writer, relay)
        peer.send_frame(self._hello)
        peer.send(self._status())
        self._send_report([peer], replace(self._report, spans=()), EngineReport())
        try:
            while (frame := await read_message(reader)) is not None:
                self._handle(peer, frame)
                self._received.set()
        except (BrokenFrame, InvalidMessage) as error:
            _log.error("API process %d: %s", peer.number, error)
        except ConnectionError as error:
            _log.info("API process %d disconnected: %s", peer.number, error)
        finally:
            del self.peers[peer.number]
            self._abandon(peer)
            self._received.set()
            writer.close()

    async def drain(self) -> None:
        """Asks the API processes to release all requests, so that other engines continue them. Returns when no request
        is left, or after a few seconds.
        """
        self.is_draining = True
        self.broadcast_status()
        with suppress(TimeoutError):
            async with asyncio.timeout(_MAX_DRAIN_S):
                while not all(peer.relay.is_empty for peer in self.peers.values()):
                    self._received.clear()
                    await self._received.wait()

    def abandon_all(self) -> None:
        """Aborts all requests. The engine records all usage that no API process has acknowledged."""
        for peer in self.peers.values():
            self._abandon(peer)

    def _abandon(self, peer: _Peer) -> None:
        peer.relay.abandon()
        for request_id in peer.relay.unfinished:
            self._worker.post(Abort(peer.engine_id(request_id)))
        self._drop_finished_relay(peer.number)

    def _drop_finished_relay(self, number: int) -> None:
        if number not in self.peers and not self.relays[number].unfinished:
            del self.relays[number]

    def deliver(self, outputs: list[StepOutput], ended: list[EndedRequest]) -> None:
        """Sends the outputs of one step, in one frame for each API process that has outputs in this step.

        The usage of ended requests is sent first.

        A complete choice, as from beam search, gets a frame of its own, and so does an embedding. All choices of a
        beam search together could exceed the limit of one frame, and so could all embeddings of a step. All other
        outputs of a step together have at most `max_num_seqs` tokens, accepted drafts included.
        """
        self._deliver_usage(ended)
        rows: dict[int, list[list[Any]]] = {}
        for output in outputs:
            number, request_id = _split_id(output.request_id)
            peer = self.peers.get(number)
            if peer is None:
                continue
            row = output.to_row(request_id)
            if output.delta is not None and _is_whole(output.delta):
                peer.send(Outputs([row]))
            else:
                rows.setdefault(number, []).append(row)
        for number, batch in rows.items():
            self.peers[number].send(Outputs(batch))

    def _deliver_usage(self, ended: list[EndedRequest]) -> None:
        ended_by_peer: dict[int, list[EndedRequest]] = {}
        for request in ended:
            number, request_id = _split_id(request.request_id)
            ended_by_peer.setdefault(number, []).append(request._replace(request_id=request_id))
        for number, batch in ended_by_peer.items():
            relay = self.relays.get(number)
            if relay is None:  # The peer released these requests, and disconnected.
                continue
            for request_id, usage, _ in batch:
                relay.end(request_id, usage)
            if number in self.peers:
                self.peers[number].send(Usage(batch))
            else:
                self._drop_finished_relay(number)

    def deliver_begun(self, engine_ids: list[str]) -> None:
        """Tells the API processes which of their requests the engine has begun."""
        ids_by_peer: dict[int, list[str]] = {}
        for number, request_id in map(_split_id, engine_ids):
            ids_by_peer.setdefault(number, []).append(request_id)
        for number, ids in ids_by_peer.items():
            if number in self.peers:
                self.peers[number].send(Begun(ids))

    def deliver_report(self, report: EngineReport) -> None:
        self._send_report(self.peers.values(), report, self._report)
        self._report = report

    def _send_report(self, peers: Iterable[_Peer], report: EngineReport, last: EngineReport) -> None:
        message = Report.since(last, report, self._engine)
        for peer in peers:
            peer.note_taken(report.num_taken)
            peer.send(replace(message, num_taken=peer.num_taken))

    def broadcast_status(self) -> None:
        for peer in self.peers.values():
            peer.send(self._status())

    def _status(self) -> Status:
        return Status(self._loader_connected(), self.is_draining)

    def _handle(self, peer: _Peer, frame: dict[str, Any]) -> None:
        match unpack(frame):
            case Add(request):
                peer.relay.add(request.request_id, request)
                self._num_posted += 1
                peer.note_posted(self._num_posted)
                self._worker.post(Add(replace(request, request_id=peer.engine_id(request.request_id))))
            case Abort(request_id, index):
                self._worker.post(Abort(peer.engine_id(request_id), index))
            case Call() as call:
                number = frame.get("number")
                if not isinstance(number, int):
                    raise InvalidMessage(f"the peer sent a {type(call).__name__} without a number")
                self._worker.post(call, partial(_reply_in, asyncio.get_running_loop(), peer, number))
            case Command() as command:
                self._worker.post(command)
            case Release(request_ids):
                for request_id in request_ids:
                    peer.relay.release(request_id)
                    self._worker.post(Abort(peer.engine_id(request_id)))
            case Recorded(request_ids):
                for request_id in request_ids:
                    peer.relay.acknowledge(request_id)
            case Served(engine, spans):
                self._worker.add_service_elsewhere(engine, spans)
            case Drain():
                self._on_stop()
            case other:
                raise InvalidMessage(f"an engine does not receive the op {type(other).__name__}")


def _is_whole(delta: TokenDelta) -> bool:
    """Whether the delta is an embedding, or may be a complete choice."""
    is_choice = delta.finish_reason is not None and len(delta.token_ids) > 1
    return is_choice or delta.embedding is not None


def _split_id(engine_id: str) -> tuple[int, str]:
    """Returns the number of the API process, and its own id for the request."""
    number, request_id = engine_id.split(":", 1)
    return int(number), request_id


def _reply_in(loop: asyncio.AbstractEventLoop, peer: _Peer, number: int, result: object) -> None:
    _call_in(loop, lambda: peer.send(Reply(number, result)))


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Schedules `call` on the loop, from the engine's thread. A closed loop has no peers left, so `call` is dropped."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


class EngineProcess:
    """Connects worker, loader client and socket server. The worker's thread builds the engine and runs its steps."""

    def __init__(self, config: ProcessConfig, heartbeat: Heartbeat, log_format: str) -> None:
        self._config = config
        self._log_format = log_format
        self._heartbeat = heartbeat
        self._loop = asyncio.new_event_loop()
        self._worker = EngineWorker(self._deliver, self._deliver_begun, self._deliver_report)
        self._server: EngineServer | None = None
        self._started: asyncio.Future[Engine] = self._loop.create_future()
        self._stopped = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        # Set once the usage of the last requests is on the disk.
        self._has_recorded = threading.Event()
        self._thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        self._loader: LoaderClient | None = None

    def run(self) -> int:
        """Serves until SIGTERM, then drains: other engines continue the requests in progress. Returns the exit code."""
        self._thread.start()
        try:
            self._loop.run_until_complete(self._serve())
        except ConfigError as error:
            _log.error("%s", error)
            self._heartbeat.explain(str(error))
            return _REFUSED_EXIT
        except Exception as error:
            _log.critical("the engine could not start", exc_info=True)
            self._heartbeat.explain(f"the engine could not start: {type(error).__name__}: {error}")
            return _BROKEN_EXIT
        return 0

    def end_with_stdin(self) -> None:
        """Stops this process when its standard input closes, which happens when the parent process ends.

        Before that, it drains: API processes on other hosts live on, and continue their requests on other engines. Then
        it tries for a few seconds to record the usage that no API process has recorded.
        """

        def watch() -> None:
            # Read the descriptor, not sys.stdin: if a thread holds the lock of sys.stdin at exit, Python aborts.
            while os.read(0, 4096):
                pass
            if self._server is not None:
                _call_in(self._loop, self._begin_stop)
                self._has_recorded.wait(_MAX_DRAIN_S + _MAX_STOP_S)
            os._exit(0)

        threading.Thread(target=watch, name="parent-watch", daemon=True).start()

    async def _serve(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            # SIGINT is ignored: Ctrl-C in a terminal reaches this process too, but its parent decides when it ends.
            self._loop.add_signal_handler(number, self._begin_stop if number == signal.SIGTERM else _ignore)
        beating = asyncio.create_task(self._heartbeat.run(self._worker.measure))
        engine = await self._started
        # A thread that waits for a GPU spins, so its CPU time is no sign of progress.
        self._heartbeat.computes_here = engine.info.device == "cpu"
        journal = UsageJournal(self._config.usage_directory)
        self._server = EngineServer(
            self._worker, encode_info(engine.info), self._loader_connected, journal, self._begin_stop
        )
        self._worker.post(Wake())  # The first report may have come before the server existed.
        server = await _listen(self._config, self._server)
        watcher = asyncio.create_task(self._watch_loader(self._server))
        self._heartbeat.begin_serving()
        await self._stopped.wait()
        watcher.cancel()
        beating.cancel()
        # Not `async with server`: since Python 3.12 that waits until every API process has disconnected.
        server.close()
        self._server.abandon_all()
        self._worker.post(Stop())
        # The loop keeps running: it receives the usage of the aborted requests.
        await asyncio.to_thread(self._thread.join, _MAX_STOP_S)
        await asyncio.to_thread(journal.close)
        self._has_recorded.set()

    def _begin_stop(self) -> None:
        if self._stopping is None:
            self._stopping = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        if self._server is not None:
            await self._server.drain()
        self._stopped.set()

    def _run_engine(self) -> None:
        """The body of the engine's thread. An escaped exception ends the process, and its parent starts a new one."""
        try:
            config = self._config
            model = read_model_spec(config.engine.model, config.engine.model_impl)
            group = start_group(config.engine, model, self._end_after_loss, self._log_format)
            self._loader = _connect_loader(config, self._wake, group)
            engine = Engine(config.engine, model, self._loader, notify=self._wake, group=group)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._started.set_exception, error)
            return
        self._loop.call_soon_threadsafe(self._started.set_result, engine)
        try:
            self._worker.run(engine)
            engine.close()
        except BaseException as error:
            _log.critical("the engine failed; this process exits", exc_info=True)
            self._heartbeat.explain(f"the engine failed: {type(error).__name__}: {error}")
            os._exit(_BROKEN_EXIT)

    def _end_after_loss(self, reason: str) -> None:
        """Ends this process because another rank has ended. This thread may wait for that rank without a limit."""
        _log.critical("%s; this process exits", reason)
        self._heartbeat.explain(f"the engine failed: {reason}")
        os._exit(_BROKEN_EXIT)

    def _deliver(self, outputs: list[StepOutput], ended: list[EndedRequest]) -> None:
        """Passes the outputs of a step to the server's loop. Called on the engine's thread."""
        if self._server is not None:
            server = self._server
            _call_in(self._loop, lambda: server.deliver(outputs, ended))

    def _deliver_begun(self, engine_ids: list[str]) -> None:
        if self._server is not None:
            server = self._server
            _call_in(self._loop, lambda: server.deliver_begun(engine_ids))

    def _deliver_report(self, report: EngineReport) -> None:
        if self._server is not None:
            server = self._server
            _call_in(self._loop, lambda: server.deliver_report(report))

    def _wake(self) -> None:
        """Tells the engine that an adapter or a grammar has arrived. May be called from any thread."""
        self._worker.post(Wake())

    def _loader_connected(self) -> bool:
        return self._loader is not None and self._loader.connected

    async def _watch_loader(self, server: EngineServer) -> None:
        known = self._loader_connected()
        while True:
            await asyncio.sleep(0.05)
            if self._loader_connected() != known:
                known = not known
                _log.warning("loader %s", "connected" if known else "lost")
                server.broadcast_status()


async def _listen(config: ProcessConfig, server: EngineServer) -> asyncio.Server:
    if config.socket is not None:
        config.socket.unlink(missing_ok=True)
        return await asyncio.start_unix_server(server.serve, config.socket)
    assert config.listener is not None and config.secret is not None, "neither a path nor a listener"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        detect_dead_peer(writer)
        await server.serve(reader, writer)

    # The descriptor stays open: the supervisor passes it on to the next engine, which reads it from the start.
    doorkeeper = Doorkeeper(os.pread(config.secret, MAX_SECRET_BYTES, 0), serve)
    return await asyncio.start_server(doorkeeper.admit, sock=socket.socket(fileno=config.listener))


def _connect_loader(config: ProcessConfig, notify: Callable[[], None], group: RankGroup) -> LoaderClient:
    """Makes the client of the loader. Raises ConfigError if the machine does not have the configured device."""
    on_gpu = resolve_device(config.engine.device, config.engine.kernels).type == "cuda"

    def prepare_arena(arena: ByteArray, descriptor: int) -> PageLockedMemory | None:
        group.share_arena(arena, descriptor)
        return PageLockedMemory(arena) if on_gpu else None

    return LoaderClient(config.loader_socket, notify=notify, on_arena=prepare_arena)


def _ignore() -> None:
    pass


def main() -> int:
    parser = argparse.ArgumentParser(description="The engine process of slora. `slora serve` starts it.")
    parser.add_argument("--config", required=True, help="ProcessConfig as JSON")
    parser.add_argument("--heartbeat", type=int, help="file descriptor of the shared page for heartbeats")
    parser.add_argument("--log-format", choices=LOG_FORMATS, default="text")
    arguments = parser.parse_args()
    set_up_logging(arguments.log_format, "engine")
    heartbeat = Heartbeat(arguments.heartbeat, computes_here=False)
    try:
        config = ProcessConfig.from_json(arguments.config)
    except ConfigError as error:
        _log.error("%s", error)
        heartbeat.explain(str(error))
        return _REFUSED_EXIT
    process = EngineProcess(config, heartbeat, arguments.log_format)
    process.end_with_stdin()
    return process.run()


if __name__ == "__main__":
    # Excludes the objects of the imported modules from garbage collection. A full collection between two steps would
    # otherwise visit all of them.
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    gc.enable()
    sys.exit(main())
