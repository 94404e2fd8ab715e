"""Alembic's revisions of the schema, in `versions`. `migration.py` applies them.

A revision that has been released is never edited. Servers of two releases may share a database during an upgrade, so a
revision only adds what the older release can ignore. What becomes unused is removed one release later.
"""
