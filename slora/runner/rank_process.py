"""The process of one rank that is not the leader. `process_group.py` starts it.

It gets its settings and its commands over a socket from the leader, its parent process. Its first message is None when
it is ready, or the reason why it refuses the settings. It answers None to each `FinishLoads`.

It ends when its standard input or the socket closes, so it never outlives the leader, even while it waits for other
ranks.
"""

import argparse
import logging
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.memory.host_memory import PageLockedMemory
from slora.models.collectives import TorchCollectives
from slora.models.model_spec import ModelSpec
from slora.runner.rank import FinishLoads, Rank
from slora.runner.served_model import find_device
from slora_adapters.loader.host_cache import map_arena
from slora_adapters.peft.packing import ByteArray
from slora_adapters.process.children import end_with_stdin
from slora_adapters.process.logs import LOG_FORMATS, set_up_logging

# The channel between the leader of a tensor-parallel group and one of its other ranks.
#
# Messages are pickled. An array in the loader's arena is not copied: the channel passes the memfd of the arena once,
# and then only the place of the array in it. The rank maps the arena, and reads the array there.


@dataclass(frozen=True, slots=True)
class _ArenaFollows:
    """The next item on the socket is the memfd of an arena, which replaces the previous one."""

    num_bytes: int


class CommandChannel:
    """One end of the channel. descriptor: one end of a Unix socket pair, which the channel owns.

    on_arena: called at the rank's end with each arena. The result is kept until the next arena arrives.
    """

    def __init__(self, descriptor: int, on_arena: Callable[[ByteArray], object] = lambda arena: None) -> None:
        self._connection = Connection(descriptor)
        self._on_arena = on_arena
        self._arena: ByteArray | None = None
        self._kept: object = None

    def pass_arena(self, arena: ByteArray, descriptor: int) -> None:
        """Lets the other end map an arena, instead of the previous one. Raises OSError if the other end has closed."""
        self._connection.send_bytes(pickle.dumps(_ArenaFollows(len(arena))))
        send_handle(self._connection, descriptor, 0)  # The process id matters only on Windows.
        self._arena = arena

    def send(self, message: object) -> None:
        """Raises OSError if the other end has closed."""
        content = BytesIO()
        _Pickler(content, self._arena).dump(message)
        self._connection.send_bytes(content.getbuffer())

    def receive(self) -> Any:
        """Waits for the next message. Raises EOFError or OSError if the other end has closed."""
        while True:
            message = _Unpickler(BytesIO(self._connection.recv_bytes()), self._arena).load()
            if not isinstance(message, _ArenaFollows):
                return message
            descriptor = recv_handle(self._connection)
            try:
                self._arena = map_arena(descriptor, message.num_bytes)
            finally:
                os.close(descriptor)
            self._kept = self._on_arena(self._arena)

    def close(self) -> None:
        self._connection.close()


class _Pickler(pickle.Pickler):
    """Replaces each array in the arena by its place: (first byte, number of bytes)."""

    def __init__(self, file: BytesIO, arena: ByteArray | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._arena = arena

    def persistent_id(self, value: object) -> tuple[int, int] | None:
        if self._arena is None or not isinstance(value, np.ndarray) or value.dtype != np.uint8:
            return None
        start = _find_address(value) - _find_address(self._arena)
        is_inside = start >= 0 and start + value.nbytes <= self._arena.nbytes and value.flags.c_contiguous
        return (start, value.nbytes) if is_inside and value.nbytes else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, arena: ByteArray | None) -> None:
        super().__init__(file)
        self._arena = arena

    def persistent_load(self, place: tuple[int, int]) -> ByteArray:
        assert self._arena is not None, "the leader refers to an arena that it has not passed"
        start, num_bytes = place
        return self._arena[start : start + num_bytes]


def _find_address(array: ByteArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


_log = logging.getLogger("slora.engine")
_BROKEN_EXIT = os.EX_SOFTWARE


@dataclass(frozen=True, slots=True)
class RankSettings:
    """path: see `TorchCollectives`. num_threads: threads of torch on the CPU."""

    config: EngineConfig
    spec: ModelSpec
    rank: int
    path: Path
    num_threads: int


def _serve(descriptor: int) -> None:
    """Obeys the leader, whose socket is `descriptor`. Raises EOFError when the leader closes it."""
    leader = CommandChannel(descriptor, on_arena=_page_lock_for_gpu)
    settings: RankSettings = leader.receive()
    config, spec, number = settings.config, settings.spec, settings.rank
    torch.set_num_threads(settings.num_threads)
    device = find_device(config, number)
    collectives = TorchCollectives(number, config.tensor_parallel_size, device, settings.path)
    try:
        rank = Rank(config, spec, collectives)
    except ConfigError as error:
        # The leader reports the error. If this process ended now, the leader would report a lost rank instead.
        leader.send(str(error))
        leader.receive()
        return
    leader.send(None)
    while True:
        command = leader.receive()
        rank.obey(command)
        if isinstance(command, FinishLoads):
            leader.send(None)


def _page_lock_for_gpu(arena: ByteArray) -> PageLockedMemory | None:
    return PageLockedMemory(arena) if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def main() -> int:
    parser = argparse.ArgumentParser(description="A tensor-parallel rank of slora. The engine starts it.")
    parser.add_argument(
        "--socket", type=int, required=True, help="file descriptor of the socket to the leader"
    )
    parser.add_argument("--log-format", choices=LOG_FORMATS)
    arguments = parser.parse_args()
    if arguments.log_format is not None:
        set_up_logging(arguments.log_format, "engine rank")
    end_with_stdin()
    try:
        _serve(arguments.socket)
    except EOFError:
        return 0
    except Exception:
        _log.critical("a tensor-parallel rank failed; this process exits", exc_info=True)
        return _BROKEN_EXIT
    return 0


if __name__ == "__main__":
    # Without os._exit, Python would wait for the threads of the collectives, which may wait for other ranks.
    code = main()
    sys.stderr.flush()
    os._exit(code)
