"""The channel between the leader of a tensor-parallel group and one of its other ranks.

Messages are pickled. An array in the loader's arena is not copied: the channel passes the memfd of the arena once, and
then only the place of the array in it. The rank maps the arena, and reads the array there.

No class of a message is in `rank_process.py`, because that module has another name in the process that it starts.
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import numpy as np

from slora.core.engine_config import EngineConfig
from slora.models.model_spec import ModelSpec
from slora_adapters.loader.host_cache import map_arena
from slora_adapters.peft.packing import ByteArray


@dataclass(frozen=True, slots=True)
class RankSettings:
    """path: see `Collectives.connect`. num_threads: threads of torch on the CPU."""

    config: EngineConfig
    spec: ModelSpec
    rank: int
    path: Path
    num_threads: int


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
