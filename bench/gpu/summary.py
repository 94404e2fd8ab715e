"""The rows of all stages as tables that fit on a screen. Imports nothing that is slow to import."""

from collections.abc import Iterable
from pathlib import Path

from bench.table import Row, format_table, read_rows

# Of the output of a run, only the end may be kept.
MAX_CHARACTERS = 11_500
_MAX_LINE = 170
_MAX_FAILURES = 15
_HOST = (
    "schedule ms",
    "build ms",
    "upload ms",
    "launch ms",
    "sample ms",
    "wait ms",
    "postprocess ms",
    "learn ms",
    "rest",
)
_SCENE = ("batch", "adapters", "ranks")


def summarize(path: Path) -> str:
    """Of rows with the same key, the last one counts."""
    rows = read_rows(path)
    by_stage: dict[str, list[Row]] = {}
    for row in rows:
        by_stage.setdefault(row["stage"], []).append(row)
    tables: list[tuple[str, list[Row]]] = []
    if tests := by_stage.get("correct"):
        tables.append(
            ("tests", _pick(tests, "tests", ("seconds", "whole", "passed", "failed", "error", "skipped")))
        )
        failures = {row["test"]: row for row in tests if row["case"] == "failed"}
        tables.append(("failed tests", _select(list(failures.values())[:_MAX_FAILURES], ("test", "message"))))
    tables += [
        ("decode, ms a step", _join_decode(by_stage.get("decode", []), by_stage.get("profile", []))),
        (
            "mixed steps, ms",
            _pick(by_stage.get("profile", []), "mixed", (*_SCENE, "step ms", "GPU busy ms", "kernels")),
        ),
        ("S-LoRA's load", _serving(by_stage.get("s1", []))),
        ("time between tokens beside cold adapters, ms", _cold(by_stage.get("cold", []))),
        ("LoRA kernels of one layer", _lora(by_stage.get("lora", []))),
        ("attention of one layer", _attention(by_stage.get("prefill", []))),
        *_peers(by_stage.get("peers", [])),
        ("over HTTP", _over_http(by_stage.get("http", []), by_stage.get("decode", []))),
        ("errors", _errors(rows)),
        ("stages, seconds", _stages(rows)),
    ]
    text = "\n\n".join(format_table(title, found) for title, found in tables if found)
    lines = [line[:_MAX_LINE] for line in text.splitlines()]
    return "\n".join(lines)[-MAX_CHARACTERS:]


def _last(rows: Iterable[Row], key: tuple[str, ...]) -> list[Row]:
    """The last row of each key that was measured."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if "error" not in row and row.get("case") not in ("start", "stage"):
            found[tuple(row.get(name) for name in key)] = row
    return list(found.values())


def _select(rows: list[Row], columns: tuple[str, ...]) -> list[Row]:
    """columns: empty for all but those that all rows have in common."""
    hidden = ("commit", "device", "torch", "triton", "python", "stage", "whole text")
    return [
        {name: row.get(name) for name in columns or [name for name in row if name not in hidden]}
        for row in rows
    ]


def _pick(rows: list[Row], case: str, columns: tuple[str, ...]) -> list[Row]:
    found = [row for row in rows if row.get("case") == case]
    return _select(_last(found, (*_SCENE,)), columns)


def _join_decode(decode: list[Row], profiled: list[Row]) -> list[Row]:
    busy = {
        tuple(row[name] for name in _SCENE): row
        for row in _last([row for row in profiled if row.get("case") == "step"], _SCENE)
    }
    steps = {
        tuple(row[name] for name in _SCENE): row
        for row in _last([row for row in decode if row.get("case") == "step"], _SCENE)
    }
    joined = []
    for key in [*steps, *(key for key in busy if key not in steps)]:
        step, profile = steps.get(key, {}), busy.get(key, {})
        step_ms, busy_ms = step.get("step ms"), profile.get("GPU busy ms")
        joined.append(
            dict(zip(_SCENE, key, strict=True))
            | {
                "step": step_ms,
                "busy": busy_ms,
                "step/busy": step_ms / busy_ms if step_ms and busy_ms else None,
            }
            | {"floor": step.get("floor ms"), "kernels": profile.get("kernels")}
            | {name.removesuffix(" ms"): step.get(name) for name in _HOST}
        )
    return joined


def _serving(rows: list[Row]) -> list[Row]:
    columns = (
        "load",
        "adapters",
        "requests/s",
        "tokens/s",
        "step ms",
        "p50 TTFT s",
        "p99 TTFT s",
        "p50 ITL ms",
    )
    return _select(
        _last(rows, ("load", "adapters")), (*columns, "p99 ITL ms", "adapters a step", "loads", "errors")
    )


def _cold(rows: list[Row]) -> list[Row]:
    """over alone: p99 over that of the same round alone."""
    found = [row for row in _last(rows, ("case", "round")) if "p99 ms" in row]
    alone = {row["round"]: row["p99 ms"] for row in found if row["case"] == "alone"}
    columns = ("case", "round", "others", "loads", "loaded GB/s", "p50 ms", "p99 ms", "max ms")
    return [
        selected | {"over alone": row["p99 ms"] / alone[row["round"]] if row["round"] in alone else None}
        for row, selected in zip(found, _select(found, columns), strict=True)
    ]


def _copy_rate(rows: list[Row]) -> float | None:
    rates = [row["GB/s"] for row in rows if row.get("kind") == "copy" and "GB/s" in row]
    return rates[-1] if rates else None


def _lora(rows: list[Row]) -> list[Row]:
    """The four sites of a layer together."""
    copy = _copy_rate(rows)
    sites: dict[tuple[object, ...], list[Row]] = {}
    key = ("rank", "adapters", "batch")
    for row in _last([row for row in rows if row.get("kind") == "lora"], (*key, "site")):
        sites.setdefault(tuple(row[name] for name in key), []).append(row)
    tables = []
    for values, found in sites.items():
        microseconds, megabytes = sum(row["us"] for row in found), sum(row["MB"] for row in found)
        rate = 1e3 * megabytes / microseconds
        tables.append(
            dict(zip(key, values, strict=True))
            | {"sites": len(found), "us": microseconds, "MB": megabytes, "GB/s": rate}
            | {"of copy": rate / copy if copy else None}
            | {row["site"]: row["us"] for row in found}
        )
    return tables


def _attention(rows: list[Row]) -> list[Row]:
    copy = _copy_rate(rows)
    products = [row["TFLOP/s"] for row in rows if row.get("kind") == "matmul" and "TFLOP/s" in row]
    found = []
    for row in _last(rows, ("kind", "kv", "batch", "tokens", "context")):
        if row["kind"] not in ("prefill", "decode"):
            continue
        chosen = {
            name: row.get(name)
            for name in ("kind", "kv", "batch", "tokens", "context", "us", "GB/s", "TFLOP/s")
        }
        chosen["of copy"] = row["GB/s"] / copy if copy and row["kind"] == "decode" else None
        chosen["of matmul"] = row["TFLOP/s"] / products[-1] if products and row["kind"] == "prefill" else None
        found.append(chosen)
    return found


def _peers(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    kernels = [row for row in rows if str(row.get("case")).startswith("kernels of")]
    found = _select(_last(kernels, ("case", "adapters", "batch", "site")), ())
    columns = dict.fromkeys(name for row in found for name in row)
    others = [row for row in rows if row not in kernels]
    engines = _select(_last(others, ("case",)), ())
    names = dict.fromkeys(name for row in engines for name in row)
    return [
        ("LoRA kernels of peers, us a layer", [{name: row.get(name) for name in columns} for row in found]),
        ("engines of peers", [{name: row.get(name) for name in names} for row in engines]),
    ]


def _over_http(rows: list[Row], decode: list[Row]) -> list[Row]:
    """of engine: tokens/s over those of the engine alone with the same requests."""
    key = ("streams", "adapters", "prompt_tokens", "output_tokens")
    alone = {
        tuple(row[name] for name in key): row
        for row in decode
        if row.get("case") == "answers" and "error" not in row
    }
    found = []
    for row in _last([row for row in rows if row.get("case") == "over HTTP"], key):
        engine = alone.get(tuple(row[name] for name in key), {}).get("tokens/s")
        columns = ("streams", "adapters", "tokens/s", "p50 TTFT ms", "max TTFT ms")
        found.append(
            {name: row[name] for name in columns}
            | {"engine alone": engine, "of engine": row["tokens/s"] / engine if engine else None}
        )
    return found


def _errors(rows: list[Row]) -> list[Row]:
    found = []
    for row in rows:
        if row.get("error") and row.get("case") != "stage":
            names = ("case", "kind", "load", "batch", "adapters", "ranks", "site", "rank", "streams")
            key = " ".join(str(row[name]) for name in names if name in row)
            found.append({"stage": row["stage"], "case": key, "error": str(row["error"])[:110]})
    return found[-_MAX_FAILURES:]


def _stages(rows: list[Row]) -> list[Row]:
    starts = {row["stage"]: row["seconds"] for row in rows if row.get("case") == "start"}
    columns = ("stage", "given s", "took s", "whole", "compiled", "compile_s", "error")
    ended = {row["stage"]: row for row in rows if row.get("case") == "stage"}
    return [
        row | {"engine start s": starts.get(row["stage"])} | {"error": str(row["error"] or "")[:80]}
        for row in _select(list(ended.values()), columns)
    ]
