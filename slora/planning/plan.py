"""Plans an engine on a device: whether model and adapters fit into its memory, and how much traffic it can serve.

The plan sizes the pool with the engine's own functions (`slora.memory.pool_sizing`) and the kernels' own page layout.
So an engine with the planned settings has the planned number of pages. Its throughput follows from the times of steps
(`slora.planning.roofline`) in a steady state, in which answers begin and end at the same rate.
"""

from dataclasses import dataclass, replace
from operator import mul

import numpy as np
import numpy.typing as npt

from slora.core.byte_text import format_bytes
from slora.core.cost_model import StepWork
from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.memory.pool_sizing import (
    MAX_SLOTS,
    choose_pool_bytes,
    count_pages,
    count_swap_pages,
    find_full_page_bytes,
    find_max_model_len,
)
from slora.models.model_spec import ModelSpec
from slora.planning.devices import Device, cut_device
from slora.planning.model_size import measure_activations, measure_model
from slora.planning.roofline import Roofline
from slora_kernels.kv_format import KVFormat
from slora_kernels.layout import ModelShape, lay_out_adapter, name_module

_GIB, _MIB = 1 << 30, 1 << 20
# Memory of the driver, the CUDA context and libraries.
_RESERVED_BYTES = 5 * _GIB // 4
# Above this utilization, an engine has no room for bursts.
SAFE_UTILIZATION = 0.85
# The host cache needs some room to place adapters of different sizes.
_HOST_CACHE_MARGIN = 1.1
_MAX_ADAPTERS = 1_000_000
# Adapters that are assigned to engines one by one. The others are divided evenly.
_ASSIGNED_ADAPTERS = 10_000
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
_MPS_SHARES = ("50%", "25%")
# Rounds in which the number of running sequences at a load converges.
_NUM_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class PlannedAdapters:
    """The adapters of a plan."""

    count: int
    ranks: tuple[int, ...] = (16,)  # adapter i has rank `ranks[i % len(ranks)]`
    targets: tuple[str, ...] = ("all-linear",)  # as in PEFT's target_modules, or `attention` or `all-linear`
    alpha: float = 1.0  # the popularity of adapter k (from 1) is proportional to k ** -alpha


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The requests of a plan."""

    rate: float  # requests per second
    prompt_tokens: int  # mean length
    output_tokens: int  # mean length


@dataclass(frozen=True, slots=True)
class Question:
    """The input of a plan."""

    spec: ModelSpec
    config: EngineConfig
    device: Device  # a GPU, or one of `count` slices that share the load
    adapters: PlannedAdapters
    load: PlannedLoad


@dataclass(frozen=True, slots=True)
class AdapterSize:
    rank: int
    num_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The memory of one engine. With tensor parallelism, the memory of one of its ranks."""

    device_bytes: int
    reserved_bytes: int  # of the driver and libraries
    weight_bytes: int
    activation_bytes: int  # of the largest step
    pool_bytes: int  # 0 if no memory is left for the pool
    num_pages: int
    full_page_bytes: int
    block_tokens: int
    kv_tokens: int  # tokens whose KV fills the whole pool
    state_pages: int  # of the recurrent state of one sequence
    max_model_len: int
    num_adapters: int
    adapter_sizes: tuple[AdapterSize, ...]
    adapter_pages: int  # of all adapters of this engine together
    adapters_at_once: int  # adapters that fit into the pool while no request runs
    requests_at_once: int  # requests of mean length that can run at once with their adapters
    host_cache_bytes: int  # a host cache that holds all adapters for all ranks
    swap_bytes: int  # host memory for preempted sequences


@dataclass(frozen=True, slots=True)
class Service:
    """What one engine serves, estimated."""

    requests_per_s: float  # while requests always wait
    output_tokens_per_s: float  # while requests always wait
    most_running: float  # sequences at once while requests always wait
    running: float  # sequences at once under the load
    ttft_s: float  # mean time until the first token under the load, without waiting for a free sequence
    itl_s: float  # mean time between tokens under the load
    hit_share: float  # share of the load's requests whose adapter is in the pool


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned engine, and what it serves."""

    device: str
    engines: int  # that share the load
    config: EngineConfig  # with the planned sizes
    memory: PlannedMemory
    rate: float  # requests per second that arrive at the busiest engine
    problem: str | None = None  # why the load does not fit
    service: Service | None = None  # None if the memory does not suffice

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def utilization(self) -> float | None:
        """The request rate divided by the capacity; None if the memory does not suffice."""
        return None if self.service is None else self.rate / self.service.requests_per_s


def make_plan(question: Question) -> Plan:
    """Makes a plan. Raises ConfigError for values that no device could serve."""
    _check(question)
    planner, device = _Planner(question), question.device
    problem = planner.find_problem()
    plan = Plan(device.name, device.count, planner.config, planner.memory, planner.rate, problem)
    if problem is not None:
        return plan
    service = planner.estimate_service()
    if plan.rate >= service.requests_per_s:
        where = "" if device.count == 1 else f" at the busiest of {device.count} engines"
        arriving = f"{plan.rate:.3g} requests/s arrive{where}, but it serves {service.requests_per_s:.3g}"
        plan = replace(plan, problem=f"{arriving}, so the queue would grow without end")
    return replace(plan, service=service)


def compare_slices(question: Question) -> dict[str, Plan | str]:
    """Returns plans for the whole device, for each MIG profile and for some MPS shares, by name.

    If a slice can't be planned, its entry is the reason as a string. Each slice runs its own engine. The adapters are
    divided among the engines, and each request goes to the engine that has its adapter.
    """
    whole = question.device
    # The last profile is the whole GPU, which is already in the list.
    profiles = list(whole.profiles)[:-1]
    plans: dict[str, Plan | str] = {}
    for device in [whole, *(cut_device(whole, name) for name in (*profiles, *_MPS_SHARES))]:
        try:
            plans[device.name] = make_plan(replace(question, device=device))
        except ConfigError as error:
            plans[device.name] = str(error)
    return plans


class _Planner:
    """Computes the parts of one plan."""

    def __init__(self, question: Question) -> None:
        spec, config, adapters, load = question.spec, question.config, question.adapters, question.load
        self._question = question
        self._num_ranks = config.tensor_parallel_size
        self._shape = spec.partition(spec.resolve_dtype(config.dtype), self._num_ranks).rank_shape
        self._modules = _find_modules(self._shape, adapters.targets)
        self._size = measure_model(spec, config)
        self._page_bytes = find_full_page_bytes(self._shape, config)
        self._footprint = spec.footprint(
            config.block_tokens, spec.resolve_dtype(config.dtype), self._page_bytes
        )
        self._request_pages = self._footprint.pages(load.prompt_tokens + load.output_tokens)
        self._roofline = Roofline.of(
            question.device,
            self._size,
            self._shape,
            config,
            adapted=self._modules,
            prompt_tokens=load.prompt_tokens,
        )
        self.config, self._num_pages, self._max_model_len = self._size_pool()
        self._num_adapters = -(-adapters.count // question.device.count)  # of one engine
        self._popularity = _rank_popularity(self._num_adapters, adapters.alpha)
        self._mean_adapter_bytes = self._mean_adapter_pages = 0.0
        self.rate = load.rate * self._busiest_share()
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
        length = load.prompt_tokens + load.output_tokens
        if length > memory.max_model_len:
            return (
                f"a request has {length} tokens of prompt and answer, but the longest sequence has "
                f"{memory.max_model_len}"
            )
        needed = self._request_pages + max((size.pages for size in memory.adapter_sizes), default=0)
        if needed > memory.num_pages:
            return (
                f"a request of {length} tokens and its adapter take {needed} pages, but the pool has "
                f"{memory.num_pages}"
            )
        return None

    def estimate_service(self) -> Service:
        load, budget = self._question.load, self.config.token_budget("cuda")
        # In a steady state, a step has the tokens of `rows / output_tokens` prompts beside its rows.
        most = min(
            max(1, self.memory.requests_at_once), budget / (1 + load.prompt_tokens / load.output_tokens)
        )
        requests_per_s = most / (load.output_tokens * self._step_seconds(most))
        rows = 1.0
        for _ in range(_NUM_ROUNDS):
            rows = min(most, self.rate * load.output_tokens * self._step_seconds(rows))
        step_s, hit_share = self._step_seconds(rows), self._hit_share(rows)
        num_chunks = -(-load.prompt_tokens // max(1, budget - round(rows)))
        prompt_s = num_chunks * self._seconds_with_prompt(rows, load.prompt_tokens / num_chunks)
        load_s = (1 - hit_share) * self._mean_adapter_bytes * self._roofline.load_byte_s
        return Service(
            requests_per_s=requests_per_s,
            output_tokens_per_s=requests_per_s * load.output_tokens,
            most_running=most,
            running=rows,
            ttft_s=step_s / 2 + load_s + prompt_s,
            itl_s=step_s,
            hit_share=hit_share,
        )

    def _step_seconds(self, rows: float) -> float:
        """Estimates the mean seconds of a step in a steady state. rows: mean number of running sequences."""
        prompts = rows / self._question.load.output_tokens  # that begin in a step
        share = min(1.0, prompts)  # of the steps with prompts
        with_prompt = self._seconds_with_prompt(rows, prompts / share * self._question.load.prompt_tokens)
        return share * with_prompt + (1 - share) * self._seconds_with_prompt(rows, 0)

    def _seconds_with_prompt(self, rows: float, prompt_tokens: float) -> float:
        """Estimates the seconds of a step that computes tokens of prompts beside its rows."""
        load = self._question.load
        num_adapters = float((1 - (1 - self._popularity) ** max(1.0, rows)).sum())
        missing = (1 - self._hit_share(rows)) * prompt_tokens / load.prompt_tokens
        work = StepWork(
            prefill_tokens=round(prompt_tokens),
            decode_rows=max(1, round(rows)),
            context_tokens=round(rows * (load.prompt_tokens + load.output_tokens / 2)),
            swapped_pages=0,
            loaded_bytes=round(missing * self._mean_adapter_bytes),
        )
        return self._roofline.step_seconds(work, round(num_adapters * self._mean_adapter_bytes))

    def _hit_share(self, rows: float) -> float:
        """Estimates the share of requests whose adapter is in the pool beside the KV of the rows."""
        if not self._mean_adapter_pages:
            return 1.0
        pages = max(0.0, self._num_pages - rows * self._request_pages)
        num_resident = min(MAX_SLOTS, int(pages / self._mean_adapter_pages))
        return min(1.0, float(self._popularity[:num_resident].sum()))

    def _busiest_share(self) -> float:
        """Returns the busiest engine's share of the requests. Popular adapters are assigned first, each to the engine
        with the fewest requests.
        """
        adapters, num_engines = self._question.adapters, self._question.device.count
        shares = [0.0] * num_engines
        for share in _rank_popularity(adapters.count, adapters.alpha)[:_ASSIGNED_ADAPTERS].tolist():
            shares[shares.index(min(shares))] += share
        return max(*shares, 1 / num_engines)

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
        longest = find_max_model_len(config, num_pages, self._page_bytes, spec.max_positions, self._footprint)
        return config, num_pages, longest

    @property
    def _activations(self) -> int:
        config, spec = self._question.config, self._question.spec
        # One rank samples, from the logits of the whole vocabulary. The classes of transformers get all outputs.
        shape = self._shape if spec.decoder is not None else spec.shape(spec.resolve_dtype(config.dtype))
        shape = replace(shape, vocab_size=spec.vocab_size)
        return measure_activations(
            shape,
            spec.decoder.experts if spec.decoder is not None else None,
            config.token_budget("cuda"),
            config.max_num_seqs,
            config.tensor_parallel_size,
        )

    def _measure_memory(self) -> PlannedMemory:
        count = self._num_adapters
        ranks = self._question.adapters.ranks[:count]
        layouts = [self._adapter_bytes(rank) for rank in ranks]
        pages = [-(-num_bytes // self._page_bytes) for num_bytes in layouts]
        counts = [len(range(first, count, len(layouts))) for first in range(len(layouts))]
        all_bytes, all_pages = sum(map(mul, counts, layouts)), sum(map(mul, counts, pages))
        if count:
            self._mean_adapter_bytes, self._mean_adapter_pages = all_bytes / count, all_pages / count
        at_once = int(self._num_pages / (self._request_pages + self._mean_adapter_pages))
        # If all adapters fit into the pool, requests share them.
        beside_all = (self._num_pages - all_pages) // self._request_pages
        swap_pages = count_swap_pages(self.config, self._num_pages, self._page_bytes, 1 << 62)
        host_bytes = int(_HOST_CACHE_MARGIN * self._num_ranks * all_bytes)
        return PlannedMemory(
            device_bytes=self._question.device.memory_bytes,
            reserved_bytes=_RESERVED_BYTES,
            weight_bytes=self._size.weight_bytes,
            activation_bytes=self._activations,
            pool_bytes=self.config.pool_bytes or 0 if self._num_pages else 0,
            num_pages=self._num_pages,
            full_page_bytes=self._page_bytes,
            block_tokens=self.config.block_tokens,
            kv_tokens=self._num_pages * self.config.block_tokens,
            state_pages=self._footprint.state_pages,
            max_model_len=self._max_model_len,
            num_adapters=count,
            adapter_sizes=tuple(
                {size.rank: size for size in map(AdapterSize, ranks, layouts, pages)}.values()
            ),
            adapter_pages=all_pages,
            adapters_at_once=(
                min(MAX_SLOTS, int(self._num_pages / self._mean_adapter_pages)) if all_pages else 0
            ),
            requests_at_once=min(self.config.max_num_seqs, max(at_once, beside_all)),
            host_cache_bytes=-(-host_bytes // _MIB) * _MIB,
            swap_bytes=swap_pages * self._page_bytes,
        )

    def _adapter_bytes(self, rank: int) -> int:
        """The packed size of an adapter with this rank on all targeted modules."""
        shape = self._shape
        linears = (index for layer in range(shape.num_layers) for index in shape.layer_linears(layer))
        paths = [*(shape.linears[index].path for index in linears), shape.embedding_path, shape.head_path]
        return lay_out_adapter(shape, [rank if path in self._modules else 0 for path in paths]).num_bytes


def _rank_popularity(count: int, alpha: float) -> npt.NDArray[np.float64]:
    """Returns the share of the requests of each adapter, the most popular one first."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -alpha
    return weights / weights.sum() if count else weights


def _find_modules(shape: ModelShape, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the paths of the targeted modules. Raises ConfigError for a target that matches no module."""
    paths = [*(linear.path for linear in shape.linears), shape.embedding_path, shape.head_path]
    found: list[str] = []
    for target in targets:
        if target == "all-linear":
            found += paths[:-2]
            continue
        names = _ATTENTION if target == "attention" else (target,)
        matched = [path for path in paths if path in names or name_module(path) in names]
        if not matched:
            known = ", ".join(map(name_module, paths))
            raise ConfigError(
                f"target {target!r} matches no module of this model; give attention, all-linear, or some of {known}"
            )
        found += matched
    return tuple(dict.fromkeys(found))


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
    spec.check_length(config.max_model_len)
    spec.check_quantization(config.quantization)
    stored = spec.decoder.quantization if spec.decoder is not None else None
    is_stored = stored is not None and stored.form == "int4"
    has_experts = spec.decoder is not None and spec.decoder.experts is not None
    if has_experts and (config.quantization == "int4" or is_stored):
        remedy = "use the unquantized checkpoint, and set quantization" if is_stored else "set quantization"
        raise ConfigError(
            f"experts in int4 are multiplied on CPUs only, and {question.device.name} is a GPU; {remedy} to auto or "
            "int8"
        )
    needs_fp8 = config.kv_format is KVFormat.FP8 or config.quantization == "fp8"
    if needs_fp8 and not question.device.has_fp8:
        raise ConfigError(
            f"{question.device.name} has no 8-bit floats (compute capability 8.9); set kv_cache_dtype to auto, and "
            "quantization to auto or int8"
        )
