"""The bars of the CPU path: what each says, which rows of the table it judges, and whether they meet it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from bench.table import Row
from bench.throughput import BASE

_MIB_BESIDE = 400
_READY_S = 5.0
_OVERHEAD_PERCENT = 5.0


@dataclass(frozen=True, slots=True)
class Bar:
    """judges: whether a row is meant. column: what is held against the value, from below unless `at_most`."""

    name: str
    judges: Callable[[Row], bool]
    column: str
    value: float
    at_most: bool = False

    def verdicts(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            seen = row.get(self.column)
            if seen is None or not self.judges(row):
                continue
            is_met = seen <= self.value if self.at_most else seen >= self.value
            yield {
                "bar": self.name,
                "where": _where(row),
                "seen": seen,
                "wanted": f"{'<=' if self.at_most else '>='} {self.value:g}",
                "verdict": "met" if is_met else "MISSED",
            }


def _vllm(row: Row) -> bool:
    return bool(row.get("contender") == "vllm")


def _peft(row: Row, adapters: int) -> bool:
    return bool(row.get("contender") == "peft" and row["adapters"] == adapters)


BARS = (
    Bar("base over vLLM's", lambda r: _vllm(r) and not r["adapters"] and r["batch"] > 1, "ours over it", 1.0),
    Bar(
        "base over vLLM's", lambda r: _vllm(r) and not r["adapters"] and r["batch"] == 1, "ours over it", 0.9
    ),
    Bar("adapters over the floor", lambda r: r.get("contender") == "slora", "of floor", 0.9),
    Bar("adapters over vLLM's", lambda r: _vllm(r) and r["adapters"] > 0, "ours over it", 10.0),
    Bar("adapters over peft's", lambda r: _peft(r, 8), "ours over it", 5.0),
    Bar("adapters over peft's", lambda r: _peft(r, 32), "ours over it", 10.0),
    Bar("one request over its reads", lambda r: r.get("contender") == BASE, "of read", 0.4),
    Bar("overhead %", lambda r: r.get("batch") == 64, "overhead %", _OVERHEAD_PERCENT, at_most=True),
    Bar("PSS beside weights and pool", lambda r: True, "beside MiB", _MIB_BESIDE, at_most=True),
    Bar("ready", lambda r: "beside MiB" in r, "ready s", _READY_S, at_most=True),
)


def verdict_rows(rows: Iterable[Row]) -> list[Row]:
    judged = list(rows)
    return [verdict for bar in BARS for verdict in bar.verdicts(judged)]


def _where(row: Row) -> str:
    parts = (row.get("dtype"), row.get("shape"), row.get("batch"), row.get("adapters"))
    names = ("{}", "{}", "batch {}", "{} adapters")
    return ", ".join(name.format(part) for name, part in zip(names, parts, strict=True) if part is not None)
