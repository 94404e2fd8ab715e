"""Conversion between rows of the registry's SQLite tables and values.

Functions with a `connection` argument run inside a transaction that the caller has begun. They handle the versions and
aliases of one name of a tenant. This module only converts: `named_adapter.py` and `sqlite_storage.py` decide when
something is written.
"""

import json
from collections.abc import Collection, Iterable
from itertools import groupby
from sqlite3 import Connection
from typing import Any

from slora_adapters.registry.adapter_record import (
    NO_EXTRAS,
    AdapterDetails,
    AdapterRecord,
    ExtrasSummary,
    Rollout,
)
from slora_adapters.registry.alias import (
    AliasHistory,
    AliasState,
    decode_states,
    decode_targets,
    encode_states,
    encode_targets,
)
from slora_adapters.registry.named_adapter import Alias, NamedAdapter, make_rollout
from slora_adapters.registry.reference import LATEST
from slora_adapters.registry.registry_storage import NameKey
from slora_adapters.version import AdapterVersion

Row = tuple[Any, ...]

_DETAILS = (
    "digest, rank, target_modules, num_bytes, packed_bytes, blob_bytes, "
    "template_bytes, defaults_bytes, extras_digest"
)
_VERSION_COLUMNS = (
    "v.tenant, v.name, v.number, n.created_at, v.created_at, v.digest, v.rank, v.target_modules, v.num_bytes, "
    "v.packed_bytes, v.blob_bytes, v.template_bytes, v.defaults_bytes, v.extras_digest"
)
_VERSIONS = (
    f"SELECT {_VERSION_COLUMNS} FROM adapter_versions v JOIN adapter_names n USING (tenant, name) "
    "WHERE v.tenant = ? AND v.name = ?"
)
ONE_VERSION = f"{_VERSIONS} AND v.number = ?"
NEWEST = f"{_VERSIONS} ORDER BY v.number DESC LIMIT 1"
EXTRAS = (
    "SELECT chat_template, generation_config FROM adapter_extras "
    "WHERE tenant = ? AND name = ? AND number = ? AND digest = ?"
)
# Reads one covering index only; see `StorageUsage`.
STORAGE_USAGE = """
    WITH held AS (
        SELECT digest, max(coalesce(blob_bytes, num_bytes)) AS weights, count(*) AS num_versions,
            sum(coalesce(template_bytes, 0) + coalesce(defaults_bytes, 0)) AS extras
        FROM adapter_versions WHERE tenant = ?1 GROUP BY digest
    )
    SELECT coalesce(sum(num_versions), 0), coalesce(sum(weights + extras), 0),
        max(weights) FILTER (WHERE digest = ?2)
    FROM held
"""
_NEWEST_TWO = f"{_VERSIONS} ORDER BY v.number DESC LIMIT 2"
_NUM_ALIAS_COLUMNS = 6
_ALIAS_COLUMNS = "targets, follows_pushes, history, salt, pinned, updated_at"
_ALIASES = f"SELECT alias, {_ALIAS_COLUMNS} FROM adapter_aliases WHERE tenant = ? AND name = ?"
_BY_ALIAS = "ORDER BY a.tenant, a.name, a.alias, v.number"


def _rollouts_of(aliases: str) -> str:
    """Returns the SQL of a query for aliases together with the versions that they point at (rollouts).

    aliases: a table or subquery with the columns of adapter_aliases.

    The result has one row for each version that an alias points at. A single query reads the alias and its versions, so
    both come from the same snapshot. CROSS JOIN forces SQLite to join in this order. Without it, SQLite reads all
    versions of a name to find one.
    """
    return (
        "SELECT a.alias, a.targets, a.follows_pushes, a.salt, a.pinned, a.updated_at, "
        f"{_VERSION_COLUMNS} FROM {aliases} a "
        "CROSS JOIN json_each(a.targets) target "
        "CROSS JOIN adapter_versions v "
        "ON v.tenant = a.tenant AND v.name = a.name AND v.number = CAST(target.key AS INTEGER) "
        "CROSS JOIN adapter_names n ON n.tenant = a.tenant AND n.name = a.name"
    )


_ROLLOUTS = _rollouts_of("adapter_aliases")
ONE_ROLLOUT = f"{_ROLLOUTS} WHERE a.tenant = ? AND a.name = ? AND a.alias = ? {_BY_ALIAS}"
OF_NAME = f"{_ROLLOUTS} WHERE a.tenant = ? AND a.name = ? {_BY_ALIAS}"
PINNED = f"{_ROLLOUTS} WHERE a.pinned {_BY_ALIAS}"

# Each query returns one page of a list. It uses the index of the primary key to begin after a given key, so its cost
# hardly depends on the position of the page or on the table size. That key need not exist any more.
_NAME_PAGE = (
    "SELECT own.* FROM adapter_names page "
    f"CROSS JOIN adapter_aliases own ON own.tenant = page.tenant AND own.name = page.name AND own.alias = '{LATEST}' "
    "WHERE page.tenant = ? AND page.name > ? ORDER BY page.name LIMIT ?"
)
NAMES = f"{_rollouts_of(f'({_NAME_PAGE})')} {_BY_ALIAS}"
_ALIAS_PAGE = (
    "SELECT * FROM adapter_aliases WHERE tenant = ? AND (name, alias) > (?, ?) ORDER BY name, alias LIMIT ?"
)
ALIASES = f"{_rollouts_of(f'({_ALIAS_PAGE})')} {_BY_ALIAS}"
VERSION_PAGE = f"{_VERSIONS} AND v.number < ? ORDER BY v.number DESC LIMIT ?"
# NO_LIMIT: a value for `LIMIT ?`. BEHIND_ALL: a number greater than every version number.
NO_LIMIT, BEHIND_ALL = -1, 2**63 - 1


def read_record(row: Row) -> AdapterRecord:
    tenant, name, number, named_at, created_at, digest, rank, modules, *sizes = row
    num_bytes, packed_bytes, blob_bytes, *extras = sizes
    details = AdapterDetails(rank, tuple(json.loads(modules)), num_bytes, packed_bytes, blob_bytes)
    version = AdapterVersion(tenant, digest)
    return AdapterRecord(name, number, version, details, ExtrasSummary(*extras), created_at, named_at)


def read_rollouts(rows: Iterable[Row]) -> list[Rollout]:
    """Converts the result of a `_rollouts_of` query to rollouts. The rows must be sorted by alias."""
    found = []
    first = _NUM_ALIAS_COLUMNS
    for _, group in groupby(rows, key=lambda row: (row[first], row[first + 1], row[0])):
        own = list(group)
        alias, targets, follows_pushes, salt, pinned, updated_at = own[0][:first]
        records = {record.number: record for record in (read_record(row[first:]) for row in own)}
        state = AliasState(decode_targets(targets), bool(follows_pushes))
        found.append(make_rollout(Alias(AliasHistory(state), salt, bool(pinned), updated_at), alias, records))
    return found


def load_name(connection: Connection, key: NameKey, wanted: Collection[int] | None) -> NamedAdapter:
    """Loads one name.

    wanted: the version numbers to read in addition to those that `NamedAdapter.records` always has. None reads all
    versions.
    """
    row = connection.execute(
        "SELECT created_at, last_number FROM adapter_names WHERE tenant = ? AND name = ?", key
    ).fetchone()
    if row is None:
        return NamedAdapter(*key)
    aliases = {
        alias: Alias(
            AliasHistory(AliasState(decode_targets(targets), bool(follows)), decode_states(history)),
            salt,
            bool(pinned),
            updated_at,
        )
        for alias, targets, follows, history, salt, pinned, updated_at in connection.execute(_ALIASES, key)
    }
    if wanted is None:
        rows = connection.execute(_VERSIONS, key).fetchall()
    else:
        numbers = {*wanted, *(number for one in aliases.values() for number in one.history.near_targets())}
        rows = connection.execute(_NEWEST_TWO, key).fetchall()
        rows += [row for n in numbers for row in connection.execute(ONE_VERSION, (*key, n))]
    records = {record.number: record for record in map(read_record, rows)}
    named_at, last_number = row
    return NamedAdapter(*key, named_at, last_number, records, aliases)


def save_name(connection: Connection, before: NamedAdapter, after: NamedAdapter) -> None:
    """Writes the differences between `before` and `after`."""
    key = (after.tenant, after.name)
    if not after.records:
        for table in ("adapter_names", "adapter_versions", "adapter_extras", "adapter_aliases"):
            connection.execute(f"DELETE FROM {table} WHERE tenant = ? AND name = ?", key)
        return
    if after.last_number != before.last_number:
        connection.execute(
            "INSERT INTO adapter_names VALUES (?1, ?2, ?3, ?4) ON CONFLICT DO UPDATE SET last_number = ?3",
            (*key, after.last_number, after.named_at),
        )
    for number in before.records.keys() - after.records.keys():
        for table in ("adapter_versions", "adapter_extras"):
            connection.execute(
                f"DELETE FROM {table} WHERE tenant = ? AND name = ? AND number = ?", (*key, number)
            )
    for number, record in after.records.items():
        if record != before.records.get(number):
            _write_version(connection, key, record)
    for number, extras in after.new_extras.items():
        if extras != NO_EXTRAS:
            connection.execute(
                "INSERT INTO adapter_extras VALUES (?, ?, ?, ?, ?, ?)",
                (
                    *(*key, number, after.records[number].extras.digest),
                    *(extras.chat_template, extras.generation_config),
                ),
            )
    for alias in before.aliases.keys() - after.aliases.keys():
        connection.execute(
            "DELETE FROM adapter_aliases WHERE tenant = ? AND name = ? AND alias = ?", (*key, alias)
        )
    for alias, one in after.aliases.items():
        if one != before.aliases.get(alias):
            _write_alias(connection, key, alias, one)


def _write_version(connection: Connection, key: NameKey, record: AdapterRecord) -> None:
    details, extras = record.details, record.extras
    connection.execute(
        f"INSERT OR REPLACE INTO adapter_versions (tenant, name, number, created_at, {_DETAILS}) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(*key, record.number, record.created_at, record.version.digest),
            *(details.rank, json.dumps(details.target_modules)),
            *(details.num_bytes, details.packed_bytes, details.blob_bytes),
            *(extras.template_bytes, extras.defaults_bytes, extras.digest),
        ),
    )


def _write_alias(connection: Connection, key: NameKey, alias: str, one: Alias) -> None:
    state = one.history.state
    connection.execute(
        f"INSERT OR REPLACE INTO adapter_aliases (tenant, name, alias, {_ALIAS_COLUMNS}) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(*key, alias, encode_targets(state.targets), state.follows_pushes),
            *(encode_states(one.history.before), one.salt, one.pinned, one.updated_at),
        ),
    )
