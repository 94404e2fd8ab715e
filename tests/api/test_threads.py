"""No work that a tenant can size shares threads with keys, revocations and quotas."""

import asyncio
from inspect import iscoroutinefunction
from threading import Event

from slora_adapters.database.audit_log import Actor, ActorKind, acting_as, current_actor
from slora_api.core.threads import control_thread, tenant_thread
from slora_api.http.wiring import TenantRoute
from slora_api.keys.authentication import required_scopes
from slora_api.keys.key_record import OPERATOR_SCOPES
from slora_api.serve.app import ROUTES


def test_a_tenant_whose_calls_block_delays_neither_keys_nor_another_tenant() -> None:
    async def main() -> None:
        go_on, started = Event(), []

        def block() -> None:
            started.append(1)
            go_on.wait()

        hostile = [asyncio.create_task(tenant_thread("hostile", block)) for _ in range(100)]
        try:
            async with asyncio.timeout(300):
                assert await tenant_thread("honest", str, 1) == "1"
                assert await control_thread(str, 2) == "2"
                while len(started) < 6:
                    await asyncio.sleep(0.001)
            assert len(started) == 6, "two of eight threads are kept for others"
        finally:
            go_on.set()
            await asyncio.gather(*hostile)
        assert len(started) == 100

    asyncio.run(main())


def test_a_cancelled_call_keeps_its_slot_until_its_thread_has_ended() -> None:
    async def main() -> None:
        go_on, num_running = Event(), []

        def block() -> None:
            num_running.append(1)
            go_on.wait()
            raise ValueError("nothing retrieves this error")

        for _ in range(20):
            task = asyncio.create_task(tenant_thread("hostile", block))
            await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert len(num_running) <= 6
        go_on.set()
        assert await tenant_thread("hostile", str, 1) == "1"

    asyncio.run(main())


def test_the_context_of_the_caller_reaches_the_thread() -> None:
    async def main() -> None:
        actor = Actor(ActorKind.TENANT, "key", "address", "request")
        with acting_as(actor):
            assert await tenant_thread("acme", current_actor) == actor

    asyncio.run(main())


def test_plain_functions_that_answer_tenants_hold_a_slot_of_their_threads() -> None:
    """Born from a bug: enough slow listings of one tenant took the threads on which an operator revokes keys."""
    plain = [route for route in ROUTES if not iscoroutinefunction(route.endpoint)]
    of_tenants = [
        route for route in plain if any(s not in OPERATOR_SCOPES for s in required_scopes(route) if s)
    ]
    assert of_tenants
    assert [route.path for route in of_tenants if not isinstance(route, TenantRoute)] == []
