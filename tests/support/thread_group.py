"""A tensor-parallel group whose ranks are threads of the test's process, so that a test needs no other process."""

import queue
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError, Event, Thread
from typing import TypeVar

import torch
from torch import Tensor

from slora.core.engine_config import EngineConfig
from slora.core.errors import DeviceFailed
from slora.models.model_spec import ModelSpec
from slora.runner.rank import Command, Rank
from slora_adapters.peft.packing import ByteArray

_Result = TypeVar("_Result")
# A rank that waits so long for the others has lost one of them.
_MAX_WAIT_S = 120.0


class ThreadCollectives:
    def __init__(self, rank: int, parts: list[Tensor | None], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(parts)
        self.calls: Counter[str] = Counter()
        self._parts = parts
        self._barrier = barrier

    def sum(self, x: Tensor) -> Tensor:
        self.calls["sum"] += 1
        return x.copy_(torch.stack(self._exchange(x)).sum(0))

    def gather_columns(self, x: Tensor) -> Tensor:
        self.calls["gather"] += 1
        return torch.cat(self._exchange(x), dim=1)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._parts[self.rank] = x.clone()
        self._barrier.wait(_MAX_WAIT_S)
        parts = [part for part in self._parts if part is not None]
        self._barrier.wait(_MAX_WAIT_S)
        return parts


def compute_on_ranks(size: int, compute: Callable[[ThreadCollectives], _Result]) -> _Result:
    """Computes on each rank, in threads. Returns the result of rank 0, or raises the error that a rank raised first."""
    parts: list[Tensor | None] = [None] * size
    barrier = Barrier(size)

    def run(rank: int) -> _Result:
        try:
            return compute(ThreadCollectives(rank, parts, barrier))
        except Exception:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in running if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, BrokenBarrierError)), errors[0])
    return running[0].result()


class ThreadGroup:
    """The leader's view. Close it, or its threads wait for commands until the process ends."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        size = config.tensor_parallel_size
        self._parts: list[Tensor | None] = [None] * size
        self._barrier = Barrier(size)
        self.collectives = ThreadCollectives(0, self._parts, self._barrier)
        self._inboxes: list[queue.SimpleQueue[Command | Event | None]] = [
            queue.SimpleQueue() for _ in range(1, size)
        ]
        self.errors: list[Exception] = []
        self._threads = [
            Thread(target=self._run, args=(config, spec, rank), name=f"rank-{rank}", daemon=True)
            for rank in range(1, size)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, make: Callable[[int], Command]) -> None:
        if self.errors:
            raise DeviceFailed(f"a rank failed: {self.errors[0]}")
        for rank, inbox in enumerate(self._inboxes, start=1):
            inbox.put(make(rank))

    def share_arena(self, arena: ByteArray, descriptor: int) -> None:
        """Does nothing, because the ranks are in the same process."""

    def finish_loads(self) -> None:
        for inbox in self._inboxes:
            inbox.put(finished := Event())
            while not finished.wait(0.01):
                if self.errors:
                    raise DeviceFailed(f"a rank failed: {self.errors[0]}")

    def abort(self) -> None:
        """Ends the collectives of ranks that wait in vain for the leader."""
        self._barrier.abort()

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, config: EngineConfig, spec: ModelSpec, number: int) -> None:
        try:
            rank = Rank(config, spec, ThreadCollectives(number, self._parts, self._barrier))
            while (command := self._inboxes[number - 1].get()) is not None:
                if isinstance(command, Event):
                    command.set()
                else:
                    rank.obey(command)
        except Exception as error:
            self.errors.append(error)
            self._barrier.abort()
