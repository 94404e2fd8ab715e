"""The protocol of the quota counters, which count the use of each tenant and each key.

A request reserves its largest possible use before it is admitted, and settles the reservation when it ends. The unused
part is refunded to the second, day and month of the reservation.

Limits per minute use a sliding window of buckets of one second. A charge counts in its own second and in the next 60.
So the charges of any 60 seconds never exceed the limit, and the time at which a request fits again is known exactly.

Counters are not durable, and the account of an idle subject may be dropped. An account with a budget is therefore
seeded from the durable history before its first reservation; see `NotSeeded`.
"""

from dataclasses import dataclass
from typing import Protocol

from slora_api.quotas.quota import Quota

# A charge counts in the second in which it is made and in the next 60.
BUCKETS = 61


@dataclass(frozen=True, slots=True)
class Subject:
    """A tenant, or one of its keys, with its quota. key_id: empty for the tenant itself."""

    tenant: str
    key_id: str
    quota: Quota

    @property
    def account(self) -> str:
        """The name of the subject's account in the counters."""
        return f"{self.tenant}/{self.key_id}"


@dataclass(frozen=True, slots=True)
class Charge:
    """The amounts that a request reserves. tokens: the maximum number of tokens that the request can use. answers: how
    many answers the request has in progress.
    """

    tokens: int
    answers: int
    requests: int = 1


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a subject, including its open reservations.

    requests, tokens: charged in the last minute. The fields that end in `_reset_ms` have the time until these charges
    have left the window. reserved_tokens: the tokens that open reservations hold.
    """

    requests: int = 0
    requests_reset_ms: int = 0
    tokens: int = 0
    tokens_reset_ms: int = 0
    tokens_today: int = 0
    tokens_this_month: int = 0
    reserved_tokens: int = 0
    answers: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A successful reservation. Pass it to `QuotaCounters.settle` exactly once.

    uses: the use of each subject, including this reservation. handle: identifies the reservation to its counters.
    """

    charge: Charge
    uses: tuple[Use, ...]
    handle: object


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A limit that a reservation would exceed.

    field: the field of the quota. wait_ms: the time until the reservation fits, if nothing else is charged. None for
    budgets, for answers in progress, and if the reservation would never fit.
    """

    subject: Subject
    field: str
    wait_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused reservation, which charged nothing. obstacles: every limit that it would exceed."""

    obstacles: tuple[Obstacle, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True)
class NotSeeded:
    """The reservation was not made, because the counters do not know yet how many tokens these subjects have used today
    and this month. The caller calls `seed` for each subject, and retries.
    """

    subjects: tuple[Subject, ...]


class QuotaCounters(Protocol):
    """Counters that all processes with the same quotas share: `HostCounters` or `RedisCounters`.

    Runs on one event loop. Raises StoreUnavailable if the counters cannot be reached.
    """

    async def reserve(
        self, subjects: tuple[Subject, ...], charge: Charge
    ) -> Reservation | Refusal | NotSeeded:
        """Reserves `charge` for all subjects, or for none. subjects: at most two. The caller has checked that each
        limit is large enough for the charge alone.
        """

    def settle(self, reservation: Reservation, used_tokens: int, *, counts: bool = True) -> None:
        """Ends a reservation. counts: whether the request counts towards `requests_per_minute`; if False, its charge is
        refunded.
        """

    def release(self, process: int) -> None:
        """Refunds the reservations of a dead process of this host. Only the main process calls this method."""

    async def read(self, subjects: tuple[Subject, ...]) -> tuple[Use, ...]:
        """Returns the present use of each subject."""

    async def seed(self, subject: Subject, tokens_today: int, tokens_this_month: int) -> None:
        """Sets the used tokens from the durable history. If the counters already have a larger number, they keep it."""

    async def run(self) -> None:
        """Keeps this process's reservations alive until cancelled. May return at once."""

    async def close(self) -> None:
        """Refunds this process's open reservations."""
