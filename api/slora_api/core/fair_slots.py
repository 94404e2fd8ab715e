"""A few slots for work that all tenants share, such as the CPU work of requests (`cpu_slots`) or inspecting an upload.

A free slot goes to the waiting tenant that has used the least slot time. A tenant that returns after a pause starts at
the lowest value among the active tenants, so it cannot save up time while idle. This is the lift rule of VTC (Sheng et
al., OSDI'24).

One tenant never holds all slots. It gets a further slot only while a reserve stays free for tenants without a slot. A
reserve of N slots keeps any N tenants from holding all slots.

Each API process has slots of its own; see `slots_of_process`.

This module does not depend on HTTP. It runs on one event loop and needs no lock.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from slora_api.core.errors import TenantBusy

# Two of the slots for CPU work are reserved for tenants that hold none, so that two tenants never hold all of them.
_CPU_SLOTS, _CPU_RESERVED = 4, 2


def reserved_slots(num_slots: int) -> int:
    """Returns how many slots stay free for tenants without a slot: a quarter of all slots, but at least one. With fewer
    than three slots, there is no reserve.
    """
    return max(1, num_slots // 4) if num_slots > 2 else 0


def slots_of_process(num_slots: int, num_reserved: int, num_processes: int) -> int:
    """Divides the slots of a host among its API processes. Each process gets at least one slot in addition to its
    reserve.

    Example: 4 slots with a reserve of 2 are divided between two processes. Each process has 3 slots, and one tenant
    gets at most 1 of them. So one tenant gets at most 2 slots of the host, the same as with one process.
    """
    return max(num_slots // num_processes, num_reserved + 1)


@dataclass(slots=True)
class _TenantState:
    """An active tenant.

    slot_s: seconds of slot time used. A tenant that becomes active starts at the lowest value of the active tenants.
    num_held: slots that the tenant holds now.
    """

    slot_s: float = 0.0
    num_held: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class FairSlots:
    """Shares slots fairly among tenants.

    num_slots: the number of slots.
    max_waiting: requests of one tenant that may wait; further requests are refused.
    work: what the error message calls the work, for example "chat templates to render".
    clock: monotonic seconds.
    num_reserved: the number of slots in the reserve; None means `reserved_slots(num_slots)`.
    """

    def __init__(
        self,
        num_slots: int,
        max_waiting: int,
        work: str,
        clock: Callable[[], float] = time.monotonic,
        num_reserved: int | None = None,
    ) -> None:
        self._num_free = num_slots
        self._reserved = reserved_slots(num_slots) if num_reserved is None else num_reserved
        self._max_waiting = max_waiting
        self._work = work
        self._clock = clock
        # Contains only active tenants: those that hold a slot or wait for one.
        self._active: dict[str, _TenantState] = {}

    @asynccontextmanager
    async def hold(self, tenant: str, *, ends_request: bool = False) -> AsyncIterator[None]:
        """Waits for a slot and holds it for the duration of the context. Cancelling the wait removes it from the queue.

        ends_request: whether the work is the last of a request, so that a refusal would waste what was done before. It
        precedes the other work of the tenant and is never refused.

        Raises TenantBusy if too many requests of this tenant wait already.
        """
        release = await self.acquire(tenant, ends_request=ends_request)
        try:
            yield
        finally:
            release()

    async def acquire(self, tenant: str, *, ends_request: bool = False) -> Callable[[], None]:
        """Like `hold`, for a slot that outlives the caller. Returns a function that releases the slot; call it once."""
        state = self._enter(tenant, is_refusable=not ends_request)
        turn = asyncio.get_running_loop().create_future()
        if ends_request:
            state.waiting.appendleft(turn)
        else:
            state.waiting.append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(tenant, state, 0.0)
            else:
                # If `_grant` ran after the cancellation, it has already removed the turn.
                with suppress(ValueError):
                    state.waiting.remove(turn)
                self._remove_if_idle(tenant, state)
            raise
        started_at = self._clock()
        return lambda: self._release(tenant, state, self._clock() - started_at)

    def _enter(self, tenant: str, *, is_refusable: bool) -> _TenantState:
        state = self._active.get(tenant)
        if state is None:
            least = min((other.slot_s for other in self._active.values()), default=0.0)
            state = self._active[tenant] = _TenantState(least)
        elif is_refusable and len(state.waiting) >= self._max_waiting:
            raise TenantBusy(
                f"Your tenant has {len(state.waiting)} {self._work} waiting, and the limit is "
                f"{self._max_waiting}; send fewer at once."
            )
        return state

    def _release(self, tenant: str, state: _TenantState, used_s: float) -> None:
        state.num_held -= 1
        state.slot_s += used_s
        self._num_free += 1
        self._grant()
        self._remove_if_idle(tenant, state)

    def _remove_if_idle(self, tenant: str, state: _TenantState) -> None:
        if not state.num_held and not state.waiting:
            self._active.pop(tenant, None)

    def _grant(self) -> None:
        """Hands free slots to waiting tenants."""
        while self._num_free:
            candidates = [
                state
                for state in self._active.values()
                if state.waiting and (not state.num_held or self._num_free > self._reserved)
            ]
            if not candidates:
                return
            chosen = min(candidates, key=lambda state: (state.num_held > 0, state.slot_s))
            turn = chosen.waiting.popleft()
            if not turn.done():
                self._num_free -= 1
                chosen.num_held += 1
                turn.set_result(None)


def cpu_slots(max_waiting: int, num_processes: int = 1) -> FairSlots:
    """Returns the slots for all CPU work that requests cause in one API process: rendering chat templates, compiling
    forms of structured output, tokenizing long prompts and writing long answers. Short work takes no slot.

    max_waiting: the maximum number of requests of one tenant that wait. num_processes: number of API processes of the
    host, which share the slots.
    """
    return FairSlots(
        slots_of_process(_CPU_SLOTS, _CPU_RESERVED, num_processes),
        max_waiting,
        "chat templates, forms and long texts",
        num_reserved=_CPU_RESERVED,
    )
