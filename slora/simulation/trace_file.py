"""Reads a trace of requests from a file: CSV with a header, or one JSON object in each line.

The fields are `arrival_s` (seconds), `prompt_tokens`, `output_tokens`, and optionally `adapter` and `tenant`. The names
of adapters and tenants may be any text. A request without an adapter uses the base model. A request without a tenant
belongs to the tenant of its adapter.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from slora.errors import ConfigError
from slora.simulation.traces import Trace, TraceRequest

__all__ = ["MAX_TRACE_REQUESTS", "read_trace"]

MAX_TRACE_REQUESTS = 1_000_000
_NEEDED = ("arrival_s", "prompt_tokens", "output_tokens")


def read_trace(path: Path) -> Trace:
    """Returns all requests in order of arrival. Adapters are numbered in the order in which the file names them.

    Raises ConfigError naming the file, the line and the field.
    """
    numbers: dict[str, int] = {}
    tenants: dict[str, int] = {}
    trace: Trace = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, record in _read_records(path, file):
                if len(trace) == MAX_TRACE_REQUESTS:
                    raise ConfigError(
                        f"{path}: a trace has at most {MAX_TRACE_REQUESTS} requests; cut the file after that many lines"
                    )
                trace.append(_read_request(f"{path}, line {line}", record, len(trace), numbers, tenants))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} can't be read: {error}") from error
    if not trace:
        raise ConfigError(
            f"{path}: the trace has no requests; give at least one line with {', '.join(_NEEDED)}"
        )
    trace.sort(key=lambda request: request.arrival_s)
    return trace


def _read_records(path: Path, file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if path.suffix == ".csv":
        reader = csv.DictReader(file)
        for row in reader:
            yield reader.line_num, row
        return
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ConfigError(
                f"{path}, line {number}: is no JSON object; name the file .csv if it is CSV with a header"
            )
        yield number, record


def _read_request(
    place: str, record: Mapping[str, Any], thread: int, numbers: dict[str, int], tenants: dict[str, int]
) -> TraceRequest:
    arrival_s, prompt_tokens, output_tokens = (_read_number(place, record, name) for name in _NEEDED)
    for name, value in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if value < 1 or value % 1:
            raise ConfigError(f"{place}: {name} is {value:g}; it must be a whole number of at least 1")
    adapter, tenant = record.get("adapter"), record.get("tenant")
    has_adapter = adapter not in (None, "")
    number = numbers.setdefault(str(adapter), len(numbers)) if has_adapter else None
    owner = (
        f"tenant {tenant}" if tenant not in (None, "") else f"adapter {adapter}" if has_adapter else "base"
    )
    account = tenants.setdefault(owner, len(tenants))
    return TraceRequest(arrival_s, account, number, int(prompt_tokens), int(output_tokens), thread)


def _read_number(place: str, record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    try:
        number = (
            float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
        )
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"{place}: {name} is {value!r}; it must be a number of at least 0")
    return number
