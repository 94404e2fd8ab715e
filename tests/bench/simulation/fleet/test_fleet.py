"""Simulated fleets behind the production router, and their model of a replica, which agrees with the scheduler."""

import random
from dataclasses import replace

import numpy as np
import pytest

from bench.machines import A10G_7B
from bench.simulation.fleet.autoscaling import ScalingRule
from bench.simulation.fleet.fleet import Fleet, Loss, Phase, RouterPolicy
from bench.simulation.fleet.model_adapters import AdapterSettings
from bench.simulation.fleet.model_queue import ModelQueue
from bench.simulation.fleet.model_request import FleetLog, ModelRequest
from bench.simulation.fleet.replica_model import ReplicaModel, ReplicaSettings
from bench.simulation.fleet.traffic import Demand, Traffic, make_traffic, read_trace_arrays
from bench.simulation.routed_engines import RoutedEngines
from bench.simulation.simulation import Policies, Setup
from bench.simulation.traces import S2, zipf_trace
from bench.simulation.virtual_source import FetchCosts
from slora.client.router import Router
from slora.memory.page_pool import PagePool
from slora.memory.tenant_account import TenantAccount
from slora.scheduler.waiting_queues import FairQueue
from tests.support.queueing import make_sequence, make_tenant

FETCH = FetchCosts(latency_s=0.02, bytes_per_s=200e6)
SETTINGS = ReplicaSettings(A10G_7B, AdapterSettings(S2.ranks, FETCH), num_tenants=20)
TOKEN_S = 1.5e-3


def make_fleet(
    num_replicas: int,
    traffic: Traffic,
    *,
    num_routers: int = 1,
    report_s: float = 0.5,
    loss: Loss | None = None,
    scaling: ScalingRule | None = None,
    settings: ReplicaSettings = SETTINGS,
) -> Fleet:
    routers = [RouterPolicy(Router(token_s=TOKEN_S)) for _ in range(num_routers)]
    return Fleet(
        settings,
        num_replicas,
        routers,
        traffic,
        token_s=TOKEN_S,
        report_s=report_s,
        loss=loss,
        scaling=scaling,
    )


def make_request(number: int, tenant: TenantAccount) -> ModelRequest:
    return ModelRequest(number, 0.0, tenant, 0, 1, 1)


def test_both_queues_serve_the_same_requests_in_the_same_order() -> None:
    draw = random.Random(0)
    pairs = [(make_tenant(f"tenant-{i}"), make_tenant(f"tenant-{i}")) for i in range(4)]
    fair, model = FairQueue(), ModelQueue()
    numbers = {}
    for number in range(600):
        first, second = draw.choice(pairs)
        if draw.random() < 0.55:
            sequence, request = make_sequence(first), make_request(number, second)
            numbers[sequence] = number
            sequence.num_preemptions = request.num_preemptions = int(draw.random() < 0.2)
            fair.push(sequence), model.push(request)
        skipped = draw.choices(pairs, k=draw.randrange(2))
        head = fair.peek([one for one, _ in skipped])
        taken = model.peek([one for _, one in skipped])
        assert (head is None) == (taken is None)
        assert [numbers[one] for one in fair.upcoming(5)] == [one.number for one in model.upcoming(5)]
        if head is not None and taken is not None and draw.random() < 0.7:
            assert numbers[head] == taken.number
            fair.remove(head), model.remove_first(taken.tenant)
            for tenant in (head.tenant, taken.tenant):
                tenant.charge(1 + number % 7)
        assert len(fair) == len(model) == len(list(model))


def test_both_queues_preempt_the_same_request() -> None:
    draw = random.Random(1)
    for _ in range(100):
        pool = PagePool(1000)
        pairs = [(make_tenant(f"tenant-{i}"), make_tenant(f"tenant-{i}")) for i in range(4)]
        fair, model = FairQueue(), ModelQueue()
        sequences, requests = [], []
        pages: dict[TenantAccount, int] = {}
        for number in range(12):
            first, second = draw.choice(pairs)
            sequence, request = make_sequence(first), make_request(number, second)
            if draw.random() < 0.2:
                fair.push(sequence), model.push(request)
                continue
            sequence.num_computed = request.num_computed = draw.randrange(50)
            sequence.num_repeat_preemptions = request.num_repeats = draw.choice((0, 0, 0, 3))
            held = draw.randrange(1, 20)
            pool.allocate(held, first)
            pages[second] = pages.get(second, 0) + held
            sequences.append(sequence), requests.append(request)
        victim = sequences.index(fair.choose_victim(sequences))
        assert model.choose_victim(requests, pages) is requests[victim]


def test_requests_of_lost_replicas_continue_on_the_others() -> None:
    traffic = make_traffic(Demand(200, 6.0, 60.0, swing=0.3, shift_s=10.0, viral=(20.0, 30.0, 0.2)))
    fleet = make_fleet(10, traffic, loss=Loss(30.0, 0, 2))
    results = fleet.run()
    assert results.attainment > 0.9
    assert not any(model.num_running or model.num_waiting for model in fleet.models)
    # The counters of the lost replicas stay.
    assert fleet.models[0].adapters.num_fetches > 0 and not fleet.models[0].adapters.uses


def test_an_adapter_that_was_evicted_from_the_pool_comes_from_the_host_cache() -> None:
    traffic = make_traffic(Demand(120, 1.0, 200.0, alpha=0.5))
    without = make_fleet(1, traffic).run()
    cached = replace(SETTINGS, adapters=replace(SETTINGS.adapters, host_bytes=16 << 30))
    results = make_fleet(1, traffic, settings=cached).run()
    assert results.loads == results.distinct_adapters < without.loads
    assert results.host_loads > 0 == without.host_loads
    assert results.ttft_mean_s < without.ttft_mean_s


def test_a_fleet_grows_with_its_load_and_drains_replicas_afterwards() -> None:
    traffic = make_traffic(Demand(100, 4.0, 240.0, swing=0.9))
    rule = ScalingRule(num_initial=2, num_least=1, start_s=10.0, hold_s=20.0)
    fleet = make_fleet(10, traffic, scaling=rule)
    results = fleet.run()
    assert any(model.adapters.num_fetches for model in fleet.models[4:])
    assert fleet.phases.count(Phase.SERVING) < 6
    assert 2 * 240 < results.replica_s < 8 * 240
    assert results.attainment > 0.9


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
