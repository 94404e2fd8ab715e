"""`slora plan`: predicts how a device serves a model with adapters under a given load, and prints the flags for `slora
serve`.
"""

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slora.core.byte_text import format_bytes
from slora.core.engine_config import EngineConfig
from slora.core.errors import ConfigError
from slora.core.setting import ByteSize, SettingRefused, setting_specs
from slora.models.model_spec import ModelSpec, find_model, read_model_spec
from slora.planning.devices import Device, cut_device, find_device
from slora.planning.plan import (
    Plan,
    PlannedAdapters,
    PlannedLoad,
    PlannedMemory,
    Question,
    Service,
    compare_slices,
    make_plan,
)
from slora.planning.remedies import find_remedies
from slora.planning.roofline import EFFICIENCIES
from slora_api.cli.declaration import argument, command
from slora_api.cli.output import print_json, print_records
from slora_api.core.settings import AUTO_HOST_CACHE_BYTES, server_setting_specs

# Settings of the engine that the plan's flags always contain.
_STATED = ("model", "pool_bytes", "max_model_len")
_HOST_BANDWIDTH = 24e9
_MIB = 1 << 20


# Settings of the engine that affect a plan.
_PLANNED = (
    *(
        "dtype",
        "tensor_parallel_size",
        "model_impl",
        "quantization",
        "kv_cache_dtype",
        "pool_bytes",
        "block_tokens",
    ),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "swap_bytes"),
)


@command(
    "plan",
    None,
    argument(
        "--model",
        metavar="MODEL",
        required=True,
        help="base model: its directory, where config.json suffices, or ORG/NAME[@REVISION] of the Hugging Face hub",
    ),
    argument(
        "--device",
        metavar="NAME",
        help="L4, A10G, RTX-4090, A100-40, L40S, A100-80, H100, H200 or B200; the next options describe another "
        "device, or change one",
    ),
    argument("--device-memory", metavar="SIZE", help="memory of the device, such as 80GiB"),
    argument("--bandwidth", metavar="SIZE", help="memory bandwidth in bytes per second, such as 3350GB"),
    argument("--flops", type=float, metavar="X", help="FLOP/s of dense 16-bit products, such as 989e12"),
    argument(
        "--host-bandwidth", metavar="SIZE", help="bytes per second from the host, such as 24GB (default 24GB)"
    ),
    argument(
        "--slice",
        metavar="NAME",
        help="one slice of the device: a MIG profile such as 1g.10gb, or an MPS share such as 50%%",
    ),
    argument(
        "--compare", action="store_true", help="compare MIG profiles and MPS shares with the whole device"
    ),
    argument("--adapters", type=int, default=100, metavar="N", help="number of adapters (default 100)"),
    argument(
        "--rank",
        default="16",
        metavar="R[,R...]",
        help="rank of the adapters, or several in turn (default 16)",
    ),
    argument(
        "--targets",
        default="all-linear",
        metavar="NAMES",
        help="modules that adapters change: all-linear, attention, or names such as q_proj,v_proj (default all-linear)",
    ),
    argument(
        "--popularity", default="zipf:1", metavar="FORM", help="uniform, or zipf:ALPHA (default zipf:1)"
    ),
    argument("--rate", type=float, default=1.0, metavar="X", help="requests per second (default 1)"),
    argument(
        "--prompt-tokens", type=int, default=512, metavar="N", help="mean length of prompts (default 512)"
    ),
    argument(
        "--output-tokens", type=int, default=256, metavar="N", help="mean length of answers (default 256)"
    ),
    *(
        argument(spec.flag, dest=spec.name, metavar=spec.metavar, help=spec.help_text)
        for spec in server_setting_specs()
        if spec.name in _PLANNED
    ),
    epilog="Memory is computed as the engine computes it. Times are estimated from the device's data sheet. "
    "The exit code is 0 if the load fits, 1 if it does not, and 2 for values that cannot be planned.",
    has_json=True,
)
def plan(arguments: argparse.Namespace) -> int:
    """Prints the plan. Returns 0 if the load fits, 1 if it does not, and 2 for values that cannot be planned."""
    try:
        question = _read_question(arguments)
        if arguments.compare:
            return _compare(question, arguments)
        found = make_plan(question)
        remedies = find_remedies(question, found)
    except (ConfigError, SettingRefused) as error:
        print(f"slora plan: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print_json(_as_record(found) | {"remedies": remedies, "command": _command(found)})
    else:
        print(_describe(question, found, remedies))
    return 0 if found.fits else 1


def _read_question(arguments: argparse.Namespace) -> Question:
    config = _read_config(arguments)
    config = replace(config, model=find_model(config.model, config.model_impl))
    spec = read_model_spec(config.model, config.model_impl)
    device = _read_device(arguments)
    if config.tensor_parallel_size > 1 and (arguments.slice is not None or arguments.compare):
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but --slice and --compare plan parts of one GPU, "
            "and a tensor-parallel group needs whole GPUs; leave them out, or set tensor_parallel_size to 1"
        )
    if arguments.slice is not None:
        # Plan one slice. With --compare, the plan covers all slices of a device.
        device = replace(cut_device(device, arguments.slice), count=1)
    adapters = PlannedAdapters(
        arguments.adapters,
        _read_ranks(arguments.rank),
        tuple(arguments.targets.split(",")),
        _read_alpha(arguments),
    )
    load = PlannedLoad(arguments.rate, arguments.prompt_tokens, arguments.output_tokens)
    return Question(spec, config, device, adapters, load)


def _read_config(arguments: argparse.Namespace) -> EngineConfig:
    given = {
        spec.name: spec.parse(getattr(arguments, spec.name), spec.flag)
        for spec in setting_specs(EngineConfig)
        if spec.name in ("model", *_PLANNED) and getattr(arguments, spec.name) is not None
    }
    config = EngineConfig(**given)
    ranks = _read_ranks(arguments.rank)
    return replace(config, max_lora_rank=max(config.max_lora_rank, *ranks)) if min(ranks) > 0 else config


def _read_device(arguments: argparse.Namespace) -> Device:
    by_hand = {
        "memory_bytes": _read_size(arguments.device_memory, "--device-memory"),
        "bandwidth": _read_size(arguments.bandwidth, "--bandwidth"),
        "flops": arguments.flops,
        "host_bandwidth": _read_size(arguments.host_bandwidth, "--host-bandwidth"),
    }
    given = {name: value for name, value in by_hand.items() if value is not None}
    for name, value in given.items():
        if not 0 < value < 1e30:
            raise ConfigError(f"{name} is {value:g}; it must be above 0")
    if arguments.device is not None:
        return replace(find_device(arguments.device), **given)
    missing = [name for name in ("memory_bytes", "bandwidth", "flops") if name not in given]
    if missing:
        raise ConfigError(
            "no device is given; give --device NAME, or --device-memory, --bandwidth and --flops together"
        )
    return Device("the device", **({"host_bandwidth": _HOST_BANDWIDTH} | given))


def _read_size(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    try:
        return ByteSize().read(text)
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; it must be {ByteSize().accepted}") from None


def _read_ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--rank is {text!r}; it must be a rank such as 16, or several such as 8,16,64"
        ) from None


def _read_alpha(arguments: argparse.Namespace) -> float:
    kind, _, alpha = arguments.popularity.partition(":")
    try:
        if kind == "uniform" and not alpha:
            return 0.0
        if kind == "zipf":
            return float(alpha or 1.0)
    except ValueError:
        pass
    raise ConfigError(
        f"--popularity is {arguments.popularity!r}; it must be uniform, zipf, or zipf:EXPONENT such as zipf:1.5"
    )


def _compare(question: Question, arguments: argparse.Namespace) -> int:
    plans = compare_slices(question)
    if arguments.json:
        print_json(
            [
                {"device": name, "error": one} if isinstance(one, str) else _as_record(one)
                for name, one in plans.items()
            ]
        )
    else:
        records = [_compare_record(name, one) for name, one in plans.items()]
        columns = {name: (lambda record, name=name: str(record[name])) for name in records[0]}
        print_records(records, columns, as_json=False)
        print("\n" + _COMPARED)
        for record, one in zip(records, plans.values(), strict=True):
            problem = one if isinstance(one, str) else one.problem
            if problem is not None:
                print(f"{record['device']}: {problem}")
    return 0 if any(isinstance(one, Plan) and one.fits for one in plans.values()) else 1


_COLUMNS = ("engines", "pages", "adapters", "requests", "requests/s", "tokens/s", "TTFT", "ITL", "load")
_COMPARED = (
    "Each slice is an engine of its own. Adapters are divided among the engines, and requests follow them."
)


def _compare_record(name: str, found: Plan | str) -> dict[str, str]:
    record = dict.fromkeys(_COLUMNS, "-")
    if isinstance(found, str):
        return {"device": name, **record}
    memory, service = found.memory, found.service
    record |= {"engines": str(found.engines), "load": "fits" if found.fits else "does not fit"}
    if memory.num_pages:
        record |= {
            "pages": f"{memory.num_pages:,}",
            "adapters": f"{memory.adapters_at_once:,}",
            "requests": f"{memory.requests_at_once:,}",
        }
    if service is not None:
        record |= {
            "requests/s": f"{found.engines * service.requests_per_s:.3g}",
            "tokens/s": f"{found.engines * service.output_tokens_per_s:,.0f}",
        }
    if service is not None and found.fits:
        record |= {"TTFT": _ms(service.ttft_s), "ITL": _ms(service.itl_s)}
    return {"device": name, **record}


def _describe(question: Question, found: Plan, remedies: list[str]) -> str:
    memory = found.memory
    blocks = [_describe_memory(question.spec, question.device, found)]
    if memory.num_pages:
        blocks.append(_describe_room(question, memory))
    if found.service is not None:
        blocks.append(_describe_traffic(question.load, found, found.service))
    if found.problem is not None:
        blocks.append(f"The load does not fit: {found.problem}.")
    elif remedies:
        blocks.append("The load fits, but leaves too little room for bursts.")
    else:
        blocks.append("The load fits.")
    if remedies:
        blocks.append("What to change:\n" + "\n".join(f"- {remedy}" for remedy in remedies))
    if found.fits:
        blocks.append(f"Start the server with:\n{_command(found)}")
    return "\n\n".join(blocks)


def _describe_memory(spec: ModelSpec, device: Device, found: Plan) -> str:
    memory = found.memory
    taken = memory.reserved_bytes + memory.weight_bytes + memory.activation_bytes + memory.pool_bytes
    num_ranks = found.config.tensor_parallel_size
    ranks = {"ranks": f"{num_ranks} of these devices compute together; the sizes are those of one of them"}
    return _align(
        {
            "device": f"{device.name}: {format_bytes(device.memory_bytes)}, {device.bandwidth / 1e9:,.0f} GB/s, "
            f"{device.flops / 1e12:,.0f} TFLOP/s",
            **(ranks if num_ranks > 1 else {}),
            "weights": f"{format_bytes(memory.weight_bytes)} ({spec.family}, {spec.resolve_dtype(found.config.dtype)}, "
            f"quantization {found.config.quantization})",
            "activations": f"{format_bytes(memory.activation_bytes)}, estimated",
            "driver": f"{format_bytes(memory.reserved_bytes)}, estimated",
            "page pool": f"{format_bytes(memory.pool_bytes)}: {memory.num_pages:,} pages of "
            f"{format_bytes(memory.full_page_bytes)}",
            "unused": f"{format_bytes(max(0, memory.device_bytes - taken))}, for recorded steps and fragmentation",
        }
    )


def _describe_room(question: Question, memory: PlannedMemory) -> str:
    sizes = {
        f"adapter of rank {one.rank}": f"{format_bytes(one.num_bytes)}: {one.pages:,} pages, the KV of "
        f"{one.pages * memory.block_tokens:,} tokens"
        for one in memory.adapter_sizes
    }
    rows = sizes | {
        "adapters at once": f"{memory.adapters_at_once:,} if no request runs; all {memory.num_adapters:,} take "
        f"{memory.adapter_pages:,} of {memory.num_pages:,} pages",
    }
    if not memory.num_adapters:
        rows = {}
    if memory.state_pages:
        rows["recurrent state"] = (
            f"{format_bytes(memory.state_pages * memory.full_page_bytes)}: {memory.state_pages:,} pages for each "
            "sequence, beside its KV"
        )
    length = question.load.prompt_tokens + question.load.output_tokens
    return _align(
        rows
        | {
            "tokens of KV": f"{memory.kv_tokens:,} without adapters; longest sequence {memory.max_model_len:,}",
            "requests at once": f"{memory.requests_at_once:,} of {length:,} tokens (--max-num-seqs allows "
            f"{question.config.max_num_seqs})",
            "host memory": f"{format_bytes(memory.host_cache_bytes)} to cache all adapters, "
            f"{format_bytes(question.config.tensor_parallel_size * memory.swap_bytes)} for preempted sequences",
        }
    )


def _describe_traffic(load: PlannedLoad, found: Plan, service: Service) -> str:
    rows = {
        "capacity": f"{service.requests_per_s:.3g} requests/s, {service.output_tokens_per_s:,.0f} tokens/s of "
        f"answers, {service.most_running:.0f} sequences at once",
        "load": f"{found.rate:.3g} requests/s, {found.rate * load.output_tokens:,.0f} tokens/s of answers: "
        f"{100 * found.rate / service.requests_per_s:.0f}% of the capacity",
    }
    if found.fits:
        rows |= {
            "TTFT": f"{_ms(service.ttft_s)} on average, if no request waits for another to end",
            "ITL": f"{_ms(service.itl_s)} on average",
            "adapter hits": f"{100 * service.hit_share:.0f}% of requests find theirs in the pool",
        }
    rows["assumed"] = (
        f"{EFFICIENCIES['weights']:g} of the bandwidth, {EFFICIENCIES['matrix products']:g} of the FLOP/s; "
        "capacities may be a third too high, and a TTFT of tens of milliseconds half of the real one"
    )
    if found.config.tensor_parallel_size > 1:
        rows["assumed"] += "; times of several devices together were never measured"
    return _align(rows)


def _command(found: Plan) -> str:
    """Returns the command that starts a server with the planned settings."""
    config, memory = found.config, found.memory
    flags = []
    for spec in setting_specs(EngineConfig):
        value = getattr(config, spec.name)
        if value is None or (value == spec.default and spec.name not in _STATED):
            continue
        shown = ("on" if value else "off") if isinstance(value, bool) else value
        if isinstance(value, int) and spec.name.endswith("_bytes") and value and value % _MIB == 0:
            shown = f"{value // _MIB}MiB"
        flags.append(f"{spec.flag} {shown}")
    if memory.host_cache_bytes > AUTO_HOST_CACHE_BYTES:
        flags.append(f"--host-cache-bytes {memory.host_cache_bytes // _MIB}MiB")
    return " \\\n  ".join(["slora serve", *flags])


def _as_record(found: Plan) -> dict[str, Any]:
    fields = asdict(found)
    config = {
        name: str(value) if isinstance(value, Path) else value for name, value in fields.pop("config").items()
    }
    return fields | {
        "efficiencies": EFFICIENCIES,
        "fits": found.fits,
        "utilization": found.utilization,
        "config": config,
    }


def _align(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows.items())


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
