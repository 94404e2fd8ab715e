"""The usage ledger in the database: the usage of each request, and the sums by minute, hour and day.

A record is added only once, however often it is sent. The request id is the primary key of a record. New records are
added to the sums, in the same transaction.

A request may have several records with different usage: if an engine loses its connection, it records the usage so far,
and another engine continues the request. The ledger keeps the largest usage, whichever record comes first, and adds the
difference to the sums. It keeps the time of the first record.

After the retention, `delete_old` deletes records and the sums
by minute and hour. The sums by day stay.

Every call blocks, so an event loop should make it on a thread.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add, attrgetter
from typing import Any, NamedTuple

from sqlalchemy import Select, Table, bindparam, delete, func, select, tuple_, union_all, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from slora.core.request import RequestUsage
from slora.core.usage_journal import UsageRecord
from slora_adapters.database import schema
from slora_adapters.database.database import Database

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
_WIDTHS = (MINUTE_S, HOUR_S, DAY_S)
_SUMS = ("prompt_tokens", "cached_tokens", "generated_tokens", "adapter_bytes", "page_seconds")
# The columns with the usage of batch lines. The other columns include this usage.
_BATCH_SUMS = ("batch_requests", "batch_prompt_tokens", "batch_generated_tokens")
# The name of a lock, so that only one process at a time deletes old rows.
_RETENTION = "usage retention"
# The maximum number of rows deleted in one transaction. Other writers then wait only for milliseconds.
_DELETED_AT_ONCE = 2000

_r, _b = schema.usage_records.c, schema.usage_buckets.c
# Each dialect has its own class for INSERT ... ON CONFLICT.
_INSERT: Mapping[str, Callable[[Table], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}
_BUCKET_KEY = (_b.width, _b.tenant, _b.start, _b.key_id, _b.adapter)
_read_sums = attrgetter(*_SUMS)
# Of two usages of one request, the larger by this order is kept. A continued request repeats earlier usage, so it is
# larger. The order is total, so the result does not depend on the order of arrival.
_rank_usage = attrgetter(
    "generated_tokens", "prompt_tokens", "cached_tokens", "adapter_bytes", "page_seconds"
)
_KNOWN_RECORDS = (
    select(schema.usage_records)
    .where(_r.request_id.in_(bindparam("request_ids", expanding=True)))
    .order_by(_r.request_id)
    .with_for_update()
)
_CORRECT_RECORD = (
    update(schema.usage_records)
    .where(_r.request_id == bindparam("id"))
    .values({name: bindparam(f"new_{name}") for name in (*_SUMS, "is_complete")})
)
_OLD_RECORDS = delete(schema.usage_records).where(
    _r.request_id.in_(select(_r.request_id).where(_r.ended_at < bindparam("before")).limit(_DELETED_AT_ONCE))
)
_ERASED_KEYS = select(schema.erased_keys.c.key_id).where(
    schema.erased_keys.c.key_id.in_(bindparam("key_ids", expanding=True))
)
# Deletes a batch of one tenant's records, in the order of the primary key.
_RECORDS_OF_TENANT = (
    delete(schema.usage_records)
    .where(
        _r.request_id.in_(
            select(_r.request_id)
            .where(_r.tenant == bindparam("tenant"), _r.request_id > bindparam("after"))
            .order_by(_r.request_id)
            .limit(_DELETED_AT_ONCE)
        )
    )
    .returning(_r.request_id)
)
_OLD_BUCKETS = delete(schema.usage_buckets).where(
    tuple_(*_BUCKET_KEY).in_(
        select(*_BUCKET_KEY)
        .where(_b.width.in_((MINUTE_S, HOUR_S)), _b.start < bindparam("before"))
        .limit(_DELETED_AT_ONCE)
    )
)


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Selects the sums to read: the buckets of `width` seconds that start in [start, end), of one tenant or of all
    tenants.

    group_by: the columns by which sums are grouped. Any of `tenant`, `key_id` and `adapter`, in this order.
    """

    width: int
    start: int
    end: int
    group_by: tuple[str, ...] = ()
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class BatchUsage:
    """The part of a sum that batch lines contributed."""

    num_requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class UsageRow:
    """The sum of one group in one bucket. tenant, key_id, adapter: None unless the rows are grouped by this column.
    adapter: the digest; empty for the base model.
    """

    start: int
    num_requests: int
    usage: RequestUsage
    tenant: str | None = None
    key_id: str | None = None
    adapter: str | None = None
    batch: BatchUsage = BatchUsage()

    def key(self, group_by: Iterable[str]) -> tuple[int | str, ...]:
        """Returns the sort key of the row, for the order of `UsageLedger.read`."""
        return (self.start, *(getattr(self, name) for name in group_by))


class UsageLedger:
    """Reads and writes the ledger. Methods may be called from several threads. They raise StoreUnavailable or
    DiskFull.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def check(self) -> None:
        """Raises the error that `add` would raise now: StoreUnavailable or DiskFull."""
        with self._database.transaction():
            pass

    def add(self, records: Sequence[UsageRecord]) -> int:
        """Adds the records that the ledger does not have yet, in one transaction. Returns their number. A record of a
        known request replaces its usage if it has more. Drops records of keys whose usage was erased.
        """
        # Sort the records, because concurrent transactions that lock rows in different orders could deadlock.
        rows: dict[str, UsageRecord] = {}
        for record in sorted(records, key=lambda one: one.request_id):
            kept = rows.setdefault(record.request_id, record)
            if _rank_usage(record.usage) > _rank_usage(kept.usage):
                rows[record.request_id] = record
        if not rows:
            return 0
        with self._database.transaction() as connection:
            key_ids = {"key_ids": sorted({record.account for record in rows.values()})}
            erased = set(connection.execute(_ERASED_KEYS, key_ids).scalars())
            rows = {name: record for name, record in rows.items() if record.account not in erased}
            if not rows:
                return 0
            make_insert = _INSERT[connection.dialect.name]
            statement = make_insert(schema.usage_records).on_conflict_do_nothing().returning(_r.request_id)
            new = connection.execute(statement, [_record_row(one) for one in rows.values()]).scalars().all()
            amounts = [_count_record(rows[request_id]) for request_id in new]
            known = rows.keys() - set(new)
            amounts += _correct_records(connection, [rows[request_id] for request_id in sorted(known)])
            if amounts:
                _add_to_buckets(connection, amounts)
            return len(new)

    def used_tokens(self, tenant: str, key_id: str | None, since: float) -> int:
        """Returns the tokens (prompt plus generated) that a tenant, or one of its keys, has used since the beginning of
        the minute that contains the Unix time `since`.

        If the day of `since` is older than the retention, tokens of that day may be missing.
        """
        day = _round_up(since, DAY_S)
        hour = min(_round_up(since, HOUR_S), day)
        minute = int(since // MINUTE_S) * MINUTE_S
        ranges = ((MINUTE_S, minute, hour), (HOUR_S, hour, day), (DAY_S, day, None))
        parts = [_tokens_in(tenant, key_id, *one) for one in ranges if one[1] != one[2]]
        return sum(int(tokens or 0) for (tokens,) in self._database.read(union_all(*parts)))

    def read(self, asked: UsageFilter, after: Sequence[int | str] | None, limit: int) -> Sequence[UsageRow]:
        """Returns up to `limit` rows, sorted by start and group. after: the `UsageRow.key` of the last row of the
        previous page.
        """
        groups = [_b[name] for name in asked.group_by]
        query = (
            select(
                _b.start,
                *groups,
                *(func.sum(_b[name]) for name in ("num_requests", *_SUMS, *_BATCH_SUMS)),
            )
            .where(_b.width == asked.width, _b.start >= asked.start, _b.start < asked.end)
            .group_by(_b.start, *groups)
            .order_by(_b.start, *groups)
            .limit(limit)
        )
        if asked.tenant is not None:
            query = query.where(_b.tenant == asked.tenant)
        if after is not None:
            query = query.where(tuple_(_b.start, *groups) > tuple_(*after))
        return [_read_row(row, asked.group_by) for row in self._database.read(query)]

    def erase(self, tenant: str) -> int:
        """Deletes all records and sums of a tenant. If records of the tenant's keys arrive later, `add` drops them.
        Returns the number of deleted records.
        """
        with self._database.transaction(_RETENTION, even_if_full=True) as connection:
            make_insert = _INSERT[connection.dialect.name]
            keys = select(schema.api_keys.c.key_id).where(schema.api_keys.c.tenant == tenant)
            marked = make_insert(schema.erased_keys).from_select(["key_id"], keys)
            connection.execute(marked.on_conflict_do_nothing())
        num_erased, after = 0, ""
        while True:
            with self._database.transaction(_RETENTION, even_if_full=True) as connection:
                parameters = {"tenant": tenant, "after": after}
                gone = connection.execute(_RECORDS_OF_TENANT, parameters).scalars().all()
                if not gone:
                    own = delete(schema.usage_buckets).where(_b.width.in_(_WIDTHS), _b.tenant == tenant)
                    connection.execute(own)
                    return num_erased
            num_erased, after = num_erased + len(gone), max(gone)

    def delete_old(self, before: float) -> bool:
        """Deletes a limited number of old records, and of old sums by minute and hour. Old means before the UTC day of
        `before`. Returns whether more old rows may be left.
        """
        parameters = {"before": int(before // DAY_S) * DAY_S}
        with self._database.transaction(_RETENTION, even_if_full=True) as connection:
            counts = [connection.execute(one, parameters).rowcount for one in (_OLD_RECORDS, _OLD_BUCKETS)]
        return max(counts) >= _DELETED_AT_ONCE


def _record_row(record: UsageRecord) -> dict[str, Any]:
    return {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "key_id": record.account,
        "adapter": record.adapter_digest or "",
        "ended_at": record.ended_at,
        "is_complete": record.is_complete,
        "is_batch": record.is_batch,
        **{name: getattr(record.usage, name) for name in _SUMS},
    }


def _correct_records(connection: Connection, records: Sequence[UsageRecord]) -> "list[_Amounts]":
    """Replaces the usage of known records if the given usage is larger. Returns the differences."""
    if not records:
        return []
    given = {record.request_id: record for record in records}
    differences, changes = [], []
    for known in connection.execute(_KNOWN_RECORDS, {"request_ids": list(given)}):
        record = given[known.request_id]
        if _rank_usage(record.usage) <= _rank_usage(known):
            continue
        usage = [new - old for new, old in zip(_read_sums(record.usage), _read_sums(known), strict=True)]
        minute = int(known.ended_at // MINUTE_S) * MINUTE_S
        differences.append(
            _make_amounts(
                (known.tenant, minute, known.key_id, known.adapter), 0, usage, is_batch=known.is_batch
            )
        )
        values = {name: getattr(record.usage, name) for name in _SUMS} | {"is_complete": record.is_complete}
        changes.append({"id": known.request_id} | {f"new_{name}": value for name, value in values.items()})
    if changes:
        connection.execute(_CORRECT_RECORD, changes)
    return differences


class _Amounts(NamedTuple):
    """What one record adds to the sums. bucket: tenant, start of the minute, key and adapter. values: one for each
    column of the sums.
    """

    bucket: tuple[str, int, str, str]
    values: tuple[float, ...]


def _count_record(record: UsageRecord) -> _Amounts:
    minute = int(record.ended_at // MINUTE_S) * MINUTE_S
    bucket = (record.tenant, minute, record.account, record.adapter_digest or "")
    return _make_amounts(bucket, 1, _read_sums(record.usage), is_batch=record.is_batch)


def _make_amounts(
    bucket: tuple[str, int, str, str], num_requests: int, usage: Sequence[float], *, is_batch: bool
) -> _Amounts:
    prompt_tokens, _, generated_tokens, *_ = usage
    of_batch = (num_requests, prompt_tokens, generated_tokens) if is_batch else (0, 0, 0)
    return _Amounts(bucket, (num_requests, *usage, *of_batch))


def _add_to_buckets(connection: Connection, amounts: Iterable[_Amounts]) -> None:
    columns = ("num_requests", *_SUMS, *_BATCH_SUMS)
    of_minutes: defaultdict[tuple[Any, ...], list[tuple[float, ...]]] = defaultdict(list)
    for bucket, values in amounts:
        of_minutes[bucket].append(values)
    sums: defaultdict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0] * len(columns))
    for (tenant, minute, *others), amounts_of_minute in of_minutes.items():
        of_minute = [sum(column) for column in zip(*amounts_of_minute, strict=True)]
        for width in _WIDTHS:
            of_bucket = sums[width, tenant, minute // width * width, *others]
            of_bucket[:] = map(add, of_bucket, of_minute)
    names = [column.name for column in _BUCKET_KEY] + [*columns]
    insert = _INSERT[connection.dialect.name](schema.usage_buckets)
    added = {name: _b[name] + insert.excluded[name] for name in columns}
    statement = insert.on_conflict_do_update(index_elements=_BUCKET_KEY, set_=added)
    rows = [dict(zip(names, (*key, *values), strict=True)) for key, values in sorted(sums.items())]
    connection.execute(statement, rows)


def _tokens_in(tenant: str, key_id: str | None, width: int, start: int, end: int | None) -> Select[Any]:
    query = select(func.sum(_b.prompt_tokens + _b.generated_tokens)).where(
        _b.width == width, _b.tenant == tenant, _b.start >= start
    )
    if key_id is not None:
        query = query.where(_b.key_id == key_id)
    return query if end is None else query.where(_b.start < end)


def _read_row(row: Sequence[Any], group_by: Sequence[str]) -> UsageRow:
    start, *others = row
    groups, sums = others[: len(group_by)], others[len(group_by) :]
    num_requests, prompt, cached, generated, adapter_bytes, page_seconds, *of_batch = sums
    # PostgreSQL returns the sum of integers as a Decimal.
    usage = RequestUsage(int(prompt), int(cached), int(generated), int(adapter_bytes), float(page_seconds))
    batch = BatchUsage(*map(int, of_batch))
    return UsageRow(start, int(num_requests), usage, batch=batch, **dict(zip(group_by, groups, strict=True)))


def _round_up(seconds: float, width: int) -> int:
    return -int(-seconds // width) * width
