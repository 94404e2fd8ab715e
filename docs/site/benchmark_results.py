"""The page of all rows of the benchmarks that performance.md quotes, from bench/results."""

import json
import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_RESULTS = _ROOT / "bench" / "results"
_INTRODUCTION = """\
# Benchmark results

The rows of the files in `bench/results` that [Performance](performance.md) quotes, as the benchmarks wrote them.
Absolute figures hold for the machine of the run only. Compare figures of the same run.
"""
_QUOTED = re.compile(r"`([\w-]+\.json)`")
_SHOWN_OF_ENVIRONMENT = ("device", "commit", "python", "torch", "triton", "driver", "cores", "note")


def make_page() -> str:
    quoted = dict.fromkeys(_QUOTED.findall((_ROOT / "docs" / "performance.md").read_text(encoding="utf-8")))
    parts = [_INTRODUCTION]
    for name in sorted(quoted):
        result = json.loads((_RESULTS / name).read_text(encoding="utf-8"))
        parts += [f"## {name}", _describe_environment(result["environment"])]
        for title, rows in result["tables"].items():
            parts += [f"### {title}", _make_table(rows)]
    return "\n\n".join(part for part in parts if part)


def _describe_environment(environment: dict[str, Any]) -> str:
    runs = environment.get("runs", [environment])
    facts = [{name: run[name] for name in _SHOWN_OF_ENVIRONMENT if name in run} for run in runs]
    distinct = {json.dumps(one): one for one in facts}.values()
    return "\n".join("- " + ", ".join(f"{name}: {value}" for name, value in one.items()) for one in distinct)


def _make_table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([_show(row.get(name)) for name in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _show(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else str(value)
    text = f"{value:,.0f}" if isinstance(value, float) and abs(value) >= 1000 else text
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
