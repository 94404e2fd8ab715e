"""The registry's tables: SQL statements, and the conversion between rows and values.

Functions with a `connection` argument run inside a transaction that the caller has begun. This module makes no
decisions: `record.py` and `registry.py` decide what is written, and when.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import (
    BindParameter,
    FromClause,
    Select,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.engine import Connection
from sqlalchemy.sql import Executable

from slora_adapters.database import schema
from slora_adapters.registry.record import (
    LATEST,
    NO_EXTRAS,
    AdapterDetails,
    AdapterRecord,
    Alias,
    AliasHistory,
    AliasState,
    ExtrasSummary,
    NamedAdapter,
    Rollout,
    StorageUsage,
    decode_states,
    encode_states,
    make_rollout,
)
from slora_adapters.version import AdapterVersion

# Tenant and name, which together identify a `NamedAdapter`.
NameKey = tuple[str, str]
Row = Sequence[Any]
# Runs a query, inside or outside a transaction.
Read = Callable[[Executable, Mapping[str, Any]], Iterable[Row]]

_names, _versions, _extras = schema.adapter_names, schema.adapter_versions, schema.adapter_extras
_aliases, _targets = schema.adapter_aliases, schema.adapter_alias_targets

# NO_LIMIT: the value of `most` for no limit. BEHIND_ALL: a number greater than every version number.
NO_LIMIT, BEHIND_ALL = 2**62, 2**62

_v, _n = _versions.c, _names.c
_VERSION_COLUMNS = (
    *(_v.tenant, _v.name, _v.number, _n.created_at.label("named_at"), _v.created_at, _v.digest, _v.rank),
    *(_v.target_modules, _v.num_bytes, _v.packed_bytes, _v.blob_bytes, _v.template_bytes),
    *(_v.defaults_bytes, _v.extras_digest),
)
_tenant: BindParameter[str] = bindparam("tenant")
_name: BindParameter[str] = bindparam("name")
_most: BindParameter[int] = bindparam("most")


def _of_name(table: FromClause) -> Any:
    return and_(table.c.tenant == _tenant, table.c.name == _name)


_VERSIONS = (
    select(*_VERSION_COLUMNS)
    .join_from(_versions, _names, and_(_n.tenant == _v.tenant, _n.name == _v.name))
    .where(_of_name(_versions))
)
ONE_VERSION = _VERSIONS.where(_v.number == bindparam("number"))
VERSION_PAGE = _VERSIONS.where(_v.number < bindparam("before")).order_by(_v.number.desc()).limit(_most)
NEWEST = _VERSIONS.order_by(_v.number.desc()).limit(1)
_NEWEST_TWO = _VERSIONS.order_by(_v.number.desc()).limit(2)
_SOME_VERSIONS = _VERSIONS.where(_v.number.in_(bindparam("numbers", expanding=True)))
EXTRAS = select(_extras.c.chat_template, _extras.c.generation_config).where(
    _of_name(_extras), _extras.c.number == bindparam("number"), _extras.c.digest == bindparam("digest")
)

# This query reads only a covering index. See `StorageUsage`.
_held = (
    select(
        _v.digest,
        func.max(func.coalesce(_v.blob_bytes, _v.num_bytes)).label("weights"),
        func.count().label("num_versions"),
        func.sum(func.coalesce(_v.template_bytes, 0) + func.coalesce(_v.defaults_bytes, 0)).label("extras"),
    )
    .where(_v.tenant == _tenant)
    .group_by(_v.digest)
    .subquery("held")
)
STORAGE_USAGE = select(
    func.coalesce(func.sum(_held.c.num_versions), 0),
    func.coalesce(func.sum(_held.c.weights + _held.c.extras), 0),
    func.max(_held.c.weights).filter(_held.c.digest == bindparam("digest")),
)
_usage = STORAGE_USAGE.subquery("usage")
_newest = NEWEST.subquery("newest")
# The usage of a tenant and the newest version of a name, from one snapshot.
BEFORE_PUSH = select(*_usage.c, *_newest.c).select_from(_usage.outerjoin(_newest, true()))
_NUM_USAGE_COLUMNS = 3


def _rollouts_of(aliases: FromClause) -> Select[Any]:
    """Returns a query for aliases together with the versions that they point at (rollouts).

    aliases: the table of aliases, or a subquery with its columns.

    The result has one row for each version that an alias points at. A single query reads the alias and its versions, so
    both come from the same snapshot.
    """
    a, t = aliases.c, _targets.c
    return (
        select(a.alias, a.follows_pushes, a.salt, a.pinned, a.updated_at, t.percent, *_VERSION_COLUMNS)
        .join_from(aliases, _targets, and_(t.tenant == a.tenant, t.name == a.name, t.alias == a.alias))
        .join(_versions, and_(_v.tenant == t.tenant, _v.name == t.name, _v.number == t.number))
        .join(_names, and_(_n.tenant == t.tenant, _n.name == t.name))
        .order_by(a.tenant, a.name, a.alias, t.number)
    )


_a = _aliases.c
_NUM_ALIAS_COLUMNS = 6
OF_NAME = _rollouts_of(_aliases).where(_of_name(_aliases))
ONE_ROLLOUT = OF_NAME.where(_a.alias == bindparam("alias"))
PINNED = _rollouts_of(_aliases).where(_a.pinned)

# Each query returns one page of a list. The query uses the index of the primary key to begin after a given key, even if
# that key was deleted. So the cost hardly depends on the position of the page or on the table size.
_name_page = (
    select(_n.tenant, _n.name)
    .where(_n.tenant == _tenant, _n.name > bindparam("after"))
    .order_by(_n.name)
    .limit(_most)
    .subquery("page")
)
_latest = (
    select(*_aliases.c)
    .join_from(
        _name_page,
        _aliases,
        and_(_a.tenant == _name_page.c.tenant, _a.name == _name_page.c.name, _a.alias == LATEST),
    )
    .subquery("own")
)
NAMES = _rollouts_of(_latest)
_owners = schema.tenants.c
# `pattern` must match a part of the adapter's name or of its tenant's name.
_found_page = (
    select(*_aliases.c)
    .join_from(_aliases, schema.tenants, _owners.tenant_id == _a.tenant)
    .where(
        _a.alias == LATEST,
        tuple_(_a.tenant, _a.name) > tuple_(bindparam("after_tenant"), bindparam("after")),
        or_(
            _a.name.like(bindparam("pattern"), escape="/"),
            _owners.name.like(bindparam("pattern"), escape="/"),
        ),
    )
    .order_by(_a.tenant, _a.name)
    .limit(_most)
    .subquery("own")
)
FOUND_PAGE = _rollouts_of(_found_page)
_alias_page = (
    select(*_aliases.c)
    .where(
        _a.tenant == _tenant,
        tuple_(_a.name, _a.alias) > tuple_(bindparam("after"), bindparam("after_alias")),
    )
    .order_by(_a.name, _a.alias)
    .limit(_most)
    .subquery("own")
)
ALIASES = _rollouts_of(_alias_page)
_pinned_page = (
    select(*_aliases.c)
    .where(
        _a.pinned,
        tuple_(_a.tenant, _a.name, _a.alias)
        > tuple_(bindparam("after_tenant"), bindparam("after"), bindparam("after_alias")),
    )
    .order_by(_a.tenant, _a.name, _a.alias)
    .limit(_most)
    .subquery("own")
)
PINNED_PAGE = _rollouts_of(_pinned_page)

_FIND_NAME = select(_n.created_at, _n.last_number).where(_of_name(_names))
_FIND_ALIASES = select(_a.alias, _a.follows_pushes, _a.history, _a.salt, _a.pinned, _a.updated_at).where(
    _of_name(_aliases)
)
_FIND_TARGETS = (
    select(_targets.c.alias, _targets.c.number, _targets.c.percent)
    .where(_of_name(_targets))
    .order_by(_targets.c.number)
)

# Queries for some weights of any tenants. At most this many are asked for at once: SQLite accepts 32,766 parameters.
_VERSIONS_AT_ONCE = 1000
# SQLite finds rows of pairs only by a scan, and rows of digests by the index.
_is_wanted = and_(
    _v.digest.in_(bindparam("digests", expanding=True)),
    tuple_(_v.tenant, _v.digest).in_(bindparam("versions", expanding=True)),
)
NAMED = select(_v.tenant, _v.digest).where(_is_wanted).distinct()
NUMBERS_OF = (
    select(_v.tenant, _v.digest, _v.name, _v.number)
    .where(_is_wanted)
    .order_by(_v.created_at, _v.name, _v.number)
)
_t = _targets.c
REFERENCES_TO = (
    select(_v.tenant, _v.digest, _v.name, _v.number, _t.alias)
    .select_from(
        _versions.outerjoin(
            _targets,
            and_(_t.tenant == _v.tenant, _t.name == _v.name, _t.number == _v.number, _t.percent > 0),
        )
    )
    .where(_is_wanted)
)


def read_record(row: Row) -> AdapterRecord:
    tenant, name, number, named_at, created_at, digest, rank, modules, *sizes = row
    num_bytes, packed_bytes, blob_bytes, *extras = sizes
    details = AdapterDetails(rank, tuple(json.loads(modules)), num_bytes, packed_bytes, blob_bytes)
    version = AdapterVersion(tenant, digest)
    return AdapterRecord(name, number, version, details, ExtrasSummary(*extras), created_at, named_at)


def read_rollouts(rows: Iterable[Row]) -> list[Rollout]:
    """Converts the result of a `_rollouts_of` query to rollouts."""
    found = []
    first = _NUM_ALIAS_COLUMNS
    for _, group in groupby(rows, key=lambda row: (row[first], row[first + 1], row[0])):
        own = list(group)
        alias, follows_pushes, salt, pinned, updated_at, _ = own[0][:first]
        records = {record.number: record for record in (read_record(row[first:]) for row in own)}
        percents = (row[first - 1] for row in own)
        state = AliasState(dict(zip(records, percents, strict=True)), follows_pushes)
        found.append(make_rollout(Alias(AliasHistory(state), salt, pinned, updated_at), alias, records))
    return found


def read_usage(row: Row) -> StorageUsage:
    """Converts a row of STORAGE_USAGE. PostgreSQL's sums are decimals."""
    num_versions, num_bytes, weights_bytes = row
    weights = None if weights_bytes is None else int(weights_bytes)
    return StorageUsage(int(num_versions), int(num_bytes), weights)


def read_before_push(row: Row) -> tuple[AdapterRecord | None, StorageUsage]:
    newest = row[_NUM_USAGE_COLUMNS:]
    return None if newest[0] is None else read_record(newest), read_usage(row[:_NUM_USAGE_COLUMNS])


def read_of_versions(
    read: Read, statement: Executable, versions: Collection[AdapterVersion]
) -> Iterator[tuple[AdapterVersion, Row]]:
    """Runs NAMED, NUMBERS_OF or REFERENCES_TO for any number of weights. Yields the weights and the other columns."""
    keys = sorted((version.tenant, version.digest) for version in versions)
    for start in range(0, len(keys), _VERSIONS_AT_ONCE):
        piece = keys[start : start + _VERSIONS_AT_ONCE]
        wanted = {"versions": piece, "digests": sorted({digest for _, digest in piece})}
        for tenant, digest, *rest in read(statement, wanted):
            yield AdapterVersion(tenant, digest), rest


def load_name(connection: Connection, key: NameKey, needed: Collection[int] | None) -> NamedAdapter:
    """Loads one name.

    needed: the version numbers to read in addition to those that `NamedAdapter.records` always has. None reads all
    versions.
    """
    own = {"tenant": key[0], "name": key[1]}
    row = connection.execute(_FIND_NAME, own).fetchone()
    if row is None:
        return NamedAdapter(*key)
    targets: dict[str, dict[int, int]] = {}
    for alias, number, percent in connection.execute(_FIND_TARGETS, own):
        targets.setdefault(alias, {})[number] = percent
    aliases = {
        alias: Alias(
            AliasHistory(AliasState(targets[alias], follows_pushes), decode_states(history)),
            salt,
            pinned,
            updated_at,
        )
        for alias, follows_pushes, history, salt, pinned, updated_at in connection.execute(_FIND_ALIASES, own)
    }
    if needed is None:
        rows = connection.execute(_VERSIONS, own).fetchall()
    else:
        near = (number for alias in aliases.values() for number in alias.history.near_targets())
        numbers = {*needed, *near}
        rows = [*connection.execute(_NEWEST_TWO, own)]
        rows += connection.execute(_SOME_VERSIONS, {**own, "numbers": sorted(numbers)})
    records = {record.number: record for record in map(read_record, rows)}
    named_at, last_number = row
    return NamedAdapter(*key, named_at, last_number, records, aliases)


def save_name(connection: Connection, before: NamedAdapter, after: NamedAdapter) -> None:
    """Writes the differences between `before` and `after`."""
    own = {"tenant": after.tenant, "name": after.name}
    if not after.records:
        for table in (_names, _versions, _extras, _aliases, _targets):
            connection.execute(delete(table).where(*_is_own(table, own)))
        return
    if not before.records:
        row = {**own, "last_number": after.last_number, "created_at": after.named_at}
        connection.execute(insert(_names), row)
    elif after.last_number != before.last_number:
        change = update(_names).where(*_is_own(_names, own)).values(last_number=after.last_number)
        connection.execute(change)
    _save_versions(connection, own, before, after)
    for name in before.aliases.keys() - after.aliases.keys():
        _delete_alias(connection, own, name)
    for name, alias in after.aliases.items():
        if alias != before.aliases.get(name):
            _delete_alias(connection, own, name)
            _insert_alias(connection, own, name, alias)


def _is_own(table: FromClause, own: dict[str, str]) -> tuple[Any, Any]:
    return table.c.tenant == own["tenant"], table.c.name == own["name"]


def _save_versions(
    connection: Connection, own: dict[str, str], before: NamedAdapter, after: NamedAdapter
) -> None:
    for number in before.records.keys() - after.records.keys():
        for table in (_versions, _extras):
            connection.execute(delete(table).where(*_is_own(table, own), table.c.number == number))
    for number, record in after.records.items():
        if record != before.records.get(number):
            connection.execute(delete(_versions).where(*_is_own(_versions, own), _v.number == number))
            connection.execute(insert(_versions), own | _version_row(record))
    for number, extras in after.new_extras.items():
        if extras != NO_EXTRAS:
            row = {
                "number": number,
                "digest": after.records[number].extras.digest,
                "chat_template": extras.chat_template,
                "generation_config": extras.generation_config,
            }
            connection.execute(insert(_extras), own | row)


def _version_row(record: AdapterRecord) -> dict[str, Any]:
    details, extras = record.details, record.extras
    return {
        "number": record.number,
        "digest": record.version.digest,
        "rank": details.rank,
        "target_modules": json.dumps(details.target_modules),
        "num_bytes": details.num_bytes,
        "packed_bytes": details.packed_bytes,
        "blob_bytes": details.blob_bytes,
        "template_bytes": extras.template_bytes,
        "defaults_bytes": extras.defaults_bytes,
        "extras_digest": extras.digest,
        "created_at": record.created_at,
    }


def _delete_alias(connection: Connection, own: dict[str, str], name: str) -> None:
    for table in (_aliases, _targets):
        connection.execute(delete(table).where(*_is_own(table, own), table.c.alias == name))


def _insert_alias(connection: Connection, own: dict[str, str], name: str, alias: Alias) -> None:
    state = alias.history.state
    row = {
        "alias": name,
        "follows_pushes": state.follows_pushes,
        "history": encode_states(alias.history.before),
        "salt": alias.salt,
        "pinned": alias.pinned,
        "updated_at": alias.updated_at,
    }
    connection.execute(insert(_aliases), own | row)
    targets = [
        {**own, "alias": name, "number": number, "percent": percent}
        for number, percent in state.targets.items()
    ]
    connection.execute(insert(_targets), targets)
