"""The replica model agrees with the production scheduler, and loses no request."""

import numpy as np
import pytest

from bench.machines import A10G_7B
from slora.routing.router import Router
from slora.simulation.fleet.fleet import Fleet, Loss, RouterPolicy
from slora.simulation.fleet.replica_model import FleetLog, ReplicaModel, ReplicaSettings
from slora.simulation.fleet.traffic import Demand, make_traffic, read_trace_arrays
from slora.simulation.routed_engines import RoutedEngines
from slora.simulation.simulation import Policies, Setup
from slora.simulation.traces import S2, zipf_trace
from slora.simulation.virtual_source import FetchCosts

FETCH = FetchCosts(latency_s=0.02, bytes_per_s=200e6)
SETTINGS = ReplicaSettings(A10G_7B, S2.ranks, fetch=FETCH)
TOKEN_S = 1.5e-3


@pytest.mark.parametrize("rate", [0.8, pytest.param(0.9, marks=pytest.mark.soak)])
def test_model_and_scheduler_agree_below_saturation(rate: float) -> None:
    trace = zipf_trace(50, 2 * rate, 100.0, alpha=1.0, num_tenants=20)
    policies = Policies(prefix_cache="off")
    setup = Setup(A10G_7B, S2.ranks, num_tenants=20, fetch=FETCH, max_tokens=2048, policies=policies)
    exact = RoutedEngines(setup, 2, Router(token_s=TOKEN_S), TOKEN_S).run(trace)
    traffic = read_trace_arrays(trace)
    policy = RouterPolicy(Router(token_s=TOKEN_S))
    fleet = Fleet(SETTINGS, 2, policy, traffic, token_s=TOKEN_S, report_s=0.0)
    model = fleet.run()
    assert model.attainment == pytest.approx(exact.attainment, abs=0.02)
    # `bench.fleet` has the errors on long traces; this short one has few cold loads to average over.
    assert model.ttft_mean_s == pytest.approx(exact.ttft_mean_s, rel=0.2)
    assert model.latency_mean_s == pytest.approx(exact.latency_mean_s, rel=0.05)


def test_decode_steps_take_what_the_costs_say_to_the_last_bit_of_context() -> None:
    log = FleetLog.empty(1)
    model, costs = ReplicaModel(SETTINGS, log), A10G_7B.costs
    model.submit(0.0, 0, 3, 100, 50)
    model.advance(float("inf"))
    fetch_s = FETCH.latency_s + A10G_7B.adapter_layout(8).num_bytes / FETCH.bytes_per_s
    load_s = model.pages_of(3) * A10G_7B.full_page_bytes * costs.load_byte_s
    first_s = fetch_s + load_s + costs.step_s + costs.step_s + 100 * costs.token_s
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


def test_requests_of_lost_replicas_continue_on_the_others() -> None:
    traffic = make_traffic(Demand(200, 6.0, 60.0, swing=0.3, shift_s=10.0, viral=(20.0, 30.0, 0.2)))
    fleet = Fleet(
        SETTINGS, 10, RouterPolicy(Router(token_s=TOKEN_S)), traffic, token_s=TOKEN_S, loss=Loss(30.0, 0, 2)
    )
    results = fleet.run()
    assert results.attainment > 0.9
    assert not any(model.num_running or model.num_waiting for model in fleet.models)
    assert fleet.models[0].num_loads == 0 < fleet.models[2].num_loads
