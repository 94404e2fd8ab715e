"""An event loop whose time the tenants share.

asyncio runs all callbacks that are ready before it looks for new events. With 128 small requests of one tenant in
progress, each step of another tenant's request waited for a step of each of them. A chat of eight tokens has about 20
steps, and waited for 4 s of CPU time.

Here the callbacks of each tenant's requests have a queue of their own. In each pass of the loop, every tenant that has
ready callbacks runs some of them, for at most `QUANTUM_S` and the rest of the last one. The callbacks of one tenant run
in the order in which they became ready. Everything else runs as in asyncio: sockets, timers, requests whose key is not
known yet, operators, and the server's own tasks.

A request belongs to its tenant as soon as its key is known, and so do the tasks that it creates. A task that works for
several tenants is created with a context of its own, so that it does not wait in the queue of one of them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TypeVarTuple, Unpack

from slora_api.core.request_context import current_request

_Ts = TypeVarTuple("_Ts")

# Running at least this long saves most of the polls between the passes.
QUANTUM_S = 0.001


class FairEventLoop(asyncio.SelectorEventLoop):
    """quantum_s: the time of a tenant in each pass. With 0, one callback runs."""

    def __init__(self, quantum_s: float = QUANTUM_S) -> None:
        super().__init__()
        self._quantum_s = quantum_s
        # Contains only tenants with ready callbacks.
        self._ready_of: dict[str, deque[asyncio.Handle]] = {}
        self._own_context = Context()

    def call_soon(
        self, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if context is None:
            context = copy_context()
        request = context.get(current_request)
        tenant = None if request is None else request.tenant_id
        if tenant is None:
            return super().call_soon(callback, *args, context=context)
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        ready = self._ready_of.get(tenant)
        if ready is None:
            self._ready_of[tenant] = deque([handle])
            super().call_soon(self._run_some, tenant, context=self._own_context)
        else:
            ready.append(handle)
        return handle

    def _run_some(self, tenant: str) -> None:
        ready = self._ready_of[tenant]
        end_s = time.monotonic() + self._quantum_s
        try:
            while ready:
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
                    if time.monotonic() >= end_s:
                        break
        finally:  # SystemExit and KeyboardInterrupt leave `_run`.
            if ready:
                super().call_soon(self._run_some, tenant, context=self._own_context)
            else:
                del self._ready_of[tenant]

    def _check_open(self) -> None:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
