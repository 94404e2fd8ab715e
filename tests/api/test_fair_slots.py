"""Slots that tenants share: no tenant holds all slots, and the tenant that used the least time is served first."""

import asyncio
import gc
import weakref
from contextlib import AsyncExitStack

import pytest

from slora_api.core.errors import TenantBusy
from slora_api.core.fair_slots import FairSlots, slots_of_process
from tests.api.test_cpu_budget import NamedTenant
from tests.support.clock import Clock


async def count_free(slots: FairSlots) -> int:
    """How many of 8 other tenants get a slot at once."""
    turns = [asyncio.create_task(slots.acquire(f"other {number}")) for number in range(8)]
    await asyncio.sleep(0)
    releases = [turn.result() for turn in turns if turn.done()]
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)
    for release in releases:
        release()
    return len(releases)


def test_two_tenants_leave_a_slot_free_for_a_third_when_two_are_reserved() -> None:
    async def main() -> None:
        slots = FairSlots(4, 8, "things", num_reserved=2)
        holds = [asyncio.create_task(slots.hold(f"hostile {n % 2}").__aenter__()) for n in range(8)]
        await asyncio.sleep(0)
        assert sum(hold.done() for hold in holds) == 2
        async with asyncio.timeout(300), slots.hold("honest"):
            pass
        for hold in holds:
            hold.cancel()
        await asyncio.gather(*holds, return_exceptions=True)

    asyncio.run(main())


def test_the_tenant_that_used_least_goes_first() -> None:
    order: list[str] = []

    async def main() -> None:
        clock = Clock()
        slots = FairSlots(1, 8, "things", clock)

        async def work(tenant: str, seconds: float) -> None:
            async with slots.hold(tenant):
                order.append(tenant)
                clock.now += seconds
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(work("hostile", 10.0))
            await asyncio.sleep(0)
            for _ in range(4):
                group.create_task(work("honest", 1.0))

    asyncio.run(main())
    # On a tie, one call of the hostile tenant may come first. All calls of the honest tenant precede the hostile one's
    # others.
    assert order[-2:] == ["hostile", "hostile"] and order.count("honest") == 4


def test_a_tenant_that_waits_too_often_is_refused() -> None:
    async def main() -> None:
        slots = FairSlots(1, 2, "chat templates to render")

        async def hold() -> None:
            async with slots.hold("acme"):
                await asyncio.sleep(3600)

        tasks = [asyncio.create_task(hold()) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(TenantBusy, match="2 chat templates to render waiting, and the limit is 2"):
            await hold()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await count_free(slots) == 1

    asyncio.run(main())


def test_the_last_work_of_a_request_comes_first_and_is_never_refused() -> None:
    order: list[str] = []

    async def main() -> None:
        slots = FairSlots(1, 1, "things")

        async def work(name: str, *, ends_request: bool) -> None:
            async with slots.hold("acme", ends_request=ends_request):
                order.append(name)

        async with slots.hold("acme"):
            tasks = [asyncio.create_task(work("prompt", ends_request=False))]
            await asyncio.sleep(0)
            with pytest.raises(TenantBusy):
                await work("another prompt", ends_request=False)
            tasks.append(asyncio.create_task(work("answer", ends_request=True)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert order == ["answer", "prompt"]


def test_a_cancelled_wait_releases_its_slot() -> None:
    async def main() -> None:
        slots = FairSlots(1, 8, "things")
        async with slots.hold("acme"):
            waiting = asyncio.create_task(slots.hold("acme").__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert await count_free(slots) == 1

    asyncio.run(main())


def test_a_slot_released_while_a_cancellation_is_pending_is_not_lost() -> None:
    """Born from a bug: a ValueError was raised instead of the cancellation."""

    async def main() -> None:
        slots = FairSlots(1, 8, "things")
        async with slots.hold("acme"):
            waiting = asyncio.create_task(slots.hold("acme").__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await count_free(slots) == 1

    asyncio.run(main())


def test_idle_tenants_take_no_memory() -> None:
    async def main() -> None:
        slots = FairSlots(1, 8, "things")
        tenant = NamedTenant("acme")
        name = weakref.ref(tenant)
        async with slots.hold(tenant):
            pass
        del tenant
        gc.collect()
        assert name() is None

    asyncio.run(main())


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
def test_processes_divide_slots_and_each_keeps_the_reserve(num_processes: int) -> None:
    for num_slots, num_reserved in ((4, 2), (3, 1)):
        num_own = slots_of_process(num_slots, num_reserved, num_processes)
        # What one tenant gets at most: every slot but the reserve.
        of_one_tenant = num_processes * (num_own - num_reserved)
        assert num_own - num_reserved >= 1 and of_one_tenant <= max(num_slots - num_reserved, num_processes)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_a_flood_in_every_process_leaves_a_slot_to_another_tenant_in_each(num_processes: int) -> None:
    async def main() -> None:
        for num_slots, num_reserved in ((4, 2), (3, 1)):
            num_own = slots_of_process(num_slots, num_reserved, num_processes)
            processes = [
                FairSlots(num_own, 100, "work", num_reserved=num_reserved) for _ in range(num_processes)
            ]
            async with AsyncExitStack() as stack:
                floods = [
                    asyncio.create_task(stack.enter_async_context(slots.hold("hostile")))
                    for slots in processes
                    for _ in range(20)
                ]
                await asyncio.sleep(0)
                for slots in processes:
                    async with asyncio.timeout(300), slots.hold("honest"):
                        pass
                num_held = sum(flood.done() for flood in floods)
                assert num_held <= max(num_slots - num_reserved, num_processes)
                for flood in floods:
                    flood.cancel()
                await asyncio.gather(*floods, return_exceptions=True)

    asyncio.run(main())
