"""Who waits for a place in the batch, and in which order they get one. The scheduler knows only this protocol."""

from collections.abc import Collection, Iterable
from typing import Protocol

from slora.pool.tenant import Tenant
from slora.scheduler.sequence import Sequence


class WaitingQueue(Protocol):
    """Sequences with nothing to wait for but a place and pages."""

    def __len__(self) -> int: ...

    def __contains__(self, sequence: Sequence) -> bool: ...

    def push(self, sequence: Sequence) -> None:
        """It waits from now on, or again after it gave way."""

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer: it starts, moves aside or has ended."""

    def next(self, passed_over: Collection[Tenant] = ()) -> Sequence | None:
        """Who gets the next place, those of tenants that are `passed_over` left out."""

    def upcoming(self, count: int) -> list[Sequence]:
        """Some that will be next, at most `count`; the order is that of today and may change."""

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Which of these gives way when pages run short; there is at least one."""
