"""The engine takes requests and returns tokens, one step at a time: schedule, launch, wait, postprocess.

On a GPU, steps overlap: the next step is scheduled and launched before the engine waits for the results of a step.

Single-threaded: all methods must be called from the thread that built the engine. This module uses neither sockets nor
API keys.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from slora.core.cost_model import CostModel, StepTimes
from slora.core.engine_config import EngineConfig, SchedulerConfig
from slora.core.engine_state import (
    MAX_SPANS,
    AdapterPlace,
    EngineInfo,
    EngineReport,
    EngineStats,
    Pin,
    ServiceSpan,
    TenantPurge,
)
from slora.core.errors import DeviceFailed, RequestFailed, RequestRefused, StepFailed
from slora.core.request import DEFAULT_SHARE, EndedRequest, EngineRequest, StepOutput, TenantShare
from slora.core.request_check import check_request, count_added_tokens, find_stop_token_ids
from slora.engine.observer import Observer
from slora.grammar.grammar_compiler import GrammarCompiler
from slora.memory.host_memory import prefault
from slora.memory.kv_cache import BlockTable
from slora.models.model import LoadModel, load_model
from slora.models.model_spec import ModelSpec
from slora.runner.fault_isolation import FaultIsolation
from slora.runner.learned_costs import LearnedCosts
from slora.runner.process_group import NO_GROUP, RankGroup
from slora.runner.runner import PageTransferFailed, Runner, RunningStep
from slora.scheduler.scheduler import Scheduler
from slora.scheduler.sequence import Sequence
from slora.scheduler.step_plan import SampledToken, StepPlan
from slora.text.tokenizer import Tokenizer
from slora_adapters.loader.source import AdapterSource
from slora_adapters.version import AdapterVersion

_log = logging.getLogger(__name__)
_BREAKS_ALONE = (
    "the engine cannot compute this request, even in a step of its own; the server's log has the reason"
)
_GIVEN_UP = "the step with this request failed because of other requests; send the request again"
_TRANSFER_FAILED = (
    "the engine repeatedly failed to copy the pages that this request needs into the pool; send the "
    "request again"
)

_PURGED = "the operator has purged the tenant of this request"


class Engine:
    """The scheduler and the runner of one model.

    The constructor raises ConfigError if the model or a setting can't be served.

    costs: the cost model. With None, the engine measures it at start and learns it from each step. A fixed cost model
    makes runs reproducible: the same requests give the same batches, and therefore the same results to the last bit.
    Structured output is the exception: the CPU time of masks decides how many of them a step defers.
    load: the function that loads the model; by default it reads the checkpoint.
    notify: called, from another thread, when a grammar has been compiled, so that `step` can start its requests. None:
    `add` compiles grammars itself.
    group: the other ranks, if `tensor_parallel_size` is above 1. The engine closes the group.
    overlap: whether steps overlap. None: on a single GPU without prompt lookup, which needs the results of all earlier
        steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelSpec,
        source: AdapterSource,
        costs: CostModel | None = None,
        load: LoadModel = load_model,
        notify: Callable[[], None] | None = None,
        group: RankGroup = NO_GROUP,
        *,
        overlap: bool | None = None,
    ) -> None:
        self._config = config
        self._group = group
        try:
            self.runner = Runner(config, model, load, group)
        except BaseException:
            group.close()
            raise
        self._isolation = FaultIsolation(self.runner)
        self._learned: LearnedCosts | None = None
        if costs is None:
            self._learned = self.runner.learn_costs()
            costs = self._learned.current
        self._costs = costs
        # Without pool_bytes the pool is a share of free memory. Prefaulting the whole pool at start could take memory
        # that other programs need.
        if config.pool_bytes is not None:
            prefault(self.runner.memory.pages)
        if (limit := model.describe_limit()) is not None:
            _log.warning("%s", limit)
        num_pages = len(self.runner.memory.pages)
        budget = config.token_budget(self.runner.device.type)
        prefix_cache = config.prefix_cache
        if not model.continues_states and prefix_cache != "off":
            _log.warning(
                "the prefix cache is off: transformers' class computes prompts of this model (%s) only from their "
                "beginning",
                model.family,
            )
            prefix_cache = "off"
        scheduler = SchedulerConfig(
            num_pages=num_pages,
            num_slots=self.runner.num_slots,
            full_page_bytes=self.runner.full_page_bytes,
            footprint=self.runner.footprint,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=budget,
            rope_switch=model.rope_switch,
            load_pages=config.load_pages(self.runner.full_page_bytes),
            swap_pages=self.runner.num_swap_pages,
            prompt_lookup_tokens=config.prompt_lookup_tokens,
            loads_beside=self.runner.loads_beside,
            metrics_tenants=config.metrics_tenants,
            prefix_cache=prefix_cache,
            preemption=config.preemption,
            scheduling=config.scheduling,
        )
        self._source = source
        self._grammars = GrammarCompiler(
            lambda: Tokenizer.from_directory(config.model).spell_vocabulary(model.vocab_size),
            model.eos_token_ids,
            notify,
        )
        self.scheduler = Scheduler(scheduler, source, self._costs, self._grammars)
        if overlap is None:
            on_one_gpu = self.runner.device.type == "cuda" and group.collectives.size == 1
            overlap = on_one_gpu and not config.prompt_lookup_tokens
        # Number of steps that the device may still compute when `step` returns.
        self._num_overlapped = int(overlap)
        self._launched: deque[_LaunchedStep] = deque()
        self._waited_until_s = 0.0
        self._observer = Observer(self.scheduler, source, self._costs, config.metrics_tenants)
        self._tenants = self.scheduler.paging.tenants
        self.info = EngineInfo(
            model_name=config.served_name,
            max_model_len=self.runner.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            dtype=self.runner.dtype_name,
            kv_cache_dtype=config.kv_cache_dtype,
            device=str(self.runner.device),
            kernels=self.runner.kernels.name,
            num_pages=num_pages,
            block_tokens=config.block_tokens,
            full_page_bytes=self.runner.full_page_bytes,
            max_lora_rank=config.max_lora_rank,
            max_composed_adapters=config.max_composed_adapters,
            max_num_seqs=config.max_num_seqs,
            scheduling=config.scheduling,
            shape=model.shape(self.runner.dtype_name),
            can_embed=self.runner.can_embed,
            num_ranks=config.tensor_parallel_size,
            prefix_cache=prefix_cache,
            weight_form=model.find_weight_form(config.quantization),
        )

    @property
    def num_launched(self) -> int:
        """The steps whose results have not been read."""
        return len(self._launched)

    @property
    def has_work(self) -> bool:
        return bool(self._launched) or self.scheduler.has_work or self.next_due_in_s == 0

    @property
    def next_due_in_s(self) -> float | None:
        """Seconds until a deadline can no longer be met or a pinned adapter's load is retried. 0 if either is due."""
        next_s = self.scheduler.next_due_s
        return None if next_s is None else max(0.0, next_s - time.monotonic())

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_running + self.scheduler.num_waiting

    def add(self, request: EngineRequest) -> None:
        """Validates and queues a request. Raises RequestRefused, naming the field, if it can never be served."""
        if self.scheduler.find(request.request_id):
            raise RequestRefused(f"request id {request.request_id!r} is already running", "request_id")
        check_request(request, self.info)
        sampling = request.sampling
        max_tokens = sampling.max_tokens or self.info.max_model_len - len(request.prompt_token_ids)
        stop_ids = find_stop_token_ids(sampling, self.info)
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        self._tenants.set_share(request.tenant, request.share)
        tenant = self._tenants.find(request.tenant, is_background=request.is_background)
        blocks = BlockTable(self._config.block_tokens, self.runner.footprint.state_pages)
        sequence = Sequence(request, tenant, max_tokens, stop_ids, seed, blocks)
        sequence.num_added = count_added_tokens(request, self.info)
        if request.emitted is None:
            self.scheduler.add(sequence, time.monotonic())
            self._observer.num_prompt_tokens += len(request.prompt_token_ids)
            return
        try:
            for choice in sequence.resume(request.emitted):
                self.scheduler.add(choice, time.monotonic())
        except RequestRefused:
            self.abort(request.request_id)
            raise

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one choice of it, and frees its pages. A no-op for an unknown or finished request."""
        self.scheduler.advance_clock(time.monotonic())
        self.scheduler.abort(request_id, index)

    def remove_adapter(self, version: AdapterVersion) -> None:
        """Evicts a deleted adapter: now, or when the last request that uses it ends."""
        self._wait_for_copies()
        self.scheduler.remove_adapter(version)

    def purge_tenant(self, name: str) -> tuple[TenantPurge, list[StepOutput]]:
        """Ends a tenant's requests, and drops its adapters, its prefixes and its share. Idempotent.

        Overwrites the tenant's data in the pool and on the host with zeros. Pages that now belong to other tenants are
        not changed. A public prefix cache of the base model is not changed either, because all tenants share it.

        Returns the number of dropped items, and the errors of the ended requests.
        """
        self._wait_for_copies()
        self.scheduler.advance_clock(time.monotonic())
        accounts = self._tenants.find_both(name)
        num_adapters = sum(resident.version.tenant == name for resident in self.scheduler.paging.residency)
        ended = self.scheduler.purge_tenant(name, RequestFailed(_PURGED))
        self._tenants.set_share(name, DEFAULT_SHARE)
        pool = self.scheduler.paging.pool
        pages = [page for account in accounts for page in pool.pop_residue(account)]
        self.runner.zero(pages, self.scheduler.swapping.free_pages)
        return TenantPurge(len(ended), num_adapters, len(pages)), ended

    def set_pins(self, pins: list[Pin]) -> None:
        """Replaces the set of pinned adapters. They are loaded before their first request and are not evicted."""
        for pin in pins:
            self._tenants.set_share(pin.version.tenant, pin.share)
        self.scheduler.set_pins(pin.version for pin in pins)

    def prewarm(self, version: AdapterVersion, share: TenantShare) -> AdapterPlace:
        """Loads an adapter before its first request, if the pool has room. Returns where the adapter is now.

        share: the share of the adapter's tenant.
        """
        self._tenants.set_share(version.tenant, share)
        return self.scheduler.prewarm(version)

    def step(self, tell_begun: Callable[[list[str]], None] = lambda ids: None) -> list[StepOutput]:
        """Computes one step. A request that fails ends alone; the other requests of the step are computed.

        With overlapped steps, a call launches a step and returns the outputs of the step before.

        tell_begun: called before the step is computed, with the ids of the requests that join the batch.

        Raises DeviceFailed when the device is lost. The engine must not be used after that.
        """
        plan = self.scheduler.schedule(time.monotonic())
        if plan.rows_to_write and (begun := self._find_begun(plan)):
            tell_begun(begun)
        outputs, started_s = list(plan.ended), time.perf_counter()
        try:
            running = self.runner.launch(plan)
        except Exception as error:
            return outputs + self._finish_steps(0) + self._recover(plan, error, started_s)
        self.scheduler.advance(plan)
        self._launched.append(_LaunchedStep(plan, running, started_s))
        # Without a chunk there is nothing that the device could compute while the host waits.
        return outputs + self._finish_steps(self._num_overlapped if plan.chunks else 0)

    def _finish_steps(self, num_left: int) -> list[StepOutput]:
        """Waits for the oldest launched steps and applies their results, until `num_left` steps are left."""
        outputs = []
        while len(self._launched) > num_left:
            step = self._launched[0]
            try:
                sampled = step.running.wait()
            except Exception as error:
                self.runner.probe()
                raise DeviceFailed(
                    f"the results of a step cannot be read: {type(error).__name__}: {error}"
                ) from error
            self._launched.popleft()
            outputs += self._finish_step(step, sampled)
        return outputs

    def _recover(self, plan: StepPlan, error: Exception, started_s: float) -> list[StepOutput]:
        """Isolates the requests that made the launch fail, and computes the others. All earlier steps are finished."""
        plan.drop_finished()
        try:
            result = self._isolation.recover(plan, error)
        except PageTransferFailed:
            self.scheduler.advance_clock(time.monotonic())
            return self.scheduler.undo_step(plan, StepFailed(_TRANSFER_FAILED))
        ended = self.scheduler.fail_chunks(plan, result.culprits, RequestFailed(_BREAKS_ALONE))
        ended += self.scheduler.fail_chunks(plan, result.given_up, StepFailed(_GIVEN_UP))
        sampled = result.sampled
        if self.runner.footprint.state_pages:
            # Each run has advanced the recurrent states again, so no result of them counts.
            has_culprits = bool(result.culprits or result.given_up)
            ended += self.scheduler.restart_chunks(plan, StepFailed(_GIVEN_UP), has_culprits=has_culprits)
            sampled = []
        self.scheduler.advance(plan)
        step = _LaunchedStep(plan, RunningStep(), started_s)
        return ended + self._finish_step(step, sampled, is_timed=False)

    def _finish_step(
        self, step: "_LaunchedStep", sampled: list[SampledToken], *, is_timed: bool = True
    ) -> list[StepOutput]:
        """Applies the results of a step. is_timed: whether the cost model learns from its time."""
        plan, now, now_s = step.plan, time.monotonic(), time.perf_counter()
        # While steps overlap, the device begins a step when it has finished the step before.
        seconds = now_s - max(step.started_s, self._waited_until_s)
        self._waited_until_s = now_s
        self.scheduler.advance_clock(now)
        # The host launches or records the next step while it should read the results of this one.
        was_delayed = any(launched.running.was_delayed for launched in (step, *self._launched))
        if is_timed and not was_delayed:
            self._learn(step, seconds)
        self._observer.count_step(plan, sampled, seconds, now)
        outputs = self.scheduler.postprocess(plan, sampled)
        self._observer.count_gaps(self.scheduler.token_gaps)
        return outputs

    def _wait_for_copies(self) -> None:
        """Waits until the device reads no host copy of an adapter. Their results stay to be applied."""
        if self._launched:
            self.runner.memory.wait()

    def _find_begun(self, plan: StepPlan) -> list[str]:
        """Returns the ids of the requests that the plan computes, or loads adapters for, for the first time."""
        now = self.scheduler.paging.pool.now
        begun = (
            sequence.request.request_id
            for sequence in plan.rows_to_write
            if sequence.times.admitted_at == now
        )
        return list(dict.fromkeys(begun))

    def pop_usage(self) -> list[EndedRequest]:
        """The requests that ended since the last call. Refused requests are not among them."""
        return self.scheduler.pop_usage()

    def check_invariants(self) -> None:
        """Checks that no page is lost. Raises AssertionError, naming the inconsistent numbers."""
        self.scheduler.check_invariants()

    def close(self) -> None:
        """Ends the thread that compiles grammars, and the other ranks. The engine must not be used afterwards."""
        self._grammars.close()
        self._group.close()

    def report(self, num_taken: int) -> EngineReport:
        """Returns the state for routers. What was charged is reported once.

        num_taken: see `EngineReport`.
        """
        return EngineReport(
            num_taken,
            self.scheduler.estimate_backlog(),
            self.scheduler.wanted_adapters,
            self._source.cached_versions,
            tuple(self._tenants.pop_spans(MAX_SPANS)),
        )

    def add_service_elsewhere(self, engine: str, spans: Iterable[ServiceSpan]) -> None:
        """Counts what another engine has charged to tenants, so that all engines together are fair."""
        self.scheduler.add_service_elsewhere(engine, spans)

    def stats(self, watched: Collection[str] | None = None) -> EngineStats:
        """Returns a snapshot. watched: for a console, the tenants that must be listed, even if they are small."""
        return self._observer.observe(watched, time.monotonic())

    def _learn(self, step: "_LaunchedStep", seconds: float) -> None:
        """Updates the cost model from a step's time.

        The host does not wait for copies to a GPU, so the costs of copies keep the values measured at start.
        """
        plan, running = step.plan, step.running
        if self.runner.device.type != "cpu" and (plan.loads or plan.swaps_out or plan.swaps_in):
            return
        if self._learned is not None:
            computing_s = seconds - running.swap_s - running.load_s - running.finish_s
            times = StepTimes(computing_s, running.swap_s, running.load_s)
            self._learned.count(plan.measure_work(self.runner.full_page_bytes), times, time.monotonic())


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A step whose results are not applied. started_s: when its launch began, on the clock of `perf_counter`."""

    plan: StepPlan
    running: RunningStep
    started_s: float
