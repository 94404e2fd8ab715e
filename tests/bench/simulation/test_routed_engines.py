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
TRACE = zipf_trace(40, 2.0, 12.0, alpha=1.0, num_tenants=20)


def test_affinity_loads_fewer_adapters_than_load_alone_and_in_each_run_the_same() -> None:
    affinity, load = Penalties(), Penalties(0, 0, 0, 0, 0)
    runs = []
    for penalties in (affinity, affinity, load):
        engines = RoutedEngines(SETUP, 3, Router(penalties=penalties), TOKEN_S)
        runs.append((engines.run(TRACE), engines.num_loads))
        assert runs[-1][0].completed == len(TRACE) and not runs[-1][0].errors
        assert all(engine.outcomes for engine in engines.engines.values())
    first, again, by_load = runs
    assert first == again
    # Each adapter is loaded at least once.
    assert len({request.adapter for request in TRACE}) <= first[1] < by_load[1]
