"""How the registry's queries are executed, and which of them read texts."""

import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Select, text
from sqlalchemy.dialects import sqlite

from slora_adapters.database.database import Database
from slora_adapters.errors import StoreUnavailable
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry import table
from slora_adapters.registry.record import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from tests.adapters.registry_places import WatchedDatabase

D1, D2 = "1" * 64, "2" * 64


def _v(tenant: str, digest: str = D1) -> AdapterVersion:
    return AdapterVersion(tenant, digest)


def plan(path: Path, query: Select[Any], **parameters: object) -> list[str]:
    """The steps of SQLite's plan of a query."""
    compiled = query.compile(dialect=sqlite.dialect(paramstyle="named"))
    expanded = compiled.construct_expanded_state(parameters)
    database = Database(path)
    rows = database.read(text(f"EXPLAIN QUERY PLAN {expanded.statement}"), expanded.parameters)
    database.close()
    return [re.sub(r"INDEX sqlite_autoindex_\w+", "INDEX ?", row[3]) for row in rows]


KEY = {"tenant": "t1", "name": "a"}


@pytest.mark.parametrize(
    ("query", "parameters", "searches"),
    [
        (
            table.ONE_ROLLOUT,
            {**KEY, "alias": "prod"},
            ["adapter_aliases USING INDEX ? (tenant=? AND name=? AND alias=?)"],
        ),
        (table.OF_NAME, KEY, []),
        (table.PINNED, {}, []),
        (table.PINNED_PAGE, {"after_tenant": "t", "after": "a", "after_alias": "b", "most": 9}, []),
        (
            table.NAMES,
            {"tenant": "t1", "after": "a", "most": 9},
            ["adapter_names USING COVERING INDEX ? (tenant=? AND name>?)"],
        ),
        (
            table.ALIASES,
            {"tenant": "t1", "after": "a", "after_alias": "b", "most": 9},
            ["adapter_aliases USING INDEX ? (tenant=? AND (name,alias)>(?,?))"],
        ),
    ],
)
def test_a_lookup_reads_the_rows_that_it_wants_and_no_others(
    tmp_path: Path, query: Select[Any], parameters: dict[str, object], searches: list[str]
) -> None:
    """However many names, aliases and versions a tenant has, no query reads rows that are not on its page."""
    steps = plan(tmp_path / "slora.db", query, **parameters)
    assert any("adapter_versions USING INDEX ? (tenant=? AND name=? AND number=?)" in step for step in steps)
    for search in searches:
        assert any(f"SEARCH {search}" in step for step in steps), steps
    # The rows of the page itself, and the index that has only pinned aliases.
    scans = [step for step in steps if step.startswith("SCAN")]
    assert all(step in ("SCAN own", "SCAN page") or "adapter_aliases_pinned" in step for step in scans), steps


def test_pages_of_versions_and_stored_bytes_are_read_from_an_index(tmp_path: Path) -> None:
    steps = plan(tmp_path / "slora.db", table.VERSION_PAGE, **KEY, before=9, most=9)
    assert "SEARCH adapter_versions USING INDEX ? (tenant=? AND name=? AND number<?)" in steps
    usage = "SEARCH adapter_versions USING COVERING INDEX adapter_versions_stored (tenant=?)"
    assert usage in plan(tmp_path / "slora.db", table.STORAGE_USAGE, tenant="t1", digest=D1)
    steps = plan(tmp_path / "slora.db", table.BEFORE_PUSH, **KEY, digest=D1)
    assert usage in steps
    assert "SEARCH adapter_versions USING INDEX ? (tenant=? AND name=?)" in steps


def test_many_weights_are_looked_up_in_few_queries_that_read_an_index(tmp_path: Path) -> None:
    """Born from a bug: after a gap in the feed, each version of an engine was looked up by a query of its own."""
    database, queries = WatchedDatabase(tmp_path / "slora.db"), list[Any]()
    registry = Registry(database)
    kept = {_v("t1", f"{number:064x}") for number in range(0, 2500, 500)}
    for version in kept:
        registry.put("a", version, AdapterDetails(8, ("q_proj",), 4096))
    database.before = lambda statement, _: queries.append(statement)
    assert registry.named({_v("t1", f"{number:064x}") for number in range(2500)}) == kept
    assert registry.named(set()) == set()
    assert len(queries) == 3
    database.close()
    pairs = [("t1", D1), ("t1", D2)]
    for query in (table.NAMED, table.NUMBERS_OF, table.REFERENCES_TO):
        steps = plan(tmp_path / "slora.db", query, versions=pairs, digests=[D1, D2])
        assert any(step.startswith("SEARCH adapter_versions USING") for step in steps), steps
        assert not any(step.startswith("SCAN adapter") for step in steps), steps


def test_only_a_request_reads_the_texts_of_extras(tmp_path: Path) -> None:
    """Born from a bug: lists read the texts too. 160 versions of 500 KB and 30 concurrent lists took 2 GB of memory."""
    database = Database(tmp_path / "slora.db")
    registry = Registry(database)
    extras = AdapterExtras("x" * 1000, "{}")
    details = AdapterDetails(8, ("q_proj",), 4096)
    for digest in (D1, D2):
        registry.put("a", _v("t1", digest), details, extras)
    assert registry.serve("t1", "a@1")[1] == extras
    with database.transaction() as connection:
        connection.exec_driver_sql("DROP TABLE adapter_extras")
    registry = Registry(database)
    with pytest.raises(StoreUnavailable, match="no such table"):
        registry.serve("t1", "a")
    assert len(registry.versions("t1", "a")) == 2 and len(registry.list("t1")) == 1
    assert len(registry.rollouts("t1")) == len(registry.aliases("t1", "a")) == 1
    assert registry.get("t1", "a") == registry.rollout("t1", "a").main
    assert registry.storage_usage("t1", D1).num_bytes == 2 * 4096 + 2 * 1002
    registry.move("t1", "a", "prod", {1: 100})
    registry.pin("t1", "a", lambda wanted, others: None)
    assert len(registry.pinned()) == 1
    database.close()
