"""The health of this host by the minute: what the main process records, and what the console shows of it.

One file of bounded size in the data directory has the last 24 hours, so the history survives restarts. Each minute has
a record of 1 KiB of JSON at a fixed place. A record that a crash has torn is left out. The main process writes the
file, and any API process reads it.

The conditions are those of the rules in deploy/prometheus/alerts.yml, for servers that no Prometheus watches.
"""

import asyncio
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from slora.core.engine_state import EngineStats
from slora.core.errors import EngineUnavailable
from slora_api.core.foundation import Foundation
from slora_api.core.threads import control_thread
from slora_api.metrics.metrics import Metrics
from slora_api.usage.usage_shipper import UsageShipper

logger = logging.getLogger(__name__)

MINUTE_S = 60
NUM_MINUTES = 24 * 60
_RECORD_BYTES = 1024
# The kinds of failed answers with the most answers are listed in a record.
_MAX_FAILURES = 5
_MAX_ROUTE_CHARS = 60
_PATIENCE_S = 5.0
# Routes of tenants. Health checks, consoles and scrapes do not count as requests.
_TENANT_ROUTES = "/v1/"
_LIVE_ROUTE = "/v1/live"

Record = Mapping[str, Any]
# Upper bounds -> counts of values up to each, as Prometheus counts.
Buckets = Mapping[float, float]


class HistoryFile:
    """The file of records. path: it need not exist."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def allocate(self) -> None:
        """Gives the file its whole size, so that a disk that becomes full later does not stop the records. Raises
        OSError.
        """
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, NUM_MINUTES * _RECORD_BYTES)
        finally:
            os.close(descriptor)

    def write(self, record: Record) -> None:
        """Writes the record of the minute record["at"]. Raises OSError."""
        text = json.dumps(record, separators=(",", ":")).encode()
        for name in ("failing", "failures"):
            if len(text) >= _RECORD_BYTES:
                record = {**record, name: {}}
                text = json.dumps(record, separators=(",", ":")).encode()
        slot = int(record["at"]) // MINUTE_S % NUM_MINUTES
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, text.ljust(_RECORD_BYTES - 1) + b"\n", slot * _RECORD_BYTES)
        finally:
            os.close(descriptor)

    def read(self, since: float) -> list[Record]:
        """Returns the records of the minutes that began at `since` or later, oldest first."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        found = []
        for at in range(0, min(len(content), NUM_MINUTES * _RECORD_BYTES), _RECORD_BYTES):
            try:
                record = json.loads(content[at : at + _RECORD_BYTES].strip(b"\0 \n") or b"null")
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("at", 0) >= since:
                found.append(record)
        return sorted(found, key=lambda record: float(record["at"]))


def quantile(buckets: Buckets, share: float) -> float | None:
    """Returns a quantile of a histogram, interpolated within its bucket like Prometheus' histogram_quantile. None if
    there are no values.
    """
    total = buckets.get(float("inf"), 0.0)
    if total <= 0:
        return None
    bounds = sorted(buckets)
    for low, high in pairwise([0.0, *bounds]):
        below, up_to = buckets.get(low, 0.0), buckets[high]
        if up_to >= share * total:
            if high == float("inf"):
                return low
            inside = up_to - below
            return high if inside <= 0 else low + (high - low) * (share * total - below) / inside
    return None


def seconds_to_end(now: float) -> float:
    """Returns the seconds until the end of this minute, or of the next one if this one is as good as over: a sleep may
    end a moment early, and the minute that was just recorded must not be recorded again.
    """
    left = MINUTE_S - now % MINUTE_S
    return left if left > 1 else left + MINUTE_S


@dataclass(frozen=True, slots=True)
class _Counts:
    """What has been counted since the start: of the API processes by metric and labels, and of the engines."""

    api: Mapping[tuple[str, tuple[str, ...]], float]
    engine: EngineStats | None

    def since(self, earlier: "_Counts") -> "dict[tuple[str, tuple[str, ...]], float]":
        """Returns by how much the counts of the API have grown. A count that is smaller began again at 0."""
        grown = {}
        for key, value in self.api.items():
            before = earlier.api.get(key, 0.0)
            grown[key] = value - before if value >= before else value
        return grown


_HTTP = "slora_http_requests_total"
_FIRST_TOKEN = "vllm:time_to_first_token_seconds_bucket"
_QUEUE = "vllm:request_queue_time_seconds_bucket"
_STARTS = "slora_first_token_seconds_count"
_FAILED = "slora_tenant_failures_total"
_COUNTED: Mapping[str, tuple[str, ...]] = {
    _HTTP: ("route", "status"),
    _FIRST_TOKEN: ("le",),
    _QUEUE: ("le",),
    _STARTS: ("start",),
    _FAILED: ("status", "tenant"),
}


class HealthRecorder:
    """Writes a record for each minute. This runs in the main process of a host.

    metrics: counts of all API processes. restarts: how often each process died. is_ready: whether the server answers.
    clock: the Unix time.
    """

    def __init__(
        self,
        foundation: Foundation,
        metrics: Metrics,
        restarts: Mapping[str, int],
        is_ready: Callable[[], bool],
        shipper: UsageShipper,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._file = HistoryFile(foundation.data.history)
        self._metrics = metrics
        self._restarts = restarts
        self._known_restarts = Counter(restarts)
        self._is_ready = is_ready
        self._client = foundation.client
        self._reserve = foundation.reserve
        self._shipper = shipper
        self._clock = clock
        self._trouble = ""

    async def run(self) -> None:
        """Records at the end of each minute, until cancelled."""
        try:
            await control_thread(self._file.allocate)
        except OSError as error:
            logger.warning("there is no room for the history of the health: %s", error)
        last = await self.count()
        while True:
            await asyncio.sleep(seconds_to_end(self._clock()))
            last = await self.record(last)

    async def record(self, last: _Counts) -> _Counts:
        """Records the minute that has just ended. last: the counts at its beginning. Returns the present counts."""
        counts = await self.count()
        # A sleep may end a moment early.
        minute = (round(self._clock() / MINUTE_S) - 1) * MINUTE_S
        journal_bytes = await control_thread(self._shipper.measure_journal)
        record = {"at": minute, "journal_bytes": journal_bytes, **self._describe(last, counts)}
        try:
            await control_thread(self._file.write, record)
            self._trouble = ""
        except OSError as error:
            if (trouble := str(error)) != self._trouble:
                logger.warning("the health of this minute cannot be recorded: %s", trouble)
            self._trouble = trouble
        return counts

    async def count(self) -> _Counts:
        """Returns the present counts. Without an engine, those of the API processes alone."""
        engine = None
        try:
            async with asyncio.timeout(_PATIENCE_S):
                engine = await self._client.stats()
        except (EngineUnavailable, TimeoutError):
            pass
        return _Counts(await control_thread(self._metrics.read_counts, _COUNTED), engine)

    def _describe(self, last: _Counts, counts: _Counts) -> dict[str, Any]:
        grown = counts.since(last)
        first_token, queue = (
            {float(labels[0]): value for (name, labels), value in grown.items() if name == wanted}
            for wanted in (_FIRST_TOKEN, _QUEUE)
        )
        answers, failures = _sort_answers(grown)
        restarts = Counter(self._restarts)
        new_restarts, self._known_restarts = restarts - self._known_restarts, restarts
        disk = os.statvfs(self._reserve.directory)
        health = self._client.health
        described: dict[str, Any] = {
            "answers": answers,
            "failures": failures,
            "failing": _list_failing(grown),
            "first_token": _summarize(first_token),
            "queue_p95": _rounded(quantile(queue, 0.95)),
            "starts": {
                labels[0]: int(value) for (name, labels), value in grown.items() if name == _STARTS and value
            },
            "engines": [sum(health.values()), len(health)],
            "ready": self._is_ready(),
            "read_only": self._reserve.is_full,
            "disk_free": disk.f_bavail * disk.f_frsize,
            "ledger_lag": round(self._shipper.lag_s, 1),
            "restarts": dict(new_restarts),
        }
        if counts.engine is not None:
            described |= _describe_engine(last.engine, counts.engine)
        return described


def _sort_answers(
    grown: Mapping[tuple[str, tuple[str, ...]], float],
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the number of answers by status, and those of the failures with the most answers, by status and route."""
    answers: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for (name, labels), value in grown.items():
        if name != _HTTP or not value:
            continue
        route, status = labels
        if route.startswith(_TENANT_ROUTES) and route != _LIVE_ROUTE:
            answers[status] += int(value)
            if status >= "400":
                failures[f"{status} {route[:_MAX_ROUTE_CHARS]}"] += int(value)
    return dict(answers), dict(failures.most_common(_MAX_FAILURES))


def _list_failing(grown: Mapping[tuple[str, tuple[str, ...]], float]) -> dict[str, int]:
    """Returns the tenants with the most failed answers, as status and id of the tenant, with the number."""
    failing: Counter[str] = Counter()
    for (name, labels), value in grown.items():
        if name == _FAILED and value:
            failing[" ".join(labels)] += int(value)
    return dict(failing.most_common(_MAX_FAILURES))


def _describe_engine(last: EngineStats | None, now: EngineStats) -> dict[str, Any]:
    def grown(read: Callable[[EngineStats], float]) -> float:
        before = 0 if last is None else read(last)
        # An engine that was restarted counts from 0 again.
        return read(now) - before if read(now) >= before else read(now)

    bounds = (*now.token_gaps.bounds, float("inf"))
    gaps, total = {}, 0.0
    for at, bound in enumerate(bounds):
        total += grown(lambda stats, at=at: stats.token_gaps.counts[at])  # type: ignore[misc]
        gaps[bound] = total
    return {
        "gap": _summarize(gaps),
        "tokens": int(grown(lambda stats: stats.generated_tokens)),
        "prompt_tokens": int(grown(lambda stats: stats.prompt_tokens)),
        "running": now.running,
        "waiting": now.waiting,
        "pages": [now.pages_total - now.pages_free, now.pages_held, now.pages_total],
        "preemptions": int(
            grown(
                lambda stats: sum(n for kind, n in stats.preemptions_by_kind.items() if kind != "background")
            )
        ),
        "fetch_failures": int(
            grown(
                lambda stats: sum(
                    stats.fetches_by_outcome.get(outcome, 0) for outcome in ("unavailable", "corrupt")
                )
            )
        ),
        "not_finite": int(grown(lambda stats: stats.not_finite)),
        "pins_missing": now.pinned_adapters - now.pinned_loaded,
    }


def _summarize(buckets: Buckets) -> list[float | None]:
    """Returns p50, p95, p99 and the number of values."""
    shares = [_rounded(quantile(buckets, share)) for share in (0.5, 0.95, 0.99)]
    return [*shares, int(buckets.get(float("inf"), 0))]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def merge_records(records: Iterable[Record], step_s: int) -> list[dict[str, Any]]:
    """Merges the records of each interval of `step_s` seconds. Counts are added. Times are the largest, so that no bad
    minute is hidden, except medians, which are weighted means. States are those of the last minute, or the worst.
    """
    groups: dict[int, list[Record]] = {}
    for record in records:
        groups.setdefault(int(record["at"]) // step_s * step_s, []).append(record)
    return [{**merge(group), "at": at} for at, group in groups.items()]


_SUMS = ("tokens", "prompt_tokens", "preemptions", "fetch_failures", "not_finite")
_TABLES = ("answers", "failures", "failing", "starts", "restarts")
_LARGEST = ("queue_p95", "waiting", "running", "ledger_lag", "journal_bytes", "pins_missing")


def merge(group: Sequence[Record]) -> dict[str, Any]:
    """Merges records as `merge_records` does, of which there must be one at least. `at` is that of the first."""
    merged: dict[str, Any] = {"at": group[0]["at"], "minutes": len(group)}
    merged |= {name: sum(one.get(name, 0) for one in group) for name in _SUMS}
    for name in _TABLES:
        table: Counter[str] = Counter()
        for one in group:
            table.update(one.get(name, {}))
        merged[name] = dict(table)
    for name in _LARGEST:
        merged[name] = max((one[name] for one in group if one.get(name) is not None), default=None)
    for name in ("first_token", "gap"):
        merged[name] = _merge_times([one[name] for one in group if one.get(name)])
    merged["disk_free"] = min(one["disk_free"] for one in group)
    merged["pages"] = next((one["pages"] for one in reversed(group) if "pages" in one), None)
    merged["engines"] = min((one["engines"] for one in group), key=lambda engines: engines[0])
    merged["ready"] = all(one["ready"] for one in group)
    merged["read_only"] = any(one["read_only"] for one in group)
    return merged


def _merge_times(times: Sequence[Sequence[Any]]) -> list[Any]:
    counted = [one for one in times if one[3]]
    count = sum(one[3] for one in counted)
    if not count:
        return [None, None, None, 0]
    return [
        _rounded(sum(one[0] * one[3] for one in counted) / count),
        max(one[1] for one in counted),
        max(one[2] for one in counted),
        count,
    ]


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that needs a person. name: of the rule. minutes: how long it must hold, or the window that it counts.

    holds: whether it holds in the records of these minutes, which are not empty. must_last: whether there must be a
    record for each of these minutes.
    """

    name: str
    severity: str
    text: str
    minutes: int
    holds: Callable[[Sequence[Record]], bool]
    must_last: bool = True


def _always(test: Callable[[Record], bool]) -> Callable[[Sequence[Record]], bool]:
    return lambda records: all(map(test, records))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _server_errors(record: Record) -> float:
    answers = record["answers"]
    return _share(sum(n for status, n in answers.items() if status >= "500"), sum(answers.values()))


def _cold_share(records: Sequence[Record]) -> float:
    starts: Counter[str] = Counter()
    for record in records:
        starts.update(record["starts"])
    return _share(starts["cold"], starts["cold"] + starts["warm"])


def _held_pages(record: Record) -> float:
    pages = record.get("pages")
    return _share(pages[1], pages[2]) if pages else 0.0


def _restarts(records: Sequence[Record]) -> int:
    """Returns how often the process that died most often has died."""
    restarts: Counter[str] = Counter()
    for record in records:
        restarts.update(record["restarts"])
    return max(restarts.values(), default=0)


_CRITICAL: Sequence[tuple[str, int, str, Callable[[Record], bool]]] = (
    ("SloraNotReady", 2, "The engine or the loader is not connected.", lambda one: not one["ready"]),
    ("SloraReadOnly", 1, "The disk is full: uploads and changes are refused.", lambda one: one["read_only"]),
    ("SloraServerErrors", 5, "More than 5% of the answers are server errors.", lambda one: _server_errors(one) > 0.05),
    (
        "SloraUsageNotInLedger", 5, "Usage has not reached the database for more than 60 s.",
        lambda one: one["ledger_lag"] > 60,
    ),
    (
        "SloraUsageJournalLarge", 1, "The usage journal has more than 500 MB; at 1 GiB requests are refused.",
        lambda one: one["journal_bytes"] > 5e8,
    ),
)  # fmt: skip
_WARNINGS: Sequence[tuple[str, int, str, Callable[[Record], bool]]] = (
    (
        "SloraSlowFirstToken", 10, "5% of the requests wait more than 10 s for a token.",
        lambda one: (one["first_token"][1] or 0) > 10,
    ),
    (
        "SloraLongQueue", 10, "5% of the requests wait more than 5 s to be computed.",
        lambda one: (one["queue_p95"] or 0) > 5,
    ),
    ("SloraPoolFull", 10, "More than 97% of the page pool is in use.", lambda one: _held_pages(one) > 0.97),
    (
        "SloraPreemptions", 10, "More than 0.5 interactive sequences are preempted per second.",
        lambda one: one.get("preemptions", 0) > 0.5 * MINUTE_S,
    ),
    (
        "SloraAdapterFetchFailures", 5, "Adapters cannot be fetched from the store.",
        lambda one: one.get("fetch_failures", 0) > 0,
    ),
    ("SloraPinsMissing", 10, "Pinned adapters are not in the pool.", lambda one: one.get("pins_missing", 0) > 0),
)  # fmt: skip

CONDITIONS: Sequence[Condition] = (
    *(Condition(name, "critical", text, minutes, _always(test)) for name, minutes, text, test in _CRITICAL),
    Condition(
        "SloraProcessRestarts",
        "critical",
        "A process died more than twice in 15 minutes.",
        15,
        lambda records: _restarts(records) > 2,
        must_last=False,
    ),
    *(Condition(name, "warning", text, minutes, _always(test)) for name, minutes, text, test in _WARNINGS),
    Condition(
        "SloraCorruptedRequests",
        "warning",
        "Requests ended because their logits were not finite.",
        15,
        lambda records: any(one.get("not_finite", 0) > 0 for one in records),
        must_last=False,
    ),
    Condition(
        "SloraColdStarts",
        "warning",
        "More than 50% of the requests with adapters wait for the adapter.",
        15,
        lambda records: _cold_share(records) > 0.5,
    ),
)


def find_conditions(records: Sequence[Record], now: float) -> list[dict[str, Any]]:
    """Returns all conditions, and whether each holds now."""
    found = []
    for one in CONDITIONS:
        seen = [record for record in records if record["at"] >= now - (one.minutes + 1) * MINUTE_S]
        found.append(
            {
                "name": one.name,
                "severity": one.severity,
                "text": one.text,
                "minutes": one.minutes,
                "holds": len(seen) >= (one.minutes if one.must_last else 1) and one.holds(seen),
            }
        )
    return found
