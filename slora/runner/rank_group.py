"""The tensor-parallel group as its leader, rank 0, sees it."""

from collections.abc import Callable
from typing import Protocol

from slora.models.collectives import ALONE, Collectives
from slora.runner.rank import Command
from slora_adapters.peft.packing import ByteArray

__all__ = ["NO_GROUP", "RankGroup"]


class RankGroup(Protocol):
    """The other ranks. They run all commands in order."""

    @property
    def collectives(self) -> Collectives: ...

    def send(self, make: Callable[[int], Command]) -> None:
        """Sends each of the other ranks a command. make: makes the command of a rank.

        Raises DeviceFailed if a rank has ended.
        """

    def share_arena(self, arena: ByteArray, descriptor: int) -> None:
        """Lets the other ranks map the loader's arena before the next command. May be called from any thread.

        descriptor: the memfd of the arena. The caller may close it afterwards.
        """

    def finish_loads(self) -> None:
        """Waits until no other rank reads the host's copies of adapters. Raises DeviceFailed if a rank has ended."""

    def close(self) -> None:
        """Ends the other ranks."""


class _NoGroup:
    collectives = ALONE

    def send(self, make: Callable[[int], Command]) -> None: ...

    def share_arena(self, arena: ByteArray, descriptor: int) -> None: ...

    def finish_loads(self) -> None: ...

    def close(self) -> None: ...


NO_GROUP: RankGroup = _NoGroup()
