"""Fleets with a lost rack, several routers, a host cache and autoscaling. No request is lost."""

from dataclasses import replace

from bench.simulation.fleet.autoscaling import ScalingRule
from bench.simulation.fleet.fleet import Loss, Phase
from bench.simulation.fleet.traffic import Demand, make_traffic
from tests.bench.simulation.fleet.fleets import SETTINGS, make_fleet


def test_requests_of_lost_replicas_continue_on_the_others() -> None:
    traffic = make_traffic(Demand(200, 6.0, 60.0, swing=0.3, shift_s=10.0, viral=(20.0, 30.0, 0.2)))
    fleet = make_fleet(10, traffic, loss=Loss(30.0, 0, 2))
    results = fleet.run()
    assert results.attainment > 0.9
    assert not any(model.num_running or model.num_waiting for model in fleet.models)
    # The counters of the lost replicas stay.
    assert fleet.models[0].adapters.num_fetches > 0 and not fleet.models[0].adapters.uses


def test_routers_that_do_not_see_each_other_agree_on_homes() -> None:
    traffic = make_traffic(Demand(400, 12.0, 60.0))
    one, four = (make_fleet(20, traffic, num_routers=count).run() for count in (1, 4))
    assert four.attainment > 0.99
    assert one.distinct_adapters <= one.loads <= four.loads < 1.2 * one.loads


def test_an_adapter_that_was_evicted_from_the_pool_comes_from_the_host_cache() -> None:
    traffic = make_traffic(Demand(120, 1.0, 200.0, alpha=0.5))
    without = make_fleet(1, traffic).run()
    cached = replace(SETTINGS, adapters=replace(SETTINGS.adapters, host_bytes=16 << 30))
    results = make_fleet(1, traffic, settings=cached).run()
    assert results.loads == results.distinct_adapters < without.loads
    assert results.host_loads > 0 == without.host_loads
    assert results.ttft_mean_s < without.ttft_mean_s


def test_a_full_host_cache_fetches_again() -> None:
    traffic = make_traffic(Demand(120, 1.0, 200.0, alpha=0.5))
    small = replace(SETTINGS, adapters=replace(SETTINGS.adapters, host_bytes=3 << 30))
    results = make_fleet(1, traffic, settings=small).run()
    assert results.loads > results.distinct_adapters
    assert results.host_loads > 0


def test_a_fleet_grows_with_its_load_and_drains_replicas_afterwards() -> None:
    traffic = make_traffic(Demand(100, 4.0, 240.0, swing=0.9))
    rule = ScalingRule(num_initial=2, num_least=1, start_s=10.0, hold_s=20.0)
    fleet = make_fleet(10, traffic, scaling=rule)
    results = fleet.run()
    assert any(model.adapters.num_fetches for model in fleet.models[4:])
    assert fleet.phases.count(Phase.SERVING) < 6
    assert 2 * 240 < results.replica_s < 8 * 240
    assert results.attainment > 0.9


def test_viral_requests_come_in_addition() -> None:
    demand = Demand(100, 10.0, 100.0)
    traffic = make_traffic(replace(demand, viral=(40.0, 60.0, 0.5)))
    is_viral = (traffic.adapter == 99) & (traffic.arrival_s >= 40) & (traffic.arrival_s < 60)
    assert 150 < is_viral.sum() < 250
    assert 900 < len(traffic) - is_viral.sum() < 1100
