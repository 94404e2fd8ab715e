"""Pages of the usage ledger as JSON or CSV, in the form of OpenAI's usage API.

A page has at most `limit` buckets and `MAX_RESULTS` results. A bucket with more results continues on the next page.
Buckets begin at multiples of their width (UTC).
"""

import base64
import csv
import io
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import Query
from typing_extensions import TypedDict

from slora_adapters.version import AdapterVersion
from slora_api.core.errors import BadRequest
from slora_api.usage.usage_ledger import DAY_S, HOUR_S, MINUTE_S, UsageFilter, UsageLedger, UsageRow

BucketWidth = Literal["1m", "1h", "1d"]

MAX_RESULTS = 2000
_WIDTHS: Mapping[BucketWidth, int] = {"1m": MINUTE_S, "1h": HOUR_S, "1d": DAY_S}
# The default and the maximum number of buckets on one page, by width, as in OpenAI's API. Even the largest number is
# below MAX_RESULTS, so a page without groups always fits.
_DEFAULT_BUCKETS: Mapping[int, int] = {MINUTE_S: 60, HOUR_S: 24, DAY_S: 7}
_MAX_BUCKETS: Mapping[int, int] = {MINUTE_S: 1440, HOUR_S: 168, DAY_S: 31}
# Name in `group_by` -> the ledger's column.
_GROUPS = {"tenant": "tenant", "api_key_id": "key_id", "model": "adapter"}
# The last second of the year 9999. ISO 8601 cannot represent later years.
_MAX_TIME = 253_402_300_799

# Finds the names of adapter versions, such as `voice@2`. Deleted versions are missing from the result.
FindNames = Callable[[Collection[AdapterVersion]], Mapping[AdapterVersion, str]]
# Finds the names of tenants. Of purged tenants, these are the last names.
FindTenantNames = Callable[[Collection[str]], Mapping[str, str]]


class UsageSums(TypedDict):
    """The sums of one group. Requests that combine several adapters form their own group, with the names and digests
    joined by `+`.

    tenant, tenant_id, api_key_id, model, adapter_digest: null unless `group_by` asks for them. tenant: the name; of a
    purged tenant the last one. The base model has no digest.

    num_batch_requests, batch_input_tokens, batch_output_tokens: the part of the sums that comes from lines of batches.
    billed_input_tokens, billed_output_tokens: the tokens to bill. A token of a batch counts as a fraction of a token,
    because it costs less.
    """

    tenant: str | None
    tenant_id: str | None
    api_key_id: str | None
    model: str | None
    adapter_digest: str | None
    num_model_requests: int
    input_tokens: int
    input_cached_tokens: int
    output_tokens: int
    adapter_bytes: int
    page_seconds: float
    num_batch_requests: int
    batch_input_tokens: int
    batch_output_tokens: int
    billed_input_tokens: float
    billed_output_tokens: float


class UsageResultObject(UsageSums):
    object: Literal["usage.result"]


class UsageBucketObject(TypedDict):
    """The usage from `start_time` up to, but not including, `end_time`. Both are Unix times in seconds."""

    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[UsageResultObject]


class UsagePageObject(TypedDict):
    """One page of a usage report. next_page: the value of the parameter `page` for the next request; null on the last
    page.
    """

    object: Literal["page"]
    data: list[UsageBucketObject]
    has_more: bool
    next_page: str | None


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A query of `GET /v1/usage` or `GET /admin/usage`. limit: the number of buckets on one page. after: the position
    after which the page begins.
    """

    asked: UsageFilter
    limit: int
    after: tuple[int | str, ...] | None = None

    def for_csv(self) -> "UsageQuery":
        """Returns the same query with the largest pages."""
        return replace(self, limit=_MAX_BUCKETS[self.asked.width])


@dataclass(frozen=True, slots=True)
class UsageParameters:
    """The query parameters of `GET /v1/usage` and `GET /admin/usage`. They have the names of OpenAI's usage API."""

    start_time: str | None = None
    end_time: str | None = None
    bucket_width: BucketWidth = "1d"
    group_by: Annotated[list[str] | None, Query()] = None
    limit: int | None = None
    page: str | None = None
    format: Literal["json", "csv"] = "json"

    def make_query(self, tenant: str | None, *, is_operator: bool) -> "UsageQuery":
        """Raises BadRequest naming the parameter. tenant: the tenant's id; None for all tenants."""
        seconds = _WIDTHS[self.bucket_width]
        most = _MAX_BUCKETS[seconds]
        if self.limit is not None and not 1 <= self.limit <= most:
            raise BadRequest(
                f"`limit` is {self.limit}; it must be from 1 to {most} for buckets of {self.bucket_width}.",
                "limit",
            )
        num_buckets = self.limit or _DEFAULT_BUCKETS[seconds]
        until = time.time() if self.end_time is None else _read_time(self.end_time, "end_time")
        end = math.ceil(until / seconds) * seconds
        if self.start_time is None:
            start = max(0, end - num_buckets * seconds)
        else:
            start = int(_read_time(self.start_time, "start_time") // seconds) * seconds
        if start >= end:
            raise BadRequest(
                f"`start_time` is {_show_time(start)}, which is not before the end, {_show_time(end)}.",
                "start_time",
            )
        groups = _read_groups(self.group_by or (), is_operator=is_operator)
        asked = UsageFilter(seconds, start, end, groups, tenant)
        return UsageQuery(asked, num_buckets, None if self.page is None else _read_cursor(self.page, asked))


@dataclass(frozen=True, slots=True)
class UsagePage:
    """The rows of the buckets from `start` to `end`. next_after: the `after` of the query for the next page; None if
    this is the last page.
    """

    start: int
    end: int
    rows: Sequence[UsageRow]
    next_after: tuple[int | str, ...] | None


# A token of a batch has half the price of any other token, as at OpenAI.
_BATCH_DISCOUNT = 0.5


class UsageReport:
    """Makes the pages of all reports.
    base_model: the name of the base model, as the reports show it.
    """

    def __init__(
        self,
        ledger: UsageLedger,
        find_names: FindNames,
        find_tenant_names: FindTenantNames,
        base_model: str,
    ) -> None:
        self._ledger = ledger
        self._find_names = find_names
        self._find_tenant_names = find_tenant_names
        self._base_model = base_model

    def read_page(self, query: UsageQuery) -> UsagePage:
        """Reads one page from the ledger. Blocks, and raises StoreUnavailable."""
        asked, after = query.asked, query.after
        start = asked.start if after is None else int(after[0])
        end = min(asked.end, start + query.limit * asked.width)
        # A cursor without a group is only the start of a bucket, so no rows are skipped.
        behind = after if after is not None and len(after) > 1 else None
        rows = self._ledger.read(replace(asked, start=start, end=end), behind, MAX_RESULTS + 1)
        if len(rows) > MAX_RESULTS:
            last = rows[MAX_RESULTS - 1]
            return UsagePage(start, last.start + asked.width, rows[:MAX_RESULTS], last.key(asked.group_by))
        return UsagePage(start, end, rows, (end,) if end < asked.end else None)

    def write_json(self, query: UsageQuery) -> bytes:
        """Returns one page as JSON. Blocks like `read_page`."""
        page, asked = self.read_page(query), query.asked
        names = self._read_names(page.rows, asked)
        results: dict[int, list[UsageResultObject]] = {
            start: [{"object": "usage.result", **self._result(row, asked, names)} for row in rows]
            for start, rows in groupby(page.rows, key=lambda row: row.start)
        }
        buckets: list[UsageBucketObject] = [
            {
                "object": "bucket",
                "start_time": start,
                "end_time": start + asked.width,
                "results": results.get(start, []),
            }
            for start in range(page.start, page.end, asked.width)
        ]
        next_page = None if page.next_after is None else _write_cursor(page.next_after)
        body: UsagePageObject = {
            "object": "page",
            "data": buckets,
            "has_more": next_page is not None,
            "next_page": next_page,
        }
        return json.dumps(body, separators=(",", ":")).encode()

    def write_csv(self, query: UsageQuery, *, with_header: bool) -> tuple[bytes, UsageQuery | None]:
        """Returns the lines of one page, and the query of the next page or None. Blocks like `read_page`."""
        page, asked = self.read_page(query), query.asked
        names = self._read_names(page.rows, asked)
        text = io.StringIO()
        writer = csv.writer(text)
        if with_header:
            writer.writerow(_columns(asked))
        # Names of tenants and adapters begin with a letter or digit, so a spreadsheet does not take them for formulas.
        for row in page.rows:
            times = _show_time(row.start), _show_time(row.start + asked.width)
            writer.writerow([*times, *self._cells(row, asked, names)])
        following = None if page.next_after is None else replace(query, after=page.next_after)
        return text.getvalue().encode(), following

    def _read_names(self, rows: Sequence[UsageRow], asked: UsageFilter) -> "_Names":
        versions = {version for row in rows for version in _versions(row, asked)}
        tenants = {row.tenant for row in rows if row.tenant is not None}
        return _Names(
            self._find_names(versions) if versions else {},
            self._find_tenant_names(tenants) if tenants else {},
        )

    def _result(self, row: UsageRow, asked: UsageFilter, names: "_Names") -> UsageSums:
        usage, batch = row.usage, row.batch
        return {
            "tenant": None if row.tenant is None else names.tenants.get(row.tenant, row.tenant),
            "tenant_id": row.tenant,
            "api_key_id": row.key_id,
            "model": self._model(row, asked, names.adapters),
            "adapter_digest": "+".join(_digests(row)) or None,
            "num_model_requests": row.num_requests,
            "input_tokens": usage.prompt_tokens,
            "input_cached_tokens": usage.cached_tokens,
            "output_tokens": usage.generated_tokens,
            "adapter_bytes": usage.adapter_bytes,
            "page_seconds": usage.page_seconds,
            "num_batch_requests": batch.num_requests,
            "batch_input_tokens": batch.prompt_tokens,
            "batch_output_tokens": batch.generated_tokens,
            "billed_input_tokens": usage.prompt_tokens - _BATCH_DISCOUNT * batch.prompt_tokens,
            "billed_output_tokens": usage.generated_tokens - _BATCH_DISCOUNT * batch.generated_tokens,
        }

    def _cells(self, row: UsageRow, asked: UsageFilter, names: "_Names") -> Iterator[Any]:
        result: Mapping[str, Any] = self._result(row, asked, names)
        return (result[name] for name in _columns(asked)[2:])

    def _model(self, row: UsageRow, asked: UsageFilter, names: Mapping[AdapterVersion, str]) -> str | None:
        if row.adapter is None:
            return None
        found = [names.get(version) for version in _versions(row, asked)]
        known = [name for name in found if name is not None]
        if len(known) < len(found):
            return None
        return "+".join(known) or self._base_model


class _Names(NamedTuple):
    adapters: Mapping[AdapterVersion, str]
    tenants: Mapping[str, str]


def _columns(asked: UsageFilter) -> list[str]:
    """Returns the columns of the CSV: times, groups and sums."""
    shown = {
        "tenant": "tenant" in asked.group_by,
        "tenant_id": "tenant" in asked.group_by,
        "api_key_id": "key_id" in asked.group_by,
        "model": "adapter" in asked.group_by,
        "adapter_digest": "adapter" in asked.group_by,
    }
    groups = [name for name, is_shown in shown.items() if is_shown]
    sums = ["num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens"]
    sums += [
        "adapter_bytes",
        "page_seconds",
        "num_batch_requests",
        "batch_input_tokens",
        "batch_output_tokens",
    ]
    return ["start_time", "end_time", *groups, *sums, "billed_input_tokens", "billed_output_tokens"]


def _digests(row: UsageRow) -> list[str]:
    """Returns the digests of a row's adapters: several for requests that combine adapters, none for the base model."""
    return row.adapter.split("+") if row.adapter else []


def _versions(row: UsageRow, asked: UsageFilter) -> list[AdapterVersion]:
    if not row.adapter:
        return []
    tenant = row.tenant if asked.tenant is None else asked.tenant
    assert tenant is not None, "sums by adapter are filtered or grouped by tenant"
    return [AdapterVersion(tenant, digest) for digest in _digests(row)]


def _read_groups(group_by: Sequence[str], *, is_operator: bool) -> tuple[str, ...]:
    """Returns the ledger's columns for the names in `group_by`. For an operator, sums by model are also grouped by
    tenant, because an adapter version belongs to one tenant.
    """
    known = {name: column for name, column in _GROUPS.items() if is_operator or name != "tenant"}
    columns = set()
    for name in (part.strip() for text in group_by for part in text.split(",")):
        if name not in known:
            accepted = " and ".join([", ".join([*known][:-1]), [*known][-1]])
            raise BadRequest(f"`group_by` has {name[:64]!r}; it accepts {accepted}.", "group_by")
        columns.add(known[name])
    if is_operator and "adapter" in columns:
        columns.add("tenant")
    return tuple(column for column in _GROUPS.values() if column in columns)


def _read_time(text: str, param: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise BadRequest(
                f"`{param}` is {text[:64]!r}; it must be a Unix time in seconds, or a time in ISO 8601 such as "
                "2026-11-01T00:00:00Z.",
                param,
            ) from None
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not 0 <= seconds <= _MAX_TIME:
        raise BadRequest(f"`{param}` is {text[:64]}; it must be from 0 to {_MAX_TIME}.", param)
    return seconds


def _show_time(seconds: int) -> str:
    if seconds > _MAX_TIME:  # The end of the last bucket is in the year 10000, which ISO 8601 cannot show.
        seconds = _MAX_TIME
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _write_cursor(after: Sequence[int | str]) -> str:
    return base64.urlsafe_b64encode(json.dumps(after, separators=(",", ":")).encode()).decode().rstrip("=")


def _read_cursor(page: str, asked: UsageFilter) -> tuple[int | str, ...]:
    try:
        found = json.loads(base64.b64decode(page + "=" * (-len(page) % 4), "-_", validate=True))
    except ValueError:
        found = None
    if (
        not isinstance(found, list)
        or len(found) not in (1, 1 + len(asked.group_by))
        or type(found[0]) is not int
        or not all(isinstance(name, str) for name in found[1:])
        or not (asked.start <= found[0] < asked.end and found[0] % asked.width == 0)
    ):
        raise BadRequest(
            "`page` is not the `next_page` of an answer to the same query; omit it to get the first page.",
            "page",
        )
    return tuple(found)
