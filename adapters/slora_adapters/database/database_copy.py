"""Copies all rows of one database into another, for backups."""

from sqlalchemy import delete, func, insert, select
from sqlalchemy.engine import Connection

from slora_adapters.database import schema

# Not copied: these rows concern only the processes that use the source.
_TRANSIENT = (schema.changes, schema.adapter_reservations)
# Maximum number of rows of a large table in one statement.
_ROWS_AT_ONCE = 2000


def copy_everything(source: Connection, target: Connection) -> None:
    """Copies all rows into a new database, some rows at a time. source: see `Database.snapshot`."""
    target.execute(delete(schema.platform))
    for table in schema.metadata.sorted_tables:
        if table in _TRANSIENT:
            continue
        query = table.select().execution_options(stream_results=True)
        for rows in source.execute(query).mappings().partitions(_ROWS_AT_ONCE):
            target.execute(insert(table), [dict(row) for row in rows])
        number = table.autoincrement_column
        if target.dialect.name == "postgresql" and number is not None:
            # Inserting rows with explicit ids does not advance the sequence.
            sequence = func.pg_get_serial_sequence(table.name, number.name)
            last = select(func.max(number)).scalar_subquery()
            target.execute(select(func.setval(sequence, func.coalesce(last, 1))))
