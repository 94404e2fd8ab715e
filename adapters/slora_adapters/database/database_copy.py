"""Copies tenants, keys, names, files, batches and usage from one database into another, to move from a SQLite file to
PostgreSQL.
"""

import uuid
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Select, Table, delete, func, insert, select, tuple_, update
from sqlalchemy.engine import Connection

from slora_adapters.database import schema
from slora_adapters.database.audit_log import record_change
from slora_adapters.database.database import CHANGES, Database
from slora_adapters.database.tenant_rows import MAX_FLOORS
from slora_adapters.errors import StoreUnfit

__all__ = ["Copied", "copy_database", "copy_everything", "take_over_registry"]

_NAME_TABLES = (
    schema.adapter_names,
    schema.adapter_versions,
    schema.adapter_extras,
    schema.adapter_aliases,
    schema.adapter_alias_targets,
)
# Not copied: these rows concern only the processes that use the source.
_TRANSIENT = (schema.changes, schema.adapter_reservations)
# Maximum number of rows of a large table in one statement.
_ROWS_AT_ONCE = 2000
# Maximum number of file parts in one statement. File parts are larger than other rows.
_PARTS_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Copied:
    """The numbers of tenants, keys and names that were copied."""

    num_tenants: int
    num_keys: int
    num_names: int


def copy_database(source: Database, target: Database) -> Copied:
    """Copies what the target does not have yet, in one transaction. Tenants and keys of the target stay as they are. So
    the call may be repeated, and several sources may be copied. No server may use the source in the meantime.

    Raises StoreUnfit, and changes nothing, in three cases: the API keys of the two databases were made with different
    peppers, both databases have adapter names, or the floors of all tenants would exceed the whole pool.
    """
    ((registry, pepper_check),) = source.read(select(schema.platform.c.id, schema.platform.c.pepper_check))
    with target.transaction(CHANGES) as connection:
        present = connection.execute(select(schema.platform.c.pepper_check)).scalar_one()
        if None not in (present, pepper_check) and present != pepper_check:
            raise StoreUnfit(
                f"the keys of database {source.label} were made with another pepper than those of {target.label}, "
                "so they cannot be copied; create new keys"
            )
        connection.execute(update(schema.platform).values(pepper_check=present or pepper_check))
        num_tenants = _copy_missing(source, connection, schema.tenants)
        num_keys = _copy_missing(source, connection, schema.api_keys)
        _copy_missing(source, connection, schema.quotas)
        floors = connection.execute(select(func.sum(schema.tenants.c.min_pool_share))).scalar_one()
        if (floors or 0) > MAX_FLOORS:
            raise StoreUnfit(
                f"the min_pool_share of all tenants would add up to {floors:g}, but must not exceed 1: "
                "lower some of them first"
            )
        num_names = 0
        if source.read(select(schema.adapter_names.c.name).limit(1)) and take_over_registry(
            connection, registry
        ):
            num_names, *_ = [_copy_missing(source, connection, table) for table in _NAME_TABLES]
        for table in (schema.files, schema.batches, schema.usage_records, schema.usage_buckets):
            _copy_rows(source, connection, table, _ROWS_AT_ONCE)
        _copy_rows(source, connection, schema.file_parts, _PARTS_AT_ONCE)
        copied = Copied(num_tenants, num_keys, num_names)
        if copied != Copied(0, 0, 0):
            record_change(connection, "database.copy", "", source.label, asdict(copied))
        return copied


def copy_everything(source: Connection, target: Connection) -> None:
    """Copies all rows into a new database, some rows at a time. source: see `Database.snapshot`."""
    target.execute(delete(schema.platform))
    for table in schema.metadata.sorted_tables:
        if table in _TRANSIENT:
            continue
        query = table.select().execution_options(stream_results=True)
        num_rows = _PARTS_AT_ONCE if table is schema.file_parts else _ROWS_AT_ONCE
        for rows in source.execute(query).mappings().partitions(num_rows):
            target.execute(insert(table), [dict(row) for row in rows])
        number = table.autoincrement_column
        if target.dialect.name == "postgresql" and number is not None:
            # Inserting rows with explicit ids does not advance the sequence.
            sequence = func.pg_get_serial_sequence(table.name, number.name)
            last = select(func.max(number)).scalar_subquery()
            target.execute(select(func.setval(sequence, func.coalesce(last, 1))))


def take_over_registry(connection: Connection, registry: str) -> bool:
    """Stores the id of a registry in a database without names. The caller then copies the registry's names into the
    database. The registry has claimed its store under this id. Returns False if the database has the id already.

    The feed does not contain the copied names, so readers of the feed must look up all names again.

    Raises StoreUnfit if the database has names.
    """
    if connection.execute(select(schema.platform.c.id)).scalar_one() == registry:
        return False
    num_names = connection.execute(select(func.count()).select_from(schema.adapter_names)).scalar_one()
    if num_names:
        raise StoreUnfit(
            f"the database has {num_names} adapter names already, so no other names are copied: "
            "give a database without adapters"
        )
    connection.execute(update(schema.platform).values(id=registry))
    connection.execute(update(schema.changes).values(nonce=uuid.uuid4().hex))
    return True


def _copy_missing(source: Database, connection: Connection, table: Table) -> int:
    """Copies the rows whose primary key the target does not have. Returns their number."""
    key = tuple(table.primary_key.columns)
    present = {tuple(row) for row in connection.execute(select(*key))}
    rows: list[dict[str, Any]] = [
        dict(row._mapping)
        for row in source.read(table.select())
        if tuple(row._mapping[column] for column in key) not in present
    ]
    if rows:
        connection.execute(insert(table), rows)
    return len(rows)


def _copy_rows(source: Database, connection: Connection, table: Table, num_rows: int) -> None:
    """Copies the rows whose primary key the target does not have. Reads `num_rows` rows at a time, because there may be
    millions of rows. Usage sums of two sources never have the same primary key, because each sum belongs to one API
    key.
    """
    key = tuple(table.primary_key.columns)
    first: Select[Any] = table.select().order_by(*key).limit(num_rows)
    rows = source.read(first)
    while rows:
        found = [dict(row._mapping) for row in rows]
        last = tuple(found[-1][column.name] for column in key)
        keys = [tuple(row[column.name] for column in key) for row in found]
        present = {tuple(row) for row in connection.execute(select(*key).where(tuple_(*key).in_(keys)))}
        if missing := [row for row, own in zip(found, keys, strict=True) if own not in present]:
            connection.execute(insert(table), missing)
        rows = source.read(first.where(tuple_(*key) > tuple_(*last)))
