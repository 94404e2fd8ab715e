"""Whatever requests meet in a small pool, some request makes progress. No two requests preempt each other for ever."""

from contextlib import suppress
from random import Random

import pytest

from slora.core.errors import ContextTooLong
from slora.core.request import TenantShare
from tests.slora.scheduler.test_scheduler import PAGES, VERSIONS
from tests.support.scheduler_bench import SchedulerBench

SHARES = [
    *[TenantShare()] * 3,
    TenantShare(weight=3.0),
    TenantShare(min_share=0.3),
    TenantShare(max_share=0.6),
    TenantShare(priority=1),
]
TENANTS = ("tenant", "other", "third")  # the first tenant owns the adapters
# The most consecutive steps without output. Prompts and pools are so small that dozens would already be many.
MOST_SILENT = 400


def make_bench(random: Random, *, overlap: bool = False) -> SchedulerBench:
    num_pages, num_seqs = random.randint(2, 12), random.randint(1, 5)
    return SchedulerBench(
        PAGES,
        num_pages=num_pages,
        num_slots=random.randint(1, 5),
        max_num_seqs=num_seqs,
        load_pages=random.randint(1, 3),
        max_num_batched_tokens=num_seqs + random.randint(0, 9),
        preemption=random.choice(["swap", "recompute", "auto"]),
        swap_pages=random.choice([0, 3, 12]),
        scheduling=random.choice(["fair", "fcfs"]),
        prefix_cache=random.choice(["off", "tenant", "public"]),
        window=random.choice([None, None, 3, 8]),
        rope_switch=random.choice([None, None, 6, 14]),
        host_pages=random.choice([None, 0, 1, 6]),
        loads_beside=overlap and random.random() < 0.5,
        overlap=overlap,
    )


def add_request(bench: SchedulerBench, random: Random, name: str, shares: dict[str, TenantShare]) -> None:
    most = bench.config.max_num_seqs
    beams = random.choice([None, None, min(4, random.randint(1, most))])
    adapter = random.choice([None, None, *VERSIONS])
    tenant = TENANTS[0] if adapter else random.choice(TENANTS)
    prompt, max_tokens = random.randint(1, 20), random.randint(1, 20)
    n = 1 if beams else random.randint(1, most)
    with suppress(ContextTooLong):
        bench.add(
            name,
            prompt=prompt,
            max_tokens=max_tokens,
            beams=beams,
            n=n,
            tenant=tenant,
            share=shares[tenant],
            adapter=adapter,
        )


def play(seed: int, *, pins: bool, overlap: bool = False) -> None:
    """Plays random requests, pins, fetches and broken steps, then runs all requests to their end."""
    random = Random(seed)
    bench = make_bench(random, overlap=overlap)
    shares = {tenant: random.choice(SHARES) for tenant in TENANTS}
    for tenant, share in shares.items():
        bench.memory.tenants.set_share(tenant, share)
    for number in range(random.randint(5, 60)):
        chance = random.random()
        if chance < 0.2 and pins:
            bench.scheduler.set_pins(random.sample(VERSIONS, random.randint(0, 3)))
        elif chance < 0.25:
            bench.scheduler.prewarm(random.choice(VERSIONS))
        elif chance < 0.45:
            add_request(bench, random, str(number), shares)
        elif chance < 0.6 and bench.source.in_flight:
            bench.source.deliver([random.choice(sorted(bench.source.in_flight, key=str))])
        else:
            bench.step(breaks=random.random() < 0.05)
    for _ in bench.run_to_end(MOST_SILENT):
        pass


# Born from two bugs: the two requests preempted each other at every start. In the first, they were a beam below its
# tenant's floor and a long prompt. In the second, one waited for its other beams, and the other never got its last
# pages.
@pytest.mark.parametrize("seed", [10445, 10680])
def test_two_requests_that_preempt_each_other_both_complete(seed: int) -> None:
    play(seed, pins=False)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pins", [False, True])
def test_random_concurrent_requests_all_complete(*, pins: bool, overlap: bool, soak: bool) -> None:
    for seed in range(5000 if soak else 12):
        play(seed, pins=pins, overlap=overlap)
