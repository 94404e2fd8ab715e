"""The replica model agrees with the production scheduler, and loses no request."""

import numpy as np
import pytest

from bench.machines import A10G_7B
from bench.simulation.fleet.model_request import FleetLog
from bench.simulation.fleet.replica_model import ReplicaModel
from bench.simulation.fleet.traffic import Demand, make_traffic, read_trace_arrays
from bench.simulation.routed_engines import RoutedEngines
from bench.simulation.simulation import Policies, Setup
from bench.simulation.traces import S2, zipf_trace
from slora.client.router import Router
from tests.bench.simulation.fleet.fleets import FETCH, SETTINGS, TOKEN_S, make_fleet


# From half load to overload, in which the scheduler preempts requests and is fair among tenants. `bench.fleet` compares
# long traces.
@pytest.mark.parametrize("rate", [1.6, *(pytest.param(rate, marks=pytest.mark.soak) for rate in (0.6, 1.2))])
def test_model_and_scheduler_agree(rate: float) -> None:
    trace = zipf_trace(40, rate, 100.0, alpha=1.0, num_tenants=20)
    policies = Policies(prefix_cache="off")
    setup = Setup(A10G_7B, S2.ranks, num_tenants=20, fetch=FETCH, max_tokens=2048, policies=policies)
    engines = RoutedEngines(setup, 1, Router(token_s=TOKEN_S), TOKEN_S)
    exact = engines.run(trace)
    model = make_fleet(1, read_trace_arrays(trace), report_s=0.0).run()
    (engine,) = engines.engines.values()
    assert model.attainment == pytest.approx(exact.attainment, abs=0.01)
    assert model.ttft_mean_s == pytest.approx(exact.ttft_mean_s, rel=0.02)
    assert model.latency_mean_s == pytest.approx(exact.latency_mean_s, rel=0.02)
    assert model.loads == pytest.approx(engines.num_loads, abs=2)
    assert model.preemptions == pytest.approx(engine.scheduler.num_preemptions, rel=0.05)
    assert (model.preemptions > 100) == (rate > 1.2)


def test_decode_steps_take_what_the_costs_say_to_the_last_bit_of_context() -> None:
    log = FleetLog.empty(1)
    model, costs = ReplicaModel(SETTINGS, log), A10G_7B.costs
    model.submit(0.0, 0, 3, 100, 50)
    model.advance(float("inf"))
    fetch_s = FETCH.latency_s + A10G_7B.adapter_layout(8).num_bytes / FETCH.bytes_per_s
    load_s = model.adapters.count_pages(3) * A10G_7B.full_page_bytes * costs.load_byte_s
    first_s = fetch_s + load_s + costs.step_s + 100 * costs.token_s
    assert log.first_token_s[0] == pytest.approx(first_s)
    decode_s = sum(costs.step_s + costs.decode_s + costs.context_token_s * (101 + i) for i in range(49))
    assert log.end_s[0] == pytest.approx(first_s + decode_s)


def test_advancing_in_small_pieces_changes_nothing() -> None:
    traffic = make_traffic(Demand(30, 1.1, 120.0))
    logs = []
    for pieces in (1, 7):
        log = FleetLog.empty(len(traffic))
        model, before = ReplicaModel(SETTINGS, log), 0.0
        for i, now in enumerate(traffic.arrival_s.tolist()):
            for until_s in np.linspace(before, now, pieces + 1)[1:].tolist():
                model.advance(until_s)
            model.submit(
                now, i, int(traffic.adapter[i]), int(traffic.prompt_tokens[i]), int(traffic.output_tokens[i])
            )
            before = now
        model.advance(float("inf"))
        assert not model.unfinished_tokens and not model.num_running and not model.num_waiting
        logs.append(log)
    np.testing.assert_allclose(logs[0].end_s, logs[1].end_s)
