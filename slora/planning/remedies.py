"""Suggests changes when a load does not fit on an engine, and estimates the effect of new settings or devices."""

import math
from dataclasses import replace

from slora.errors import ConfigError
from slora.planning.devices import DEVICES
from slora.planning.plan import SAFE_UTILIZATION, Plan, Progress, Question, make_plan, plan_memory

__all__ = ["find_remedies"]

# Above this share of held pages, the pool has no room for more sequences.
_FULL = 0.9
# The numbers of GPUs that hosts have.
_MANY_RANKS = (2, 4, 8)
# Above this share of the held bytes, adapters leave too little room for sequences.
_LARGE_ADAPTER_SHARE = 0.3


def find_remedies(question: Question, plan: Plan, progress: Progress, *, max_tokens: int) -> list[str]:
    """Returns suggestions for the operator, the cheapest change first. Empty if the plan fits with room for bursts."""
    usage = plan.utilization
    if plan.fits and (usage is None or usage < SAFE_UTILIZATION):
        return []
    remedies = [
        _describe(name, option, progress, max_tokens) for name, option in _find_options(question, plan)
    ]
    if plan.capacity is None and plan.memory.num_pages and plan.memory.max_model_len:
        remedies.append("send shorter requests, or cut prompts and answers (max_tokens)")
    if plan.capacity is not None:
        remedies += _find_shape_remedies(question, plan)
        needed = math.ceil(plan.rate * plan.engines / (SAFE_UTILIZATION * plan.capacity.requests_per_s))
        if needed > plan.engines:
            remedies.append(f"run {needed} engines like this one and divide the adapters among them")
    elif not plan.memory.num_pages and not remedies:
        remedies.append("a smaller model")
    return [remedy for remedy in remedies if remedy]


def _find_options(question: Question, plan: Plan) -> list[tuple[str, Question]]:
    """Returns other settings and devices that may help. Each name is the flag that the operator would set."""
    config, device = question.config, question.device
    own = question.spec.decoder
    options: list[tuple[str, Question]] = []
    is_full = plan.capacity is None or plan.capacity.held_share >= _FULL
    if is_full and device.has_fp8 and config.kv_cache_dtype == "auto" and plan.memory.num_pages:
        options.append(("--kv-cache-dtype fp8", _with_config(question, kv_cache_dtype="fp8")))
    if is_full and config.quantization == "auto" and own is not None and own.quantization is None:
        form = "fp8" if device.has_fp8 else "int8"
        options.append((f"--quantization {form}", _with_config(question, quantization=form)))
    larger = _find_larger_device(question, plan)
    divided = _find_division(question) if not plan.memory.num_pages else None
    return [*options, *(one for one in (larger, divided) if one is not None)]


def _find_larger_device(question: Question, plan: Plan) -> tuple[str, Question] | None:
    """Returns the smallest device with enough memory, bandwidth and FLOP/s for the load, as a flag and a question."""
    device = question.device
    needed = 0.0
    if plan.capacity is not None and plan.capacity.requests_per_s:
        needed = plan.rate * plan.engines / plan.capacity.requests_per_s
    for one in DEVICES.values():
        gain = min(one.bandwidth / device.bandwidth, one.flops / device.flops)
        is_same = one.name == device.name
        moved = replace(question, device=one, config=replace(question.config, pool_bytes=None))
        try:
            if not is_same and gain >= needed and plan_memory(moved).fits:
                return f"--device {one.name}", moved
        except ConfigError:  # For example, the device has no 8-bit floats.
            continue
    return None


def _find_division(question: Question) -> tuple[str, Question] | None:
    """Returns the smallest number of devices like this one that hold the model together."""
    for num_ranks in _MANY_RANKS:
        divided = _with_config(question, tensor_parallel_size=num_ranks)
        try:
            if num_ranks > question.config.tensor_parallel_size and plan_memory(divided).fits:
                return f"--tensor-parallel-size {num_ranks}", divided
        except ConfigError:  # For example, the model has heads that can't be divided among so many ranks.
            continue
    return None


def _with_config(question: Question, **changes: str | int) -> Question:
    return replace(question, config=replace(question.config, pool_bytes=None, **changes))  # type: ignore[arg-type]


def _describe(name: str, question: Question, progress: Progress, max_tokens: int) -> str:
    try:
        plan = make_plan(
            question,
            lambda _what, done: progress(f"what {name} brings", done),
            with_latencies=False,
            max_tokens=max_tokens,
        )
    except ConfigError:
        return ""
    if plan.capacity is None:
        return ""
    fits = "the load fits" if plan.fits else "still too little"
    return (
        f"{name}: {plan.memory.num_pages} pages, {plan.capacity.requests_per_s:.3g} requests/s "
        f"({plan.capacity.output_tokens_per_s:,.0f} tokens/s) for each engine: {fits}"
    )


def _find_shape_remedies(question: Question, plan: Plan) -> list[str]:
    capacity, config = plan.capacity, question.config
    assert capacity is not None, "the caller has simulated the capacity"
    remedies = []
    is_full = capacity.held_share >= _FULL
    if is_full and capacity.adapter_share > _LARGE_ADAPTER_SHARE:
        remedies.append(
            f"fewer or smaller adapters: they take {100 * capacity.adapter_share:.0f}% of what requests hold"
        )
    if not is_full and capacity.running > 0.9 * config.max_num_seqs:
        remedies.append(
            f"--max-num-seqs above {config.max_num_seqs}: so many sequences run at once, and the pool has room for more"
        )
    return remedies
