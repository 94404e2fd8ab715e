"""Engines that know of each other's service divide their service among tenants as one engine does.

All engines run the production scheduler behind the production router, on a virtual clock.
"""

from collections.abc import Sequence

import pytest

from bench.machines import A10G_7B
from bench.simulation.routed_engines import RoutedEngines
from bench.simulation.simulation import Setup
from bench.simulation.traces import S2, Trace, TraceRequest, zipf_trace
from bench.simulation.virtual_source import FetchCosts
from slora.client.router import Penalties, Router

SETUP = Setup(A10G_7B, (8,), num_tenants=3, max_num_seqs=24)
TOKEN_S = 1.2e-3
# An engine serves about 5 of these requests in a second. The batch is full, so the fair queue decides who is next.
PROMPT, ANSWER = 40, 200
SECONDS = 40.0
# Adapters of the first tenant, with homes at all engines.
HOMES = range(0, 36, 3)
SPREAD, PINNED, NEW = 0, 1, 2


def backlog(tenant: int, adapters: Sequence[int], rate: float, start_s: float = 0.0) -> Trace:
    """More requests of a tenant than are served, for its adapters in turn."""
    number = round(rate * (SECONDS - start_s))
    return [
        TraceRequest(
            start_s + index / rate,
            tenant,
            adapters[index % len(adapters)],
            PROMPT,
            ANSWER,
            tenant << 20 | index,
        )
        for index in range(number)
    ]


def make_engines(num_replicas: int, share_s: float | None) -> RoutedEngines:
    # Each adapter has one home for ever.
    router = Router(penalties=Penalties(0, 1e9, 1e9), homes_per_replica_of_traffic=0.0)
    return RoutedEngines(SETUP, num_replicas, router, TOKEN_S, share_s=share_s)


def jain(shares: Sequence[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(one**2 for one in shares))


def measure(num_replicas: int, share_s: float | None, trace: Trace, tenants: Sequence[int]) -> list[float]:
    """Returns what the tenants receive in the second half of the time."""
    engines = make_engines(num_replicas, share_s)
    trace = sorted(trace, key=lambda request: request.arrival_s)
    engines.run([one for one in trace if one.arrival_s < SECONDS / 2], until_s=SECONDS / 2)
    before = [engines.charged(tenant) for tenant in tenants]
    engines.run([one for one in trace if one.arrival_s >= SECONDS / 2], until_s=SECONDS)
    return [engines.charged(tenant) - start for tenant, start in zip(tenants, before, strict=True)]


def spread_and_pinned() -> Trace:
    """Both tenants send more than twice what they are served."""
    return [*backlog(SPREAD, HOMES, 14.0), *backlog(PINNED, [1], 7.0)]


@pytest.mark.soak
def test_engines_that_do_not_know_of_each_other_favour_the_tenant_that_uses_more_of_them() -> None:
    spread, pinned = measure(2, None, spread_and_pinned(), (SPREAD, PINNED))
    assert spread > 2.5 * pinned and jain([spread, pinned]) < 0.82


@pytest.mark.parametrize("share_s", [pytest.param(0.1, marks=pytest.mark.soak), 1.0])
def test_a_tenant_at_one_engine_gets_as_much_as_one_at_two_engines(share_s: float) -> None:
    shares = measure(2, share_s, spread_and_pinned(), (SPREAD, PINNED))
    assert jain(shares) > 0.99


@pytest.mark.soak
def test_a_new_tenant_is_not_punished_for_what_others_received_before() -> None:
    trace = spread_and_pinned() + backlog(NEW, [2, 5, 8, 11, 14, 17], 14.0, SECONDS / 2)
    shares = measure(2, 0.1, trace, (SPREAD, PINNED, NEW))
    # Its first requests wait until others have left the full batches.
    assert shares[2] > 0.85 * sum(shares) / 3 and jain(shares) > 0.98


WITH_ADAPTERS = Setup(
    A10G_7B, S2.ranks, num_tenants=20, fetch=FetchCosts(latency_s=0.02, bytes_per_s=200e6), max_tokens=2048
)
TRACE = zipf_trace(40, 2.0, 12.0, alpha=1.0, num_tenants=20)


def test_affinity_loads_fewer_adapters_than_load_alone_and_in_each_run_the_same() -> None:
    affinity, load = Penalties(), Penalties(0, 0, 0, 0, 0)
    runs = []
    for penalties in (affinity, affinity, load):
        engines = RoutedEngines(WITH_ADAPTERS, 3, Router(penalties=penalties), TOKEN_S)
        runs.append((engines.run(TRACE), engines.num_loads))
        assert runs[-1][0].completed == len(TRACE) and not runs[-1][0].errors
        assert all(engine.outcomes for engine in engines.engines.values())
    first, again, by_load = runs
    assert first == again
    # Each adapter is loaded at least once.
    assert len({request.adapter for request in TRACE}) <= first[1] < by_load[1]
