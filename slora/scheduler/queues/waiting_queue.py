"""The waiting sequences and their order of admission. The scheduler depends only on this protocol."""

from collections.abc import Collection, Iterable
from typing import Protocol

from slora.memory.tenant_account import TenantAccount
from slora.scheduler.sequence import Sequence


class WaitingQueue(Protocol):
    """Sequences that wait only for a place in the batch and for pages."""

    def __len__(self) -> int: ...

    def __contains__(self, sequence: Sequence) -> bool: ...

    def push(self, sequence: Sequence) -> None:
        """Adds a new or a preempted sequence."""

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that was admitted, has ended, or must wait for its adapter."""

    def peek(self, skipped: Collection[TenantAccount] = ()) -> Sequence | None:
        """The sequence to admit next, ignoring the tenants in `skipped`."""

    def upcoming(self, count: int) -> list[Sequence]:
        """At most `count` sequences that are likely to be next. The order may change before they are admitted."""

    def choose_victim(self, running: Iterable[Sequence]) -> Sequence:
        """The sequence of `running` to preempt when the pool runs out of pages. `running` is not empty."""
