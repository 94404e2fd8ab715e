"""Suggests changes when a load does not fit on an engine."""

import math
from dataclasses import replace

from slora.core.errors import ConfigError
from slora.planning.devices import DEVICES
from slora.planning.plan import SAFE_UTILIZATION, Plan, Question, make_plan

# The numbers of GPUs that hosts have.
_MANY_RANKS = (2, 4, 8)
# Other settings are suggested if they raise the capacity by this factor.
_MIN_GAIN = 1.05


def find_remedies(question: Question, plan: Plan) -> list[str]:
    """Returns suggestions for the operator, the cheapest change first. Empty if the plan fits with room for bursts."""
    usage = plan.utilization
    if plan.fits and usage is not None and usage < SAFE_UTILIZATION:
        return []
    own, device, config = question.spec.decoder, question.device, question.config
    options = {}
    if plan.memory.num_pages and device.has_fp8 and config.kv_cache_dtype == "auto":
        options["--kv-cache-dtype fp8"] = _with_config(question, kv_cache_dtype="fp8")
    if config.quantization == "auto" and own is not None and own.quantization is None:
        form = "fp8" if device.has_fp8 else "int8"
        options[f"--quantization {form}"] = _with_config(question, quantization=form)
    found = {name: _try_plan(option) for name, option in options.items()}
    remedies = [
        _describe(name, other)
        for name, other in found.items()
        if other is not None and _capacity(other) > _MIN_GAIN * _capacity(plan)
    ]
    remedies += _find_hardware(question, plan)
    if plan.service is not None:
        if plan.service.most_running >= config.max_num_seqs:
            remedies.append(f"--max-num-seqs above {config.max_num_seqs}: so many sequences run at once")
        needed = math.ceil(plan.rate * plan.engines / (SAFE_UTILIZATION * plan.service.requests_per_s))
        if needed > plan.engines:
            remedies.append(f"run {needed} engines like this one and divide the adapters among them")
    elif plan.memory.num_pages:
        remedies.append("send shorter requests, or cut prompts and answers (max_tokens)")
    return remedies or ["a smaller model"]


def _find_hardware(question: Question, plan: Plan) -> list[str]:
    """Returns the smallest other device that serves the load, and the fewest devices that hold the model together."""
    remedies = []
    for device in DEVICES.values():
        other = _try_plan(_with_config(replace(question, device=device)))
        if device.name != question.device.name and other is not None and other.fits:
            remedies.append(_describe(f"--device {device.name}", other))
            break
    for num_ranks in _MANY_RANKS if not plan.memory.num_pages else ():
        other = _try_plan(_with_config(question, tensor_parallel_size=num_ranks))
        if num_ranks > question.config.tensor_parallel_size and other is not None and _capacity(other):
            remedies.append(_describe(f"--tensor-parallel-size {num_ranks}", other))
            break
    return remedies


def _with_config(question: Question, **changes: str | int) -> Question:
    return replace(question, config=replace(question.config, pool_bytes=None, **changes))  # type: ignore[arg-type]


def _try_plan(question: Question) -> Plan | None:
    """Returns None if the option is not possible, for example on a device without 8-bit floats."""
    try:
        return make_plan(question)
    except ConfigError:
        return None


def _capacity(plan: Plan) -> float:
    return 0.0 if plan.service is None else plan.service.requests_per_s


def _describe(name: str, plan: Plan) -> str:
    assert plan.service is not None, "the caller has looked"
    fits = "the load fits" if plan.fits else "still too little"
    return (
        f"{name}: {plan.memory.num_pages} pages, {plan.service.requests_per_s:.3g} requests/s "
        f"({plan.service.output_tokens_per_s:,.0f} tokens/s) for each engine: {fits}"
    )
