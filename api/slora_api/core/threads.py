"""The thread pools of an API process. Every blocking call of its event loop runs in one of them.

| pool    | call             | work                                                                                  |
|---------|------------------|---------------------------------------------------------------------------------------|
| control | `control_thread` | keys, change feed, revocations, quotas, usage ledger: no tenant chooses the size      |
| tenants | `tenant_thread`  | what a tenant can size: uploads, files, batches, stores, texts, lookups of names      |

A tenant can fill only the second pool, and only its own part of that pool, because its threads are `FairSlots`. FastAPI
runs routes that are plain functions on threads of its own. `TenantRoute` in `http/wiring.py` makes a tenant's
request hold a slot of the second pool meanwhile, so operators always get a thread.
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from slora_api.core.fair_slots import FairSlots

P = ParamSpec("P")
T = TypeVar("T")

# As the tenant of `tenant_thread`: work of the server itself whose size depends on what tenants have stored.
HOUSEKEEPING = ""
# Together with the control pool (six threads on two cores), fewer threads than PostgreSQL connections.
_NUM_TENANT_THREADS = 8

# The control pool is the event loop's default executor, which also resolves host names.
control_thread = asyncio.to_thread


@dataclass(frozen=True, slots=True)
class _TenantPool:
    """The pool of one event loop. Every call is a request in progress or a task, so the queue has no limit."""

    executor: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_NUM_TENANT_THREADS, "tenants")
    )
    slots: FairSlots = field(default_factory=lambda: FairSlots(_NUM_TENANT_THREADS, sys.maxsize, "calls"))


_tenant_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, _TenantPool] = WeakKeyDictionary()


async def tenant_thread(tenant: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls `call` on a thread of the tenants' pool and returns its result.

    A cancelled caller does not wait for the thread, but the tenant keeps its slot until the call has ended. So a call
    should be short, and a long task should be divided into several calls.
    """
    pool = _tenant_pool()
    release = await pool.slots.acquire(tenant)
    work = partial(copy_context().run, call, *args, **kwargs)
    try:
        running = asyncio.get_running_loop().run_in_executor(pool.executor, work)
    except BaseException:
        release()
        raise

    def end(done: "asyncio.Future[T]") -> None:
        release()
        if not done.cancelled():
            done.exception()  # If the caller was cancelled, nothing else retrieves the error.

    running.add_done_callback(end)
    return await asyncio.shield(running)


def tenant_slot(tenant: str) -> AbstractAsyncContextManager[None]:
    """Holds a slot of the tenants' pool for a call that runs on another thread."""
    return _tenant_pool().slots.hold(tenant)


def _tenant_pool() -> _TenantPool:
    return _tenant_pools.setdefault(asyncio.get_running_loop(), _TenantPool())
