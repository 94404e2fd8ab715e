"""Simulated fleets behind the production router, for tests."""

from bench.machines import A10G_7B
from slora.routing.router import Router
from slora.simulation.fleet.autoscaling import ScalingRule
from slora.simulation.fleet.fleet import Fleet, Loss, RouterPolicy
from slora.simulation.fleet.model_adapters import AdapterSettings
from slora.simulation.fleet.replica_model import ReplicaSettings
from slora.simulation.fleet.traffic import Traffic
from slora.simulation.traces import S2
from slora.simulation.virtual_source import FetchCosts

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
