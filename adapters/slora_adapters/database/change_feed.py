"""The feed of changes, which every process that shares the database reads.

A change is published in the transaction that makes it. That transaction holds the lock CHANGES, so the ids of changes
are in commit order. When a reader has seen an id, all changes with smaller ids are committed too.

A process reads the feed from a cursor. The cursor identifies the last change that the process has seen, and is valid
while the feed contains that change. For an invalid cursor, the result has `resync` set. A cursor becomes invalid if its
change is too old, or if the database was replaced or lost its last changes.
"""

import json
import uuid
from dataclasses import dataclass

from sqlalchemy import bindparam, delete, insert, select
from sqlalchemy.engine import Connection

from slora_adapters.database import schema
from slora_adapters.database.database import Database
from slora_adapters.version import AdapterVersion

# Maximum length of the feed. A process that has missed more changes than this must read everything again.
KEPT_CHANGES = 10_000
# Maximum number of changes that one call returns.
_MAX_CHANGES = 1000

_COLUMNS = schema.changes.c
_AFTER = (
    select(
        _COLUMNS.change_id,
        _COLUMNS.nonce,
        _COLUMNS.tenant,
        _COLUMNS.name,
        _COLUMNS.orphaned,
        _COLUMNS.moved_pin,
        _COLUMNS.key_id,
        _COLUMNS.purged,
    )
    .where(_COLUMNS.change_id >= bindparam("first"))
    .order_by(_COLUMNS.change_id)
    .limit(bindparam("most"))
)
_LAST = select(_COLUMNS.change_id, _COLUMNS.nonce).order_by(_COLUMNS.change_id.desc()).limit(1)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the versions, aliases or pins of one adapter name. If `name` is empty, the API key `key_id` has
    changed. If `key_id` is also empty, the tenant itself has changed, for example its share.
    """

    tenant: str
    name: str = ""
    orphaned: tuple[AdapterVersion, ...] = ()  # deleted weights that no remaining version of the tenant uses
    moved_pin: bool = False  # whether the versions that engines must pin have changed
    key_id: str = ""
    purged: bool = False  # whether a purge of the tenant has begun or ended


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes after a cursor, oldest first."""

    cursor: str  # pass it to the next call
    changes: tuple[Change, ...] = ()
    resync: bool = False  # earlier changes may be missing, so the reader must read everything again
    is_all: bool = True  # whether these are the last changes in the feed


def publish(connection: Connection, change: Change) -> None:
    """Adds a change to the feed. The transaction of `connection` must hold the lock CHANGES."""
    row = {
        "nonce": uuid.uuid4().hex,
        "tenant": change.tenant,
        "name": change.name,
        "key_id": change.key_id,
        "orphaned": json.dumps([version.digest for version in change.orphaned]),
        "moved_pin": change.moved_pin,
        "purged": change.purged,
    }
    (change_id,) = connection.execute(insert(schema.changes).returning(_COLUMNS.change_id), row).one()
    connection.execute(delete(schema.changes).where(_COLUMNS.change_id <= change_id - KEPT_CHANGES))


def read_changes(database: Database, cursor: str | None) -> Changes:
    """Returns the changes after the cursor. Without a cursor, returns the end of the feed, with `resync` set."""
    if cursor is not None:
        first, _, _ = cursor.partition("/")
        rows = database.read(_AFTER, {"first": int(first), "most": _MAX_CHANGES + 1})
        if rows and _cursor(rows[0]) == cursor:
            found = tuple(
                Change(
                    tenant,
                    name,
                    tuple(AdapterVersion(tenant, digest) for digest in json.loads(orphaned)),
                    moved_pin,
                    key_id,
                    purged,
                )
                for _, _, tenant, name, orphaned, moved_pin, key_id, purged in rows[1:]
            )
            return Changes(_cursor(rows[-1]), found, is_all=len(found) < _MAX_CHANGES)
    (last,) = database.read(_LAST)
    return Changes(_cursor(last), resync=True)


def _cursor(row: tuple[object, ...]) -> str:
    return f"{row[0]}/{row[1]}"
