"""Checks the forms of structured output before the engine compiles them.

The engine cannot stop a compilation, so a sandbox compiles each new form first. A form that compiles within the limits
of a sandbox also compiles in the engine. The accepted forms of each tenant are cached by their digest.
"""

import time
from collections.abc import Awaitable, Callable
from hashlib import sha256

from slora.core.errors import RequestRefused
from slora.core.sampling_params import (
    MAX_CACHED_FORMS,
    MAX_CACHED_FORMS_OF_TENANT,
    MISSING_LIBRARY,
    OutputKind,
    StructuredOutput,
)
from slora.core.tenant_cache import TenantCache
from slora_adapters.process.wire import encode
from slora_api.core.cpu_budget import CpuBudget
from slora_api.core.fair_slots import FairSlots
from slora_api.core.package_version import is_installed
from slora_api.sandbox.sandbox_pool import SandboxPool, SandboxWork
from slora_api.sandbox.sandbox_process import SandboxProcess

# Limit of the CPU seconds of one form. Common forms take a few milliseconds. A form of 2,000 properties with patterns
# takes 0.4 s.
COMPILE_CPU_S = 0.5
# A tenant whose forms take 5 ms each can use 20 new forms per second indefinitely.
_BURST_CPU_S, _REFILL = 5.0, 0.1
LIBRARY = "llguidance"


class GrammarChecks:
    """Checks forms in sandboxes. Call `close` at the end. The first check starts a process, which is kept for later
    checks.

    slots: see `cpu_slots`. num_processes: number of API processes of the host, which divide the CPU budgets among
    themselves. clock: monotonic seconds.
    """

    def __init__(
        self,
        slots: FairSlots,
        clock: Callable[[], float] = time.monotonic,
        num_processes: int = 1,
        compile_cpu_s: float = COMPILE_CPU_S,
    ) -> None:
        first = encode({"kind": OutputKind.JSON_OBJECT, "text": "", "param": ""})

        def start(timeout_s: float) -> Awaitable[SandboxProcess]:
            command = "slora_api.sandbox.grammar_process", str(compile_cpu_s)
            return SandboxProcess.start(command, first, timeout_s)

        self._pool = SandboxPool(
            SandboxWork(start, compile_cpu_s, "compiled", "form"),
            slots,
            CpuBudget(
                _BURST_CPU_S / num_processes, _REFILL / num_processes, "compiling structured output", clock
            ),
            clock,
        )
        self._accepted = TenantCache[bytes, bool](MAX_CACHED_FORMS, MAX_CACHED_FORMS_OF_TENANT)
        self._is_installed = is_installed(LIBRARY)

    async def check(self, tenant: str, output: StructuredOutput | None) -> None:
        """Raises RequestRefused, naming the field, if the form can't be compiled or its compilation takes too long.

        Also raises TenantBusy, and ServerBusy if no process can be started.
        """
        if output is None:
            return
        if not self._is_installed:
            raise RequestRefused(f"{output.param} is not supported: {MISSING_LIBRARY}", output.param)
        digest = sha256(f"{output.kind} {output.text}".encode()).digest()
        if self._accepted.find(tenant, digest):
            return
        # The child names the field in its errors, so the request contains the field's name.
        request = encode({"kind": output.kind, "text": output.text, "param": output.param})
        answer = await self._pool.ask(tenant, request)
        if answer.error is not None:
            # Errors about a limit do not name the field.
            error = answer.error
            named = (
                error
                if error.startswith(output.param)
                else f"{output.param} can't be compiled: {error}; simplify it"
            )
            raise RequestRefused(named, output.param)
        self._accepted.insert(tenant, digest, True)

    async def close(self) -> None:
        """Ends the idle processes. A busy process ends when its request or this process ends."""
        await self._pool.close()
