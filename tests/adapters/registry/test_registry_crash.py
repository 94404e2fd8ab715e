"""A rollout whose process is killed at any moment: acknowledged changes persist, and other changes are atomic."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import pytest

from slora_adapters.database.database import Database
from slora_adapters.registry.record import AdapterDetails, StorageUsage
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion
from tests.adapters.registry_places import OpenDatabase
from tests.postgresql_server import PostgresqlServer
from tests.support.forked_program import ForkedProgram

DETAILS = AdapterDetails(8, ("q_proj",), 4096)
# Round n pushes version n, moves `prod` from n-1 to it and deletes n-1. It prints a line after each change.
ROLLOUT = """
import sys
from slora_adapters.database.database import Database
from slora_adapters.registry.registry import AdapterDetails
from slora_adapters.registry.registry import Registry
from slora_adapters.version import AdapterVersion

registry = Registry(Database(sys.argv[1]))
details = AdapterDetails(8, ("q_proj",), 4096)
for number in range(1, 10_000):
    registry.put("voice", AdapterVersion("t", f"{number:064x}"), details)
    print("pushed", number, flush=True)
    before = {number - 1: 100} if number > 1 else {}
    registry.move("t", "voice", "prod", {number: 100}, expected=before)
    print("moved", number, flush=True)
    if number > 1:
        registry.delete("t", f"voice@{number - 1}")
        print("deleted", number - 1, flush=True)
"""


def steps(*quick: int, soak: tuple[int, ...]) -> list[object]:
    """Numbers of changes before the kill. After 3 of them a move follows, after 4 a deletion, after 17 a push."""
    return [*quick, *(pytest.param(number, marks=pytest.mark.soak) for number in soak)]


@dataclass
class Acknowledged:
    """The last versions that were pushed, moved to and deleted, according to the rollout's output. The other lines are
    of its error."""

    pushed: int = 0
    moved: int = 0
    deleted: int = 0

    def read(self, lines: Iterable[str]) -> None:
        for line in lines:
            what, _, number = line.partition(" ")
            if what in ("pushed", "moved", "deleted"):
                setattr(self, what, int(number))


def check(registry: Registry, acknowledged: Acknowledged) -> None:
    numbers = {record.number for record in registry.versions("t", "voice")}
    newest, oldest = max(numbers), min(numbers)
    assert newest - acknowledged.pushed in (0, 1) and registry.get("t", "voice").number == newest
    assert oldest - acknowledged.deleted in (1, 2) and numbers == set(range(oldest, newest + 1))
    assert registry.storage_usage("t", "") == StorageUsage(
        len(numbers), len(numbers) * DETAILS.num_bytes, None
    )
    for number in range(1, newest + 1):
        assert registry.blobs.collect(f"{number:064x}", lambda digest: None) is (number not in numbers)
    rollouts = {rollout.alias: rollout for rollout in registry.aliases("t", "voice")}
    if acknowledged.moved:
        (prod,) = rollouts["prod"].targets
        assert prod in numbers and prod - acknowledged.moved in (0, 1)
        registry.move("t", "voice", "prod", {newest: 100}, expected={prod: 100})
    registry.delete("t", "voice", force=True)
    assert registry.rollouts("t") == []


@pytest.mark.parametrize("num_steps", steps(3, 4, 17, soak=(1, 2, 60)))
def test_a_killed_rollout_keeps_acknowledged_changes_and_no_partial_ones(
    open_database: OpenDatabase, num_steps: int
) -> None:
    registry = Registry(open_database())
    acknowledged = Acknowledged()
    with ForkedProgram(ROLLOUT, open_database.place) as program:
        acknowledged.read(islice(program.output, num_steps))
        program.kill()
        acknowledged.read(program.output)  # what it wrote before it died
    # PostgreSQL may complete the last transaction of the dead process only now.
    registry.put("last", AdapterVersion("other", "f" * 64), DETAILS)
    check(registry, acknowledged)


@pytest.mark.parametrize("num_steps", steps(3, soak=(1, 17, 60)))
def test_a_postgresql_server_that_is_killed_under_a_rollout_keeps_what_it_acknowledged(
    postgresql_server: PostgresqlServer, num_steps: int
) -> None:
    acknowledged = Acknowledged()
    place = postgresql_server.make_database()
    with ForkedProgram(ROLLOUT, place) as program:
        acknowledged.read(islice(program.output, num_steps))
        postgresql_server.kill()
        rest = list(program.output)
        acknowledged.read(rest)
        assert any("DatabaseUnavailable" in line for line in rest)
    postgresql_server.start()
    with closing(Database(place)) as database:
        check(Registry(database), acknowledged)
