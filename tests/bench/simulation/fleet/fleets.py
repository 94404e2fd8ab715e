"""Simulated fleets behind the production router, for tests."""

from bench.machines import A10G_7B
from bench.simulation.fleet.autoscaling import ScalingRule
from bench.simulation.fleet.fleet import Fleet, Loss, RouterPolicy
from bench.simulation.fleet.model_adapters import AdapterSettings
from bench.simulation.fleet.replica_model import ReplicaSettings
from bench.simulation.fleet.traffic import Traffic
from bench.simulation.traces import S2
from bench.simulation.virtual_source import FetchCosts
from slora.client.router import Router

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
