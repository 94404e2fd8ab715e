"""`slora adapter verify`: the comparison of `slora.verify` on the command line, as a table or as JSON.

Exit code 0: the adapter is served as peft computes it. 1: it is not. 2: it can't be served or compared, and every
reason is printed.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slora.core.errors import ConfigError, NotComparable, RequestRefused
from slora.models.model_spec import find_model
from slora.verify.verification import ModuleCheck, Verification, VerificationRequest, verify_adapter
from slora_adapters.errors import AdapterError, AdapterInvalid, Reason

_LAYER = re.compile(r"(?P<layers>.*\.)(?P<layer>\d+)\.(?P<module>.+)")
_MOST_ROWS = 12


def verify(arguments: argparse.Namespace) -> int:
    """Compares, prints the result and returns the exit code."""
    try:
        found = verify_adapter(_read_request(arguments))
    except AdapterInvalid as error:
        return _report_unusable(error.reasons, as_json=arguments.json)
    except (AdapterError, ConfigError, NotComparable, RequestRefused) as error:
        return _report_unusable([Reason(_error_code(error), str(error))], as_json=arguments.json)
    if arguments.json:
        print(json.dumps({"verdict": "equal" if found.equal else "different", **asdict(found)}, indent=2))
    else:
        print("\n".join(_format_report(found, arguments)))
    return 0 if found.equal else 1


def _read_request(arguments: argparse.Namespace) -> VerificationRequest:
    return VerificationRequest(
        find_model(Path(arguments.model), tell=lambda text: print(text, file=sys.stderr)),
        Path(arguments.directory),
        tuple(arguments.prompt or ()),
        arguments.max_tokens,
        arguments.dtype,
        arguments.device,
        arguments.max_lora_rank,
    )


def _error_code(error: Exception) -> str:
    codes = {ConfigError: "model", NotComparable: "not_comparable", RequestRefused: "prompt"}
    return codes.get(type(error), "adapter")


def _report_unusable(reasons: Sequence[Reason], *, as_json: bool) -> int:
    if as_json:
        print(
            json.dumps({"verdict": "unusable", "reasons": [asdict(reason) for reason in reasons]}, indent=2)
        )
    else:
        print("unusable:", *(f"  {reason.code}: {reason.message}" for reason in reasons), sep="\n")
    return 2


def _format_report(found: Verification, arguments: argparse.Namespace) -> Iterable[str]:
    yield (
        f"{arguments.directory} on {arguments.model}, {found.dtype}, {found.kernels} kernels, compared "
        "with peft"
    )
    yield ""
    yield f"modules: {len(found.modules)} of the base model's {found.num_modules} are adapted"
    yield from _format_table(["module", "layers", "rank", "scale", "deviation"], _module_rows(found.modules))
    yield ""
    yield "layers: largest deviation of a module's LoRA delta, relative to its largest entry"
    yield from _format_table(["layer", "deviation", "of"], _layer_rows(found.modules))
    yield ""
    yield "answers: greedy; log-probability is the mean over the answer's tokens"
    yield from _format_table(
        ["prompt", "tokens", "differ", "excused", "logprob", "peft's", "deviation", "KL to base", "changed"],
        _prompt_rows(found),
    )
    yield ""
    if found.not_served:
        yield f"not served: {', '.join(found.not_served)}"
    yield from (f"warning: {text}" for text in found.warnings)
    yield from (f"problem: {text}" for text in found.problems[:_MOST_ROWS])
    if len(found.problems) > _MOST_ROWS:
        yield f"problem: and {len(found.problems) - _MOST_ROWS} more; --json shows all of them"
    yield "verdict: equal" if found.equal else "verdict: DIFFERENT"


def _module_rows(modules: Sequence[ModuleCheck]) -> Iterable[list[str]]:
    """One row per module name, such as self_attn.q_proj."""
    groups: dict[str, list[ModuleCheck]] = {}
    for check in modules:
        groups.setdefault(_split(check.path)[1], []).append(check)
    for name, checks in groups.items():
        ranks = _format_range([check.rank for check in checks])
        scales = _format_range([check.scale for check in checks])
        worst = max(check.deviation for check in checks)
        yield [name, str(len(checks)), ranks, scales, f"{worst:.1e}"]


def _layer_rows(modules: Sequence[ModuleCheck]) -> Iterable[list[str]]:
    """One row per layer. For a deep model, only the layers that deviate most."""
    worst: dict[str, ModuleCheck] = {}
    for check in modules:
        layer, _ = _split(check.path)
        if layer not in worst or check.deviation > worst[layer].deviation:
            worst[layer] = check
    kept = sorted(worst, key=lambda layer: -worst[layer].deviation)[:_MOST_ROWS]
    for layer, check in worst.items():
        if layer in kept:
            yield [layer, f"{check.deviation:.1e}", _split(check.path)[1]]
    if len(worst) > _MOST_ROWS:
        yield ["others", "less", ""]


def _prompt_rows(found: Verification) -> Iterable[list[str]]:
    for check in found.prompts:
        text = check.prompt if check.prompt is not None else f"{check.prompt_tokens} random tokens"
        yield [
            text if len(text) <= 24 else text[:21] + "...",
            str(check.answer_tokens),
            str(check.wrong),
            str(check.excused),
            f"{check.logprob:.4f}",
            f"{check.peft_logprob:.4f}",
            f"{check.deviation:.1e}",
            f"{check.effect:.2g}",
            f"{check.changed:.0%}",
        ]


def _split(path: str) -> tuple[str, str]:
    """Splits a path: model.layers.3.self_attn.q_proj -> ("3", "self_attn.q_proj"). Outside the layers: ("-", path)."""
    match = _LAYER.fullmatch(path)
    return (match["layer"], match["module"]) if match else ("-", path)


def _format_range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _format_table(heads: list[str], rows: Iterable[list[str]]) -> Iterable[str]:
    """Aligns columns to their widest cell, the first one left and the others right."""
    cells: list[list[Any]] = [heads, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    for row in cells:
        first, *rest = (f"{cell:{'<' if not i else '>'}{widths[i]}}" for i, cell in enumerate(row))
        yield "  ".join(["  " + first, *rest]).rstrip()
