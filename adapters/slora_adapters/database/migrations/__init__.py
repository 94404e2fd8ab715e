"""Alembic's revisions of the schema, in `versions`. `migration.py` applies them.

There is one revision until the first release, and it may be edited. An edit gives it a new id and adds the old one to
`UNRELEASED` in `migration.py`, so that databases with the earlier tables are refused.

A revision that has been released is never edited. Servers of two releases may share a database during an upgrade, so a
revision only adds what the older release can ignore. What becomes unused is removed one release later.
"""
