"""Deletes or renames the rows of one tenant in all tables.

Every table with a column `tenant` is included, so a new table need not be listed here. A table whose rows belong to a
tenant must have that column, even if its key is something else, such as the id of an API key.
"""

from sqlalchemy import delete, insert, select, update
from sqlalchemy.engine import Connection

from slora_adapters.database import schema

__all__ = ["MAX_FLOORS", "delete_tenant_rows", "rename_tenant_rows"]

# The largest sum of all tenants' `min_pool_share`: the whole pool, plus a tolerance for rounding errors such as in 0.7
# + 0.2 + 0.1.
MAX_FLOORS = 1 + 1e-9
# Rows that outlive a tenant: the usage ledger, the audit log, and the changes that other processes have yet to read.
_LEDGER = (schema.usage_records, schema.usage_buckets)
_KEPT = (schema.audit_log, schema.changes, *_LEDGER)
# Each table comes before the tables that its foreign keys refer to, so rows can be deleted in this order.
_OWN = tuple(
    table
    for table in reversed(schema.metadata.sorted_tables)
    if "tenant" in table.columns and table not in _KEPT
)


def delete_tenant_rows(connection: Connection, tenant: str) -> dict[str, int]:
    """Deletes the tenant and its rows, except its usage. Returns the number of deleted rows by table."""
    counts = {
        table.name: connection.execute(delete(table).where(table.c.tenant == tenant)).rowcount
        for table in _OWN
    }
    connection.execute(delete(schema.tenants).where(schema.tenants.c.name == tenant))
    return counts


def rename_tenant_rows(connection: Connection, tenant: str, name: str) -> None:
    """Renames the tenant in all of its rows, its usage included. No tenant may already have the name `name`."""
    own = schema.tenants.c.name == tenant
    row = connection.execute(select(schema.tenants).where(own)).mappings().one()
    connection.execute(insert(schema.tenants), {**row, "name": name})
    for table in (*_OWN, *_LEDGER):
        connection.execute(update(table).where(table.c.tenant == tenant).values(tenant=name))
    connection.execute(delete(schema.tenants).where(own))
