"""A tensor-parallel group of processes on this host. Rank 0 is the process that starts it.

Commands go over one socket pair for each rank, because they are in host memory: a collective of NCCL would copy them to
the GPU and back. The ranks map the loader's arena, so adapters do not pass through the sockets.

A rank that ends closes its socket and its connections to the other ranks. The group can't continue without it.
"""

import atexit
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread

import torch

from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError, DeviceFailed
from slora.models.collectives import ALONE, Collectives
from slora.models.model_spec import ModelSpec
from slora.runner.device_facts import explain_few_gpus
from slora.runner.model_part import find_device, limit_torch_threads
from slora.runner.rank import Command, FinishLoads
from slora.runner.rank_channel import CommandChannel, RankSettings
from slora_adapters.peft.packing import ByteArray

_log = logging.getLogger(__name__)

# Maximum time that a rank may take to finish its present command.
_MAX_STOP_S = 10.0
_PROGRAM = [sys.executable, "-P", "-m", "slora.runner.rank_process"]


def _log_loss(reason: str) -> None:
    _log.critical("%s; the engine can't continue", reason)


@contextmanager
def _noticing_loss(rank: int) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise DeviceFailed(f"rank {rank} of the tensor-parallel group has ended") from error


class RankGroup:
    """The other ranks, as rank 0 sees them. They run all commands in order. Without `start`, there are none.

    All methods but `share_arena` and `close` raise DeviceFailed if a rank has ended.
    """

    def __init__(self, on_lost: Callable[[str], None] = _log_loss) -> None:
        self.collectives = ALONE
        self._on_lost = on_lost
        self._is_closed = False
        self._are_ready = False
        self._channels: list[CommandChannel] = []
        # Arenas that the other ranks do not know yet, each with a memfd of our own.
        self._new_arenas: SimpleQueue[tuple[ByteArray, int]] = SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, config: EngineConfig, spec: ModelSpec, device: torch.device, arguments: Sequence[str]
    ) -> None:
        """Starts the other ranks, and waits until they are connected. arguments: of each process."""
        size = config.tensor_parallel_size
        # On a CPU, the ranks share the cores.
        num_threads = max(1, torch.get_num_threads() // size)
        if device.type == "cpu":
            torch.set_num_threads(num_threads)
        with TemporaryDirectory(prefix="slora-ranks-") as directory:
            path = Path(directory) / "store"
            atexit.register(self.close)
            try:
                for rank in range(1, size):
                    self._start_rank(RankSettings(config, spec, rank, path, num_threads), arguments)
                self.collectives = Collectives.connect(0, size, device, path)
            except BaseException:
                self._end_ranks()
                raise

    def send(self, make: Callable[[int], Command]) -> None:
        """Sends each of the other ranks a command. make: makes the command of a rank."""
        if not self._are_ready:
            self._await_ranks()
        while not self._new_arenas.empty():
            arena, descriptor = self._new_arenas.get()
            for rank, channel in enumerate(self._channels, start=1):
                with _noticing_loss(rank):
                    channel.pass_arena(arena, descriptor)
            os.close(descriptor)
        for rank, channel in enumerate(self._channels, start=1):
            with _noticing_loss(rank):
                channel.send(make(rank))

    def share_arena(self, arena: ByteArray, descriptor: int) -> None:
        """Lets the other ranks map the loader's arena before the next command. May be called from any thread.

        descriptor: the memfd of the arena. The caller may close it afterwards.
        """
        if self._channels:
            self._new_arenas.put((arena, os.dup(descriptor)))

    def finish_loads(self) -> None:
        """Waits until no other rank reads the host's copies of adapters."""
        self.send(lambda rank: FinishLoads())
        for rank, channel in enumerate(self._channels, start=1):
            with _noticing_loss(rank):
                channel.receive()

    def close(self) -> None:
        """Ends the other ranks."""
        if not self._is_closed:
            self._end_ranks()
            self.collectives.close()

    def _end_ranks(self) -> None:
        self._is_closed = True
        atexit.unregister(self.close)
        for channel in self._channels:
            channel.close()
        while not self._new_arenas.empty():
            os.close(self._new_arenas.get()[1])
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(_MAX_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start_rank(self, settings: RankSettings, arguments: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*_PROGRAM, "--socket", str(theirs.fileno()), *arguments],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
        channel = CommandChannel(ours.detach())
        self._processes.append(process)
        self._channels.append(channel)
        Thread(target=self._watch, args=(settings.rank, process), name="rank-watch", daemon=True).start()
        channel.send(settings)

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if not self._is_closed:
            self._on_lost(f"rank {rank} of the tensor-parallel group ended with exit code {code}")

    def _await_ranks(self) -> None:
        for rank, channel in enumerate(self._channels, start=1):
            with _noticing_loss(rank):
                refusal = channel.receive()
            if refusal is not None:
                raise ConfigError(f"rank {rank}: {refusal}")
        self._are_ready = True


NO_GROUP = RankGroup()


def start_group(
    config: EngineConfig,
    spec: ModelSpec,
    on_lost: Callable[[str], None] = _log_loss,
    log_format: str | None = None,
) -> RankGroup:
    """Starts the other ranks, and waits until they are connected. Without tensor parallelism, there are none. Before
    that, gives torch as many threads as the machine can run.

    on_lost: called from another thread with a reason when a rank has ended, unless the group was closed.
    log_format: one of LOG_FORMATS; None: the ranks log only warnings and errors.

    Raises ConfigError if the model can't be divided, or if there are fewer GPUs than ranks.
    """
    limit_torch_threads()
    size = config.tensor_parallel_size
    group = RankGroup(on_lost)
    if size == 1:
        return group
    spec.partition(spec.resolve_dtype(config.dtype), size)
    device = find_device(config, 0)
    if device.type == "cuda" and (reason := explain_few_gpus(size, torch.cuda.device_count())):
        raise ConfigError(reason)
    group.start(config, spec, device, ["--log-format", log_format] if log_format else [])
    return group
