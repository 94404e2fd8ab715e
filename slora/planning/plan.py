"""Plans an engine on a device: whether model and adapters fit into its memory, and how much traffic it can serve.

The plan sizes the pool with the engine's own functions (`slora.pool.pool_sizing`) and the kernels' own page layout. So
an engine with the planned settings has the planned number of pages. Its throughput and latency are simulated
(`slora.planning.traffic`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import mul

from slora.byte_text import format_bytes
from slora.engine_config import EngineConfig
from slora.errors import ConfigError
from slora.kv_footprint import KVFootprint
from slora.models.model_spec import ModelSpec
from slora.planning.devices import Device
from slora.planning.model_size import measure_activations, measure_model
from slora.planning.roofline import Roofline
from slora.planning.traffic import (
    Capacity,
    Latencies,
    choose_num_backlog,
    choose_num_requests,
    measure_capacity,
    measure_latencies,
)
from slora.planning.workload import Adapters, Load, find_modules, share_trace
from slora.pool.pool_sizing import (
    MAX_SLOTS,
    choose_pool_bytes,
    count_pages,
    count_swap_pages,
    find_full_page_bytes,
    find_max_model_len,
)
from slora.simulation.machine import Machine
from slora.simulation.simulation import Policies, Setup
from slora.simulation.traces import Trace, merge
from slora_kernels.kv_format import KVFormat

__all__ = [
    "SAFE_UTILIZATION",
    "AdapterSize",
    "Memory",
    "Plan",
    "Progress",
    "Question",
    "make_plan",
    "plan_memory",
]

_GIB, _MIB = 1 << 30, 1 << 20
# Memory of the driver, the CUDA context and libraries.
_RESERVED_BYTES = 5 * _GIB // 4
# Above this utilization, an engine has no room for bursts.
SAFE_UTILIZATION = 0.85
# The host cache needs some room to place adapters of different sizes.
_HOST_CACHE_MARGIN = 1.1
# Number of requests from which the busiest engine's share of the load is estimated.
_RATE_SAMPLE = 2000
_MAX_ADAPTERS = 1_000_000
# Receives the name of the running simulation, and the fraction of it that is done.
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Question:
    """The input of a plan. device: a GPU, or one of `count` slices that share the load."""

    spec: ModelSpec
    config: EngineConfig
    device: Device
    adapters: Adapters
    load: Load


@dataclass(frozen=True, slots=True)
class AdapterSize:
    rank: int
    num_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one engine. With tensor parallelism, the memory of one of its ranks.

    reserved_bytes: memory of the driver and libraries. activation_bytes: activations of the largest step.
    pool_bytes: 0 if no memory is left for the pool.
    kv_tokens: number of tokens whose KV fills the whole pool.
    adapter_pages: pages of all adapters of this engine together.
    adapters_at_once: number of adapters that fit into the pool while no request runs.
    requests_at_once: number of requests of mean length that can run at once with their adapters.
    host_cache_bytes: size of a host cache that holds all adapters for all ranks.
    swap_bytes: host memory for preempted sequences.
    """

    device_bytes: int
    reserved_bytes: int
    weight_bytes: int
    activation_bytes: int
    pool_bytes: int
    num_pages: int
    full_page_bytes: int
    block_tokens: int
    kv_tokens: int
    max_model_len: int
    num_adapters: int
    adapter_sizes: tuple[AdapterSize, ...]
    adapter_pages: int
    adapters_at_once: int
    requests_at_once: int
    host_cache_bytes: int
    swap_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned engine, and what it serves.

    device: the name of the device. engines: number of engines that share the load. config: has the planned sizes.
    rate: requests per second that arrive at one engine.
    capacity, latencies: simulated values of one engine; None if they were not simulated.
    problem: why the load does not fit; None if it does.
    """

    device: str
    engines: int
    config: EngineConfig
    memory: Memory
    rate: float
    output_tokens: int
    problem: str | None = None
    capacity: Capacity | None = None
    latencies: Latencies | None = None

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def utilization(self) -> float | None:
        """The request rate divided by the capacity, or None without a simulated capacity."""
        if self.capacity is None or not self.capacity.requests_per_s:
            return None
        return self.rate / self.capacity.requests_per_s


def plan_memory(question: Question) -> Plan:
    """Makes a plan without simulations. Raises ConfigError for values that no device could serve."""
    return _start_plan(question, _Planner(question))


def make_plan(
    question: Question, progress: Progress, *, max_tokens: int, with_latencies: bool = True
) -> Plan:
    """Makes a plan with simulations, if the load fits into the memory.

    max_tokens: limit on the answer tokens of each simulation. Raises ConfigError for values that no device could serve.
    """
    device, planner = question.device, _Planner(question)
    plan = _start_plan(question, planner)
    if plan.problem is not None:
        return plan
    capacity = planner.measure_capacity(max_tokens, lambda done: progress(f"{device.name}: capacity", done))
    plan = replace(plan, capacity=capacity, rate=planner.measure_rate())
    usage = plan.utilization
    if usage is None or usage >= 1:
        where = "" if device.count == 1 else f" at the busiest of {device.count} engines"
        told = f"{plan.rate:.3g} requests/s arrive{where}, but it serves {capacity.requests_per_s:.3g}"
        return replace(plan, problem=f"{told}, so the queue would grow without end")
    if with_latencies:
        latencies = planner.measure_latencies(
            max_tokens, lambda done: progress(f"{device.name}: latency", done)
        )
        plan = replace(plan, latencies=latencies)
    return plan


def _start_plan(question: Question, planner: "_Planner") -> Plan:
    device, load = question.device, question.load
    return Plan(
        device.name,
        device.count,
        planner.config,
        planner.memory,
        load.rate / device.count,
        load.output_tokens,
        planner.find_problem(),
    )


class _Planner:
    """Computes the parts of one plan. config: the config of the question, completed with the planned sizes."""

    def __init__(self, question: Question) -> None:
        _check(question)
        self._question = question
        self._engines = question.device.count
        spec, config = question.spec, question.config
        self._num_ranks = config.tensor_parallel_size
        self._shape = spec.partition(spec.resolve_dtype(config.dtype), self._num_ranks).rank_shape
        self._modules = find_modules(self._shape, question.adapters.targets)
        self._size = measure_model(spec, config)
        self._page_bytes = find_full_page_bytes(self._shape, config)
        self.config, self._num_pages, self._max_model_len = self._size_pool()
        self.memory = self._measure_memory()

    def find_problem(self) -> str | None:
        """Returns why some or all requests do not fit into the memory, or None if every request fits."""
        memory, load = self.memory, self._question.load
        taken = memory.reserved_bytes + memory.weight_bytes + memory.activation_bytes
        if not self._num_pages:
            left = memory.device_bytes - taken
            return (
                f"the weights take {format_bytes(memory.weight_bytes)}, driver and activations "
                f"{format_bytes(taken - memory.weight_bytes)}, so {format_bytes(max(0, left))} of "
                f"{format_bytes(memory.device_bytes)} are left for the page pool"
            )
        longest = max(
            (one.prompt_tokens + one.output_tokens for one in load.trace),
            default=load.prompt_tokens + load.output_tokens,
        )
        if longest > memory.max_model_len:
            return (
                f"a request has {longest} tokens of prompt and answer, but the longest sequence has "
                f"{memory.max_model_len}"
            )
        largest = max((one.pages for one in memory.adapter_sizes), default=0)
        needed = self._footprint.pages(longest) + largest
        if needed > memory.num_pages:
            return (
                f"a request of {longest} tokens and its adapter take {needed} pages, but the pool has "
                f"{memory.num_pages}"
            )
        return None

    def measure_rate(self) -> float:
        """Estimates the requests per second that arrive at the busiest engine."""
        if self._engines == 1:
            return self._question.load.rate
        whole = self._make_trace(_RATE_SAMPLE)
        return self._question.load.rate * len(share_trace(whole, self._engines)) / len(whole)

    def measure_capacity(self, max_tokens: int, progress: Callable[[float], None]) -> Capacity:
        concurrency = max(1, self.memory.requests_at_once)
        output_tokens = self._question.load.output_tokens
        num_ended = choose_num_backlog(concurrency, output_tokens, max_tokens)
        wanted = num_ended + 2 * concurrency
        trace = share_trace(self._make_trace(wanted * self._engines), self._engines)
        trace = merge(*[trace] * -(-wanted // len(trace)))  # A trace from a file may be too short.
        return measure_capacity(self._setup(), trace, num_ended, progress)

    def measure_latencies(self, max_tokens: int, progress: Callable[[float], None]) -> Latencies:
        load = self._question.load
        rate = load.rate / self._engines
        num_requests = choose_num_requests(
            rate, load.output_tokens, self._roofline().costs.step_s, max_tokens
        )
        trace = share_trace(self._make_trace(num_requests * self._engines), self._engines)
        return measure_latencies(self._setup(), trace, progress)

    @property
    def _footprint(self) -> KVFootprint:
        return KVFootprint(self._question.config.block_tokens, self._question.spec.window)

    def _make_trace(self, num_requests: int) -> Trace:
        """Makes the requests of all engines. Each synthetic request fits into the pool together with its adapter."""
        question, memory = self._question, self.memory
        largest = max((one.pages for one in memory.adapter_sizes), default=0)
        longest = min(self._max_model_len, (memory.num_pages - largest) * memory.block_tokens)
        return question.load.make_trace(question.adapters, num_requests, longest)

    def _size_pool(self) -> tuple[EngineConfig, int, int]:
        """Returns the config with the pool's size, the number of pages, and the maximum length of a sequence.

        Both numbers are 0 if too little memory is left.
        """
        question = self._question
        config, spec, device = question.config, question.spec, question.device
        free = device.memory_bytes - _RESERVED_BYTES - self._size.weight_bytes - self._activations
        if config.pool_bytes is None:
            # Rounded down to whole MiB, so that a flag can give the exact size.
            pool_bytes = choose_pool_bytes(config, max(0, free), on_gpu=True) // _MIB * _MIB
        elif config.pool_bytes > free:
            raise ConfigError(
                f"pool_bytes is {config.pool_bytes}, but weights and activations leave {max(0, free)} bytes of "
                f"{device.name}; give at most that, or auto"
            )
        else:
            pool_bytes = config.pool_bytes
        if pool_bytes < 2 * self._page_bytes:
            return config, 0, 0
        config = replace(config, pool_bytes=pool_bytes)
        num_pages = count_pages(pool_bytes, self._page_bytes)
        longest = find_max_model_len(config, num_pages, self._page_bytes, spec.max_positions, spec.window)
        return config, num_pages, longest

    @property
    def _activations(self) -> int:
        config, spec = self._question.config, self._question.spec
        # One rank samples, from the logits of the whole vocabulary.
        shape = replace(self._shape, vocab_size=spec.vocab_size)
        return measure_activations(
            shape,
            spec.decoder.experts if spec.decoder is not None else None,
            config.token_budget("cuda"),
            config.max_num_seqs,
            config.tensor_parallel_size,
        )

    def _measure_memory(self) -> Memory:
        question, machine = self._question, self._machine()
        adapters, load = question.adapters, question.load
        count = -(-adapters.count // self._engines)
        layouts = [machine.adapter_layout(rank).num_bytes for rank in adapters.ranks] if count else []
        pages = [machine.pages_of(num_bytes) for num_bytes in layouts]
        counts = [len(range(first, count, len(layouts))) for first in range(len(layouts))]
        request_pages = self._footprint.pages(load.prompt_tokens + load.output_tokens)
        mean_pages = sum(map(mul, counts, pages)) / count if count else 0.0
        at_once = int(self._num_pages / (request_pages + mean_pages))
        # If all adapters fit into the pool, requests share them.
        beside_all = (self._num_pages - sum(map(mul, counts, pages))) // request_pages
        sizes = {
            rank: AdapterSize(rank, num_bytes, num_pages)
            for rank, num_bytes, num_pages in zip(adapters.ranks, layouts, pages, strict=False)
        }
        swap_pages = count_swap_pages(self.config, self._num_pages, self._page_bytes, 1 << 62)
        host_bytes = int(_HOST_CACHE_MARGIN * self._num_ranks * sum(map(mul, counts, layouts)))
        return Memory(
            device_bytes=question.device.memory_bytes,
            reserved_bytes=_RESERVED_BYTES,
            weight_bytes=self._size.weight_bytes,
            activation_bytes=self._activations,
            pool_bytes=self.config.pool_bytes or 0 if self._num_pages else 0,
            num_pages=self._num_pages,
            full_page_bytes=self._page_bytes,
            block_tokens=self.config.block_tokens,
            kv_tokens=self._num_pages * self.config.block_tokens,
            max_model_len=self._max_model_len,
            num_adapters=count,
            adapter_sizes=tuple(sizes.values()),
            adapter_pages=sum(map(mul, counts, pages)),
            adapters_at_once=min(MAX_SLOTS, int(self._num_pages / mean_pages)) if mean_pages else 0,
            requests_at_once=min(self.config.max_num_seqs, max(at_once, beside_all)),
            host_cache_bytes=-(-host_bytes // _MIB) * _MIB,
            swap_bytes=swap_pages * self._page_bytes,
        )

    def _roofline(self) -> Roofline:
        question = self._question
        return Roofline.of(
            question.device,
            self._size,
            self._shape,
            question.config.kv_format,
            self._page_bytes,
            question.config.block_tokens,
            adapted=self._modules,
            prompt_tokens=question.load.prompt_tokens,
            num_ranks=self._num_ranks,
        )

    def _machine(self) -> Machine:
        roofline, config = self._roofline(), self.config
        return Machine(
            self._question.device.name,
            self._shape,
            self._modules,
            self._num_pages * config.block_tokens,
            roofline.costs,
            block_tokens=config.block_tokens,
            kv_format=config.kv_format,
            window=self._question.spec.window,
            clock=roofline,
        )

    def _setup(self) -> Setup:
        config = self.config
        return Setup(
            self._machine(),
            self._question.adapters.ranks,
            num_slots=MAX_SLOTS,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.token_budget("cuda"),
            load_pages=config.load_pages(self._page_bytes),
            swap_share=self.memory.swap_bytes / self.memory.pool_bytes,
            policies=Policies(config.scheduling, config.eviction, config.preemption, config.prefix_cache),
        )


def _check(question: Question) -> None:
    """Raises ConfigError for values that no engine accepts."""
    adapters, load, config, spec = question.adapters, question.load, question.config, question.spec
    most = spec.sizes.hidden_size
    for rank in adapters.ranks:
        if not 1 <= rank <= most:
            raise ConfigError(f"rank is {rank}; it must be from 1 to the model's hidden size, {most}")
    if not 0 <= adapters.count <= _MAX_ADAPTERS:
        raise ConfigError(f"adapters is {adapters.count}; it must be from 0 to {_MAX_ADAPTERS}")
    if not 0 <= adapters.alpha < 100:
        raise ConfigError(f"the popularity's alpha is {adapters.alpha}; it must be from 0 (uniform) to 100")
    if not 0 < load.rate < 1e6:
        raise ConfigError(
            f"rate is {load.rate:g}; it must be above 0 and below a million requests per second"
        )
    for name, value in (("prompt_tokens", load.prompt_tokens), ("output_tokens", load.output_tokens)):
        if not 1 <= value <= spec.max_positions:
            raise ConfigError(
                f"{name} is {value}; it must be from 1 to the model's {spec.max_positions} positions"
            )
    if config.max_model_len is not None and config.max_model_len > spec.max_positions:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but this model's positions end at {spec.max_positions} "
            "(max_position_embeddings); give at most that"
        )
    needs_fp8 = config.kv_format is KVFormat.FP8 or config.quantization == "fp8"
    if needs_fp8 and not question.device.has_fp8:
        raise ConfigError(
            f"{question.device.name} has no 8-bit floats (compute capability 8.9); set kv_cache_dtype to auto, and "
            "quantization to auto or int8"
        )
