"""The registry's tables as values, and back. What takes a connection works inside a transaction that its caller has
begun, on the versions and aliases of one name of a tenant.

Knows no rule: what may be written, and when, is `registry.py`'s.
"""

import json
import uuid
from collections.abc import Iterable, Sequence
from itertools import groupby
from sqlite3 import Connection
from typing import Any

from slora_adapters.adapter import AdapterExtras
from slora_adapters.adapter_record import AdapterDetails, AdapterRecord, Rollout
from slora_adapters.alias import (
    AliasHistory,
    AliasState,
    decode_states,
    decode_targets,
    encode_states,
    encode_targets,
)
from slora_adapters.errors import AdapterNotFound
from slora_adapters.reference import LATEST
from slora_adapters.version import AdapterVersion

Row = tuple[Any, ...]
# Tenant and name: what versions and aliases belong to.
NameKey = tuple[str, str]

_DETAILS = "digest, rank, target_modules, num_bytes, packed_bytes, chat_template, generation_config"
_VERSION_COLUMNS = (
    "v.tenant, v.name, v.number, n.created_at, v.created_at, v.digest, v.rank, v.target_modules, v.num_bytes, "
    "v.packed_bytes, v.chat_template, v.generation_config"
)
VERSIONS = f"SELECT {_VERSION_COLUMNS} FROM adapter_versions v JOIN adapter_names n USING (tenant, name)"
NEWEST = f"{VERSIONS} WHERE v.tenant = ? AND v.name = ? ORDER BY v.number DESC LIMIT 1"
_NUM_ALIAS_COLUMNS = 6
_ALIAS_ROW = "WHERE tenant = ? AND name = ? AND alias = ?"
_BY_ALIAS = "ORDER BY a.tenant, a.name, a.alias, v.number"


def _rollouts_of(aliases: str) -> str:
    """aliases: a table or query of rows of adapter_aliases.

    One row for each version that an alias points at: all of an alias is seen at one moment. CROSS JOIN keeps SQLite to
    this order; by itself it reads all versions of a name to find the one that is wanted.
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

# Pages: what comes behind a key is found in the primary key's index, so that a page costs the same wherever it is and
# however much there is besides. What a page ends at need not be there any more.
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
VERSION_PAGE = f"{VERSIONS} WHERE v.tenant = ? AND v.name = ? AND v.number < ? ORDER BY v.number DESC LIMIT ?"
# For `LIMIT ?`, and a number that is greater than any version's.
NO_LIMIT, BEHIND_ALL = -1, 2**63 - 1


def read_record(row: Row) -> AdapterRecord:
    tenant, name, number, named_at, created_at, digest, rank, modules, num_bytes, packed_bytes, *extras = row
    details = AdapterDetails(
        rank, tuple(json.loads(modules)), num_bytes, AdapterExtras(*extras), packed_bytes
    )
    return AdapterRecord(name, number, AdapterVersion(tenant, digest), details, created_at, named_at)


def read_rollouts(rows: Iterable[Row]) -> list[Rollout]:
    """Of rows that are sorted by alias."""
    found = []
    first = _NUM_ALIAS_COLUMNS
    for _, group in groupby(rows, key=lambda row: (row[first], row[first + 1], row[0])):
        own = list(group)
        alias, targets, follows_pushes, salt, pinned, updated_at = own[0][:first]
        records = {record.number: record for record in (read_record(row[first:]) for row in own)}
        found.append(
            Rollout(
                alias,
                records,
                decode_targets(targets),
                bool(follows_pushes),
                salt,
                bool(pinned),
                updated_at,
            )
        )
    return found


def only_rollout(rollouts: Sequence[Rollout], name: str, alias: str) -> Rollout:
    if not rollouts:
        raise not_found(name if alias == LATEST else f"{name}@{alias}")
    return rollouts[0]


def find_rollout(connection: Connection, key: NameKey, alias: str) -> Rollout:
    """Raises AdapterNotFound."""
    return only_rollout(read_rollouts(connection.execute(ONE_ROLLOUT, (*key, alias))), key[1], alias)


def find_rollouts(connection: Connection, key: NameKey) -> list[Rollout]:
    return read_rollouts(connection.execute(OF_NAME, key))


def find_versions(connection: Connection, key: NameKey) -> list[AdapterRecord]:
    rows = connection.execute(f"{VERSIONS} WHERE v.tenant = ? AND v.name = ?", key)
    return [read_record(row) for row in rows]


def find_version(connection: Connection, key: NameKey, number: int) -> AdapterRecord:
    where = "v.tenant = ? AND v.name = ? AND v.number = ?"
    row = connection.execute(f"{VERSIONS} WHERE {where}", (*key, number)).fetchone()
    assert row is not None, f"version {number} of {key} was just written"
    return read_record(row)


def find_newest(connection: Connection, key: NameKey) -> AdapterRecord | None:
    row = connection.execute(NEWEST, key).fetchone()
    return None if row is None else read_record(row)


def read_history(connection: Connection, key: NameKey, alias: str) -> AliasHistory | None:
    row = connection.execute(
        f"SELECT targets, follows_pushes, history FROM adapter_aliases {_ALIAS_ROW}", (*key, alias)
    ).fetchone()
    if row is None:
        return None
    return AliasHistory(AliasState(decode_targets(row[0]), bool(row[1])), decode_states(row[2]))


def take_number(connection: Connection, key: NameKey, now: float) -> int:
    """The next one of the name, which is made if need be."""
    connection.execute(
        "INSERT INTO adapter_names VALUES (?, ?, 1, ?) "
        "ON CONFLICT DO UPDATE SET last_number = last_number + 1",
        (*key, now),
    )
    query = "SELECT last_number FROM adapter_names WHERE tenant = ? AND name = ?"
    number: int = connection.execute(query, key).fetchone()[0]
    return number


def insert_version(
    connection: Connection,
    key: NameKey,
    number: int,
    version: AdapterVersion,
    details: AdapterDetails,
    now: float,
) -> None:
    extras = details.extras
    connection.execute(
        f"INSERT INTO adapter_versions (tenant, name, number, created_at, {_DETAILS}) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(*key, number, now, version.digest, details.rank, json.dumps(details.target_modules)),
            *(details.num_bytes, details.packed_bytes, extras.chat_template, extras.generation_config),
        ),
    )


def push_aliases(connection: Connection, key: NameKey, number: int, now: float) -> bool:
    """All that follow pushes point at the new version; whether one of them is pinned."""
    state = AliasState({number: 100}, follows_pushes=True)
    rollouts = find_rollouts(connection, key)
    if not rollouts:
        insert_alias(connection, key, LATEST, state, now)
        return False
    following = [one for one in rollouts if one.follows_pushes]
    for one in following:
        history = read_history(connection, key, one.alias)
        assert history is not None
        write_history(connection, key, one.alias, history.move(state), now)
    return any(one.pinned for one in following)


def insert_alias(connection: Connection, key: NameKey, alias: str, state: AliasState, now: float) -> None:
    connection.execute(
        "INSERT INTO adapter_aliases "
        "(tenant, name, alias, targets, follows_pushes, history, salt, pinned, updated_at) "
        "VALUES (?, ?, ?, ?, ?, '[]', ?, 0, ?)",
        (*key, alias, encode_targets(state.targets), state.follows_pushes, uuid.uuid4().hex, now),
    )


def write_history(
    connection: Connection, key: NameKey, alias: str, history: AliasHistory, now: float
) -> None:
    targets, states = encode_targets(history.state.targets), encode_states(history.before)
    connection.execute(
        f"UPDATE adapter_aliases SET targets = ?, follows_pushes = ?, history = ?, updated_at = ? {_ALIAS_ROW}",
        (targets, history.state.follows_pushes, states, now, *key, alias),
    )


def delete_alias(connection: Connection, key: NameKey, alias: str) -> None:
    connection.execute(f"DELETE FROM adapter_aliases {_ALIAS_ROW}", (*key, alias))


def set_packed_bytes(connection: Connection, key: NameKey, number: int, packed_bytes: int | None) -> None:
    """None leaves it as it is."""
    connection.execute(
        "UPDATE adapter_versions SET packed_bytes = coalesce(?, packed_bytes) "
        "WHERE tenant = ? AND name = ? AND number = ?",
        (packed_bytes, *key, number),
    )


def remove_name(connection: Connection, key: NameKey) -> None:
    """With all of its versions and aliases."""
    for table in ("adapter_names", "adapter_versions", "adapter_aliases"):
        connection.execute(f"DELETE FROM {table} WHERE tenant = ? AND name = ?", key)


def remove_versions(
    connection: Connection, key: NameKey, removed: frozenset[int], left: int, now: float
) -> None:
    """Takes versions out of their name and its aliases. left: the newest that stays."""
    for one in find_rollouts(connection, key):
        history = read_history(connection, key, one.alias)
        assert history is not None
        after = history.without(removed)
        if after is None and one.alias == LATEST:
            after = AliasHistory(AliasState({left: 100}, one.follows_pushes))
        if after is None:
            delete_alias(connection, key, one.alias)
        elif after != history:
            moved_at = one.updated_at if after.state == history.state else now
            write_history(connection, key, one.alias, after, moved_at)
    for number in removed:
        connection.execute(
            "DELETE FROM adapter_versions WHERE tenant = ? AND name = ? AND number = ?", (*key, number)
        )


def set_pinned(connection: Connection, rollout: Rollout, *, pinned: bool) -> Rollout:
    key = (rollout.tenant, rollout.main.name)
    connection.execute(f"UPDATE adapter_aliases SET pinned = ? {_ALIAS_ROW}", (pinned, *key, rollout.alias))
    return find_rollout(connection, key, rollout.alias)


def give_back(connection: Connection, reservation: str, now: float) -> bool:
    """Whether the reservation still held."""
    query = "DELETE FROM adapter_reservations WHERE reservation = ? RETURNING expires_at"
    row = connection.execute(query, (reservation,)).fetchone()
    return row is not None and bool(row[0] > now)


def not_found(reference: str) -> AdapterNotFound:
    return AdapterNotFound(f"there is no adapter {reference[:257]!r}")
