"""Permits that tenants take and return: for answers, for uploads, and for bytes of request bodies.

A reserve of a quarter of all permits, and at least two, is kept for tenants that hold none. A tenant that holds permits
gets more only while the reserve stays free. A tenant that holds no permits may take half of the free permits with one
request, or all but the reserve if that is more. So two tenants never hold all permits, and each further tenant leaves
some permits for the next tenant.

The wait for a free permit is estimated from the average time that permits are held. The average is exponential: the
holding time of each returned permit has the weight 1/16. The estimate assumes that the taken permits are returned at
regular intervals over the average time. Example: 40 permits are taken, for 20 s on average, so the next one is free in
20 / 40 s. If answers take longer than before, the estimate is too short. The client then retries too soon and is
refused again.

All API processes of a host share the permits through a tally. Two processes may take the last permit at the same
moment, so a process that has taken a permit checks the limits again. If a limit is exceeded, the process returns the
permit. The reserve is checked only once, before the permit is taken.

`RequestLimiter` limits the answers and the uploads of the whole server. A request beyond a limit is refused at once,
and the error says when a permit is expected to be free. Quotas limit the answers of each tenant.

This module does not depend on HTTP. It runs on one event loop and needs no lock.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slora_api.core.errors import SOON_S, BadRequest, ServerBusy, Stopping, TenantBusy
from slora_api.core.fair_slots import reserved_slots
from slora_api.core.host_board import HostBoard, Tally

# Weight of one returned permit in the average of the holding times.
_AVERAGE_STEP = 1 / 16
# The openai client does not retry at all if the server asks for a longer wait.
_LONGEST_WAIT_S = 120


class PermitPool:
    """A fixed number of permits that tenants share.

    num_permits: the number of permits.
    max_per_tenant: the maximum number of permits that one tenant may hold.
    what: the purpose of the permits, for error messages.
    tenant_limit: the name of the setting for max_per_tenant, for error messages.
    clock: monotonic seconds.
    tally: counts the permits of each tenant in all API processes of the host; None if this is the only process.
    """

    def __init__(
        self,
        num_permits: int,
        max_per_tenant: int,
        what: str,
        tenant_limit: str,
        clock: Callable[[], float] = time.monotonic,
        tally: Tally | None = None,
    ) -> None:
        self.num_permits = num_permits
        self.max_per_tenant = max_per_tenant
        # The reserve has at least two permits: the second tenant may take one of them, and the other permit stays free
        # for a third tenant.
        self.num_reserved = max(2, reserved_slots(num_permits)) if num_permits > 2 else 0
        self._what = what
        self._tenant_limit = tenant_limit
        self._clock = clock
        self._held = Tally() if tally is None else tally
        self._average_s: float | None = None

    @property
    def num_taken(self) -> int:
        return self._held.total

    @property
    def num_free(self) -> int:
        return self.num_permits - self.num_taken

    @property
    def max_at_once(self) -> int:
        """The maximum number of permits that one request can take if no other request is in progress."""
        return min(self.max_per_tenant, self._available_to_newcomer(self.num_permits))

    def held_by(self, tenant: str) -> int:
        return self._held.count_of(tenant)

    def num_available_to(self, tenant: str) -> int:
        """Returns how many of the free permits the tenant may take now. The tenant's own limit is not considered."""
        if self.held_by(tenant):
            return max(0, self.num_free - self.num_reserved)
        return self._available_to_newcomer(self.num_free)

    def check_available(self, tenant: str, count: int) -> None:
        """Raises TenantBusy or ServerBusy if the tenant cannot take `count` permits now."""
        own, num_available, what = self.held_by(tenant), self.num_available_to(tenant), self._what
        if (missing := own + count - self.max_per_tenant) > 0:
            wait_s = self.wait_s(missing, own)
            raise TenantBusy(
                f"Your tenant has {own} {what}, and the limit is {self.max_per_tenant} "
                f"({self._tenant_limit}); try again in {wait_s} s.",
                wait_s,
            )
        if count <= num_available:
            return
        wait_s = self.wait_s(count - num_available, self.num_taken)
        if own:
            raise TenantBusy(
                f"Your tenant has {own} {what} and asks for {count} more. This server accepts "
                f"{self.num_permits}: {self.num_free} are free, and up to {self.num_reserved} are "
                f"reserved for tenants that have none. Try again in {wait_s} s.",
                wait_s,
            )
        raise ServerBusy(
            f"The server has {self.num_taken} {what}, and the limit is {self.num_permits}. This "
            f"request asks for {count} and may have {num_available} now. Try again in {wait_s} s.",
            wait_s,
        )

    @contextmanager
    def hold(self, tenant: str, count: int) -> Iterator[None]:
        """Takes `count` permits for the duration of the context. Raises TenantBusy, ServerBusy."""
        self._take(tenant, count)
        taken_at = self._clock()
        try:
            yield
        finally:
            self._held.add(tenant, -count)
            self._update_average(self._clock() - taken_at, count)

    def wait_s(self, count: int, num_taken: int) -> int:
        """Estimates the seconds until `count` of `num_taken` permits are returned, as a whole number from 1 to 120."""
        if self._average_s is None or not num_taken:
            return SOON_S
        return min(_LONGEST_WAIT_S, max(1, math.ceil(self._average_s * count / num_taken)))

    def _take(self, tenant: str, count: int) -> None:
        self.check_available(tenant, count)
        self._held.add(tenant, count)
        if self.num_free < 0 or self.held_by(tenant) > self.max_per_tenant:
            self._held.add(tenant, -count)
            raise ServerBusy(
                f"Other requests took the last permits for {self._what} at the same moment. Try again.",
                SOON_S,
            )

    def _available_to_newcomer(self, num_free: int) -> int:
        return max(num_free - self.num_reserved, num_free // 2, min(num_free, 1))

    def _update_average(self, held_s: float, count: int) -> None:
        if self._average_s is None:
            self._average_s = held_s
        self._average_s += (held_s - self._average_s) * (1 - (1 - _AVERAGE_STEP) ** count)


class RequestLimiter:
    """Counts answers and uploads in progress. After `stop()`, no further request is admitted.

    One tenant may hold at most half of the permits for uploads.

    board: None if this process is the only one. clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_uploads: int,
        board: HostBoard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stopping = False
        answers, uploads = (board.tally("answers"), board.tally("uploads")) if board else (None, None)
        self._generation_permits = PermitPool(
            max_requests, max_requests, "answers in progress", "max_concurrent_requests", clock, answers
        )
        self._upload_permits = PermitPool(
            max_uploads,
            max(1, max_uploads // 2),
            "uploads in progress",
            "half of max_concurrent_uploads",
            clock,
            uploads,
        )

    @property
    def num_generations(self) -> int:
        """The number of answers in progress in all processes."""
        return self._generation_permits.num_taken

    def wait_s(self, count: int, num_taken: int) -> int:
        """Estimates the seconds until `count` of `num_taken` answers have ended."""
        return self._generation_permits.wait_s(count, num_taken)

    def stop(self) -> None:
        """Refuses new requests from now on. Requests in progress continue."""
        self.stopping = True

    @contextmanager
    def admit_generation(
        self, tenant: str, num_prompts: int, answers_each: int = 1, param: str = "n"
    ) -> Iterator[None]:
        """Holds a permit for each answer. Raises BadRequest, ServerBusy, TenantBusy or Stopping.

        param: the field that asks for several answers to each prompt.
        """
        self._check_possible(num_prompts, answers_each, param)
        with self._generation_permits.hold(tenant, num_prompts * answers_each):
            yield

    def check_generation(
        self, tenant: str, num_prompts: int, answers_each: int = 1, param: str = "n"
    ) -> None:
        """Checks that a permit is free for each answer, without taking permits. Raises the same errors as
        `admit_generation`.
        """
        self._check_possible(num_prompts, answers_each, param)
        self._generation_permits.check_available(tenant, num_prompts * answers_each)

    def _check_possible(self, num_prompts: int, answers_each: int, param: str) -> None:
        self._refuse_when_stopping()
        num_answers, permits = num_prompts * answers_each, self._generation_permits
        if num_answers > permits.max_at_once:
            raise BadRequest(
                f"The request asks for {num_answers} answers to all its prompts together; this server "
                f"accepts at most {permits.max_at_once} at once. Send fewer prompts, or a smaller `n` "
                "and `best_of`.",
                "prompt" if answers_each == 1 else param,
            )

    @contextmanager
    def admit_upload(self, tenant: str) -> Iterator[None]:
        """Holds one permit for an upload. Raises ServerBusy, TenantBusy or Stopping."""
        self._refuse_when_stopping()
        with self._upload_permits.hold(tenant, 1):
            yield

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise Stopping
