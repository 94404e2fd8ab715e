"""Copies all rows of one database into another, for backups."""

from sqlalchemy import delete, func, insert, select
from sqlalchemy.engine import Connection

from slora_adapters.database import schema

__all__ = ["copy_everything"]

# Not copied: these rows concern only the processes that use the source.
_TRANSIENT = (schema.changes, schema.adapter_reservations)
# Maximum number of rows of a large table in one statement.
_ROWS_AT_ONCE = 2000
# Maximum number of file parts in one statement. File parts are larger than other rows.
_PARTS_AT_ONCE = 100


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
