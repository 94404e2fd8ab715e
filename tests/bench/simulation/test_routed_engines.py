"""Several engines with the production scheduler behind the router."""

from bench.machines import A10G_7B
from bench.simulation.routed_engines import RoutedEngines
from bench.simulation.simulation import Setup
from bench.simulation.traces import S2, zipf_trace
from bench.simulation.virtual_source import FetchCosts
from slora.client.router import Penalties, Router

TOKEN_S = 1.2e-3
SETUP = Setup(
    A10G_7B, S2.ranks, num_tenants=20, fetch=FetchCosts(latency_s=0.02, bytes_per_s=200e6), max_tokens=2048
)
TRACE = zipf_trace(40, 2.0, 30.0, alpha=1.0, num_tenants=20)


def test_affinity_loads_fewer_adapters_than_load_alone() -> None:
    runs = {}
    for name, penalties in (("affinity", Penalties()), ("load", Penalties(0, 0, 0, 0, 0))):
        runs[name] = engines = RoutedEngines(SETUP, 3, Router(penalties=penalties), TOKEN_S)
        results = engines.run(TRACE)
        assert results.completed == len(TRACE) and not results.errors
        assert all(engine.outcomes for engine in engines.engines.values())
    # Each adapter is loaded at least once.
    assert len({request.adapter for request in TRACE}) <= runs["affinity"].num_loads < runs["load"].num_loads


def test_two_runs_of_routed_engines_are_equal() -> None:
    first, second = (RoutedEngines(SETUP, 3, Router(), TOKEN_S).run(TRACE) for _ in range(2))
    assert first == second
