"""Deploys the replicas of a cluster through Ray Serve. This process must be connected to Ray."""

import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from slora.client.router import ReplicaState, RoutedWork, Router
from slora.core.errors import ConfigError, SloraError
from slora.core.request import EngineRequest
from slora_adapters.version import AdapterVersion
from slora_api.adapters.base_model import BaseModelFiles
from slora_api.cluster.cluster_config import ClusterConfig, read_secret
from slora_api.cluster.replica import EngineReplica, ReplicaSpec, choose_num_replicas
from slora_api.cluster.replica_registry import ReplicaRegistry

# Ray asks the replicas this often which adapters they have. Its default of 10 s is too long for cold adapters.
STATS_PERIOD_S = 1.0
# Estimates: the seconds of a token, and the tokens of an answer without max_tokens.
_TOKEN_S, _ANSWER_TOKENS = 1e-3, 256


class AdapterRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types.
    """The router of one handle."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._router = Router(token_s=_TOKEN_S)
        # Name -> the last report, and the state that was made of it. The router tells by identity what is new.
        self._states: dict[str, tuple[dict[str, Any], ReplicaState]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas in the order in which Ray should try them."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        states = [self._read_state(name, replica.routing_stats) for name, replica in by_name.items()]
        self._states = {name: self._states[name] for name in by_name}
        return [[by_name[name]] for name in self._router.choose(_describe(pending_request), states)]

    def _read_state(self, name: str, report: dict[str, Any]) -> ReplicaState:
        known = self._states.get(name)
        if known is None or known[0] != report:
            running, waiting = report.get("running", 0), report.get("waiting", 0)
            resident = frozenset(AdapterVersion(*pair) for pair in report.get("resident", ()))
            load = (running + waiting) * _ANSWER_TOKENS * _TOKEN_S
            known = report, ReplicaState(name, resident, frozenset(), waiting, running, load)
            self._states[name] = known
        return known[1]


def _describe(pending: PendingRequest | None) -> RoutedWork:
    request = pending.args[0] if pending is not None and pending.args else None
    if not isinstance(request, EngineRequest):
        return RoutedWork("", (), None, 0)
    tokens = len(request.prompt_token_ids) + (request.sampling.max_tokens or _ANSWER_TOKENS)
    return RoutedWork(request.tenant, request.versions, None, tokens)


_DEPLOYMENT = "engine"
_POLL_S = 0.5
# A replica whose engine cannot start fails each time. Ray tries this often for each replica.
_STARTS = 3
# Ray removes replicas more slowly than it adds them, because a new replica reads its weights first.
_SLOWER_DOWN = 20
# How long `slora deploy` waits for the replicas.
_DEPLOY_S = 1800.0
# Draining takes the engine at most 15 s, see `ReplicaHost`.
_DRAIN_S = 30.0
# How a traceback in a message of Ray names an error of ours.
_REASON = re.compile(r"(slora|slora_api|slora_adapters)\.[\w.]+: ")
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2.0, 30.0


class DeployFailed(SloraError):
    """The replicas did not start. The replicas that ran before go on."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a deployment is. states: number of replicas by Ray's name of their state, such as RUNNING."""

    status: str
    message: str
    states: Mapping[str, int]


def connect_to_ray(address: str) -> None:
    """address: HOST:PORT of Ray's head, or auto. Ray's own messages go to its logs."""
    ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)


class Cluster:
    """The replicas of one cluster, as Ray runs them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.registry = ReplicaRegistry(ray.get_runtime_context().gcs_address, name)

    def progress(self) -> Progress | None:
        """Returns None if the cluster is not deployed."""
        application = serve.status().applications.get(self.name)
        if application is None:
            return None
        found = application.deployments.get(_DEPLOYMENT)
        states = {} if found is None else {str(state): count for state, count in found.replica_states.items()}
        message = application.message if found is None or not found.message else found.message
        return Progress(str(application.status.value), message, states)

    def delete(self) -> None:
        """Drains and ends all replicas. Returns when they have ended."""
        serve.delete(self.name)
        self.registry.clear()


class Deployment:
    """Changes the replicas of a cluster to the settings of `config`.

    host: the address at which engines listen; None for the address of each host within the cluster.
    """

    def __init__(self, config: ClusterConfig, host: str | None = None) -> None:
        self._config = config
        self._host = host
        self._name = config.cluster.cluster_name
        self._cluster = Cluster(self._name)

    def apply(self) -> str:
        """Starts the cluster, or changes it to the settings of `config`. Returns the version of the new replicas.

        Returns at once; see `wait`. A change of the number of replicas keeps the replicas. Any other change replaces
        them, one after the other. Raises ConfigError.
        """
        config = self._config
        # Refuses a model or a tokenizer that cannot be served with these settings.
        _ = BaseModelFiles(config.server).tokenizer
        gpus = self._choose_gpus()
        self._check_fit(gpus)
        self._check_shared(config)
        if (running := self._cluster.progress()) is None or not running.states.get("RUNNING"):
            self._cluster.registry.clear()
        secret = read_secret(config, create=True)
        spec = ReplicaSpec(
            self._name,
            config.version(os.environ, secret),
            self._host,
            config.replica_texts(os.environ),
            secret,
        )
        # Without this call, Ray would also start its own HTTP proxies.
        serve.start(proxy_location="Disabled")
        application = serve.deployment(EngineReplica).options(**self._options(gpus), version=spec.version)
        serve.run_many(
            [serve.RunTarget(application.bind(spec), name=self._name, route_prefix=None)],
            wait_for_applications_running=False,
        )
        return spec.version

    def _options(self, gpus: int) -> dict[str, Any]:
        cluster, num_replicas = self._config.cluster, self._config.server.replicas
        bundle = self._bundle(gpus)
        options: dict[str, Any] = {
            "_internal": True,  # Serve's own commands set the version in this way, too.
            "name": _DEPLOYMENT,
            "ray_actor_options": {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)},
            # All ranks of a replica are on one host.
            "placement_group_bundles": [bundle],
            "placement_group_strategy": "STRICT_PACK",
            "max_ongoing_requests": 4096,  # The engine has a queue of its own.
            "health_check_period_s": _HEALTH_PERIOD_S,
            "health_check_timeout_s": _HEALTH_TIMEOUT_S,
            "graceful_shutdown_timeout_s": _DRAIN_S,
            "graceful_shutdown_wait_loop_s": 0.1,
            "max_constructor_retry_count": _STARTS,
            "request_router_config": RequestRouterConfig(
                request_router_class=AdapterRequestRouter, request_routing_stats_period_s=STATS_PERIOD_S
            ),
            "max_surge_percent": 1 if cluster.surge else 0,
        }
        if cluster.max_replicas is None:
            return options | {"num_replicas": num_replicas}
        return options | {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=num_replicas,
                max_replicas=cluster.max_replicas,
                upscale_delay_s=cluster.scale_seconds,
                downscale_delay_s=cluster.scale_seconds * _SLOWER_DOWN,
                policy=AutoscalingPolicy(policy_function=choose_num_replicas),
            )
        }

    def _bundle(self, gpus: int) -> dict[str, float]:
        ranks = self._config.server.engine.tensor_parallel_size
        counts = {"CPU": float(ranks), "GPU": float(ranks * gpus)}
        return {name: count for name, count in counts.items() if count}

    def _choose_gpus(self) -> int:
        """Returns how many GPUs each rank reserves."""
        if (device := self._config.server.engine.device) != "auto":
            return int(device == "cuda")
        return int(any("GPU" in node["Resources"] for node in ray.nodes() if node["Alive"]))

    def _check_fit(self, gpus: int) -> None:
        """Refuses replicas that no host of the cluster has room for, not even without other work."""
        bundle, ranks = self._bundle(gpus), self._config.server.engine.tensor_parallel_size
        hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if any(all(host.get(name, 0) >= count for name, count in bundle.items()) for host in hosts):
            return
        needed = " and ".join(f"{count:g} {name}" for name, count in bundle.items())
        largest = ", ".join(f"{max(host.get(name, 0) for host in hosts):g} {name}" for name in bundle)
        raise ConfigError(
            f"a replica with tensor_parallel_size {ranks} needs {needed} on one host, but the largest host of the Ray "
            f"cluster has {largest}: lower tensor_parallel_size, or add a host"
        )

    def _check_shared(self, config: ClusterConfig) -> None:
        """Refuses settings that only work while all replicas are on one host."""
        if sum(node["Alive"] for node in ray.nodes()) == 1:
            return
        if not config.server.store:
            raise ConfigError(
                "the Ray cluster has several hosts, but store is not set, so adapters would stay on one host: give a "
                "store that all hosts can reach"
            )
        if not config.server.database.startswith("postgresql"):
            raise ConfigError(
                "the Ray cluster has several hosts, but database is not set: give a PostgreSQL URL "
                "(SLORA_DATABASE), to which every host ships the usage that it has recorded"
            )

    def wait(self, version: str) -> None:
        """Waits until all replicas have this version and serve. Prints each change. Raises DeployFailed."""
        deadline = time.monotonic() + _DEPLOY_S
        printed = ""
        while True:
            progress = self._cluster.progress()
            if progress is None:
                raise DeployFailed(f"the cluster {self._name} was deleted while it was being deployed")
            line = ", ".join(f"{count} {state.lower()}" for state, count in sorted(progress.states.items()))
            if line != printed:
                print(f"slora: replicas of version {version}: {line or 'none yet'}", flush=True)
                printed = line
            if progress.status == "RUNNING":
                return
            if progress.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise DeployFailed(f"the replicas do not start: {_shorten(progress.message)}")
            if time.monotonic() > deadline:
                raise DeployFailed(
                    f"not all replicas serve after {_DEPLOY_S:g} s: {line}. {_shorten(progress.message)}"
                )
            time.sleep(_POLL_S)


def _shorten(message: str) -> str:
    """Returns the reason from a message of Ray, which may contain a traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reasons = [line for line in lines if _REASON.match(line)]
    return (
        _REASON.sub("", reasons[-1])
        if reasons
        else " ".join(lines[-1:]) or "Ray gives no reason; see its log"
    )
