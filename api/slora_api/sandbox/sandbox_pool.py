"""The sandboxes for one kind of work, which tenants share in fair order.

- The CPU time of each request is limited. A generous limit of wall-clock time ends a stalled process.
- Each tenant has a budget of CPU time. A tenant that has used it up is answered 429.
- Cancelling a request removes it from the queue or kills the process that works on it.
- A process that dies or stalls is replaced. If starts fail, the pause before the next start grows.
"""

import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from slora_adapters.process.children import describe_exit
from slora_api.core.cpu_budget import CpuBudget
from slora_api.core.errors import ServerBusy
from slora_api.core.fair_slots import FairSlots
from slora_api.sandbox.sandbox import SandboxAnswer
from slora_api.sandbox.sandbox_process import SandboxDied, SandboxProcess, SandboxStalled

_log = logging.getLogger(__name__)

# CPU seconds charged for each request that ends its process, because a new process must be started.
_START_CPU_S = 0.2
# On a machine with many busy programs, two seconds of CPU time can take a minute.
ANSWER_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0
# A process may also die without exceeding a limit, for example because of the OOM killer. Its request is retried once.
_NUM_ATTEMPTS = 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# A fresh process uses 25 to 50 MiB. A process that has grown beyond this limit is replaced.
MAX_RESIDENT_BYTES = 96 << 20


@dataclass(frozen=True, slots=True)
class SandboxWork:
    """One kind of work that sandboxes do.

    start: starts a process. The argument is the time limit of the start in seconds.
    cpu_limit_s: limit of the CPU seconds of one request.
    verb, object: words for messages, such as "rendered" and "chat template".
    """

    start: Callable[[float], Awaitable[SandboxProcess]]
    cpu_limit_s: float
    verb: str
    object: str


class SandboxPool:
    """Passes requests to sandboxes. Call `close` at the end. clock: monotonic seconds."""

    def __init__(
        self,
        work: SandboxWork,
        slots: FairSlots,
        budget: CpuBudget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._slots = slots
        self._budget = budget
        self._clock = clock
        self._idle: list[SandboxProcess] = []
        self._num_failed_starts = 0
        self._next_start_at = 0.0

    async def ask(self, tenant: str, request: bytes) -> SandboxAnswer:
        """Returns the answer to a packed request. If the request ends its process, the answer contains an error.

        Raises TenantBusy, and ServerBusy if no process can be started or answers.
        """
        self._budget.check(tenant)
        async with self._slots.hold(tenant):
            # Check again: earlier requests of the same tenant may have spent the budget while this one was waiting.
            self._budget.check(tenant)
            failure: SandboxAnswer | ServerBusy
            for _ in range(_NUM_ATTEMPTS):
                sandbox = await self._take_sandbox()
                try:
                    return await self._ask(sandbox, tenant, request)
                except SandboxStalled:
                    _log.warning(
                        "a process did not answer within %g s and was killed: the %s of tenant %s was not %s",
                        ANSWER_TIMEOUT_S,
                        self._work.object,
                        tenant,
                        self._work.verb,
                    )
                    failure = ServerBusy(
                        f"The {self._work.object} was not {self._work.verb} within {ANSWER_TIMEOUT_S:g} s, because "
                        "the server is too busy. Try again."
                    )
                except SandboxDied as death:
                    if death.hit_cpu_limit:
                        limit_s = self._work.cpu_limit_s
                        return SandboxAnswer(None, f"it takes more than {limit_s:g} s of CPU time", 0.0, 0)
                    _log.warning(
                        "%s: the %s of tenant %s was not %s",
                        death,
                        self._work.object,
                        tenant,
                        self._work.verb,
                    )
                    how = describe_exit(death.exit_code)
                    failure = SandboxAnswer(None, f"it ended its process with {how}", 0.0, 0)
            if isinstance(failure, ServerBusy):
                raise failure
            return failure

    async def close(self) -> None:
        """Ends the idle processes. A busy process ends when its request or this process ends."""
        while self._idle:
            await self._idle.pop().close()

    async def _ask(self, sandbox: SandboxProcess, tenant: str, request: bytes) -> SandboxAnswer:
        """Sends the request to a sandbox, and charges the tenant even on an error. Keeps the process for the next
        request unless it failed or grew too large.
        """
        started_at = self._clock()
        used_s: float | None = None
        try:
            answer, used_s = await sandbox.ask(request, ANSWER_TIMEOUT_S)
        finally:
            if used_s is None:
                # The CPU time of a killed process is unknown, but it is at most the limit and at most the elapsed time.
                used_s = min(self._work.cpu_limit_s, self._clock() - started_at) + _START_CPU_S
            self._budget.charge(tenant, used_s)
        if answer.resident_bytes > MAX_RESIDENT_BYTES:
            self._budget.charge(tenant, _START_CPU_S)
            await sandbox.close()
        else:
            self._idle.append(sandbox)
        return answer

    async def _take_sandbox(self) -> SandboxProcess:
        """Returns an idle process or starts one. Raises ServerBusy if none can be started."""
        while self._idle:
            sandbox = self._idle.pop()
            if sandbox.is_alive:
                return sandbox
        for _ in range(_NUM_ATTEMPTS):
            pause_s = self._next_start_at - self._clock()
            if pause_s > 0:
                break
            try:
                sandbox = await self._work.start(START_TIMEOUT_S)
            except (SandboxDied, SandboxStalled, OSError) as error:
                self._num_failed_starts += 1
                _log.error(
                    "a process for %ss could not be started: %s",
                    self._work.object,
                    error or type(error).__name__,
                )
            else:
                self._num_failed_starts = 0
                return sandbox
        else:
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._num_failed_starts, 10))
            self._next_start_at = self._clock() + pause_s
        wait_s = max(1, math.ceil(pause_s))
        raise ServerBusy(
            f"No process for {self._work.object}s could be started; the server's log has the "
            f"reason. Try again in {wait_s} s.",
            wait_s,
        )
