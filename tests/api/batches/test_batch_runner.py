"""Runners that die, leases, and answers that are written once."""

import json
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from sqlalchemy import insert, select

from slora.request import RequestUsage
from slora.usage_journal.record import UsageRecord
from slora_adapters.database import schema
from slora_adapters.database.database import Database
from slora_adapters.registry.catalog import Catalog
from slora_adapters.registry.registry import Registry
from slora_adapters.registry.registry_storage import RegistryStorage
from slora_adapters.store.file_store import FileStore
from slora_api.batches.batch_line import read_lines, split_lines
from slora_api.batches.batches import Batch, Batches, BatchStatus, LeaseLost, LineAnswer
from slora_api.batches.files import FileLimits, Files, StoredFile
from slora_api.errors import InUse, NotFound
from slora_api.tenants.usage_ledger import BatchUsage, UsageFilter, UsageLedger
from tests.api.platform import open_tenant_store, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.support.forked_program import ForkedProgram

PATH = "/v1/completions"
SHARE = {"weight": 1.0, "min_pool_share": 0.0, "max_pool_share": 1.0, "priority": 0}


@dataclass
class Desk:
    """A database and a store with one file and one batch. now: the clock of all stores."""

    database: Database
    directory: Path
    now: float = 1000.0
    max_bytes: int = 1 << 30

    @property
    def catalog(self) -> Catalog:
        """The catalog of another process that shares the store."""
        return open_catalog(self.database, self.directory)

    def open(self) -> Batches:
        files = Files(self.database, self.catalog, FileLimits(100, self.max_bytes), lambda: self.now)
        return Batches(self.database, files, 10, lambda: self.now)

    def blobs(self) -> set[str]:
        return set(self.catalog.store.digests())

    def store(self, batches: Batches, content: bytes, expires_after_s: int | None = None) -> str:
        path = self.directory / "input"
        path.write_bytes(content)
        return batches.files.create("acme", "input.jsonl", path, expires_after_s).file_id

    def submit(self, batches: Batches, num_lines: int) -> Batch:
        lines = [
            {"custom_id": str(n), "method": "POST", "url": PATH, "body": {"prompt": str(n)}}
            for n in range(num_lines)
        ]
        file_id = self.store(batches, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        return batches.create("acme", "key", PATH, file_id, None)


def open_catalog(database: Database, directory: Path) -> Catalog:
    return Catalog(Registry(RegistryStorage(database)), FileStore(directory / "adapters"))


@pytest.fixture
def desk(database_place: str, tmp_path: Path) -> Iterator[Desk]:
    with closing(Database(database_place)) as database:
        yield Desk(database, tmp_path)


def test_a_lease_protects_a_batch_until_it_ends(desk: Desk) -> None:
    batches = desk.open()
    batch = desk.submit(batches, 3)
    claimed = batches.claim("first", 30, ())
    assert claimed is not None and claimed.batch_id == batch.batch_id
    assert batches.claim("second", 30, ()) is None
    batches.begin(batch.batch_id, "first", 3)
    batches.record(batch, "first", [LineAnswer(1, b"one\n", is_error=False)])
    desk.now += 31
    taken = batches.claim("second", 30, ())
    assert taken is not None and taken.status is BatchStatus.IN_PROGRESS
    for call in (
        lambda: batches.record(batch, "first", [LineAnswer(2, b"late\n", is_error=False)]),
        lambda: batches.renew(batch.batch_id, "first", 30),
        lambda: batches.finish(batch.batch_id, "first", BatchStatus.COMPLETED),
    ):
        with pytest.raises(LeaseLost):
            call()
    assert batches.answered(batch) == {1}
    # Computed a second time, the answer to line 1 is not written again, not even as an error.
    batches.record(
        batch,
        "second",
        [
            LineAnswer(1, b"again\n", is_error=True),
            LineAnswer(2, b"two\n", is_error=False),
            LineAnswer(3, b"three\n", is_error=True),
        ],
    )
    batches.finish(batch.batch_id, "second", BatchStatus.COMPLETED)
    ended = batches.find("acme", batch.batch_id)
    assert (ended.num_completed, ended.num_failed) == (2, 1)
    assert b"".join(batches.files.read(ended.output_file_id)) == b"one\ntwo\n"
    assert b"".join(batches.files.read(ended.error_file_id)) == b"three\n"
    assert batches.claim("third", 30, ()) is None


def test_batches_of_tenants_that_have_none_in_progress_are_claimed_first(desk: Desk) -> None:
    batches = desk.open()
    desk.submit(batches, 1)
    desk.now += 1
    other = batches.create("acme", "key", PATH, desk.submit(batches, 1).input_file_id, None)
    assert other.tenant == "acme"
    first = batches.claim("runner", 30, ())
    assert first is not None
    assert batches.claim("runner", 30, {"acme"}, others_only=True) is None
    second = batches.claim("runner", 30, {"acme"})
    assert second is not None and second.batch_id != first.batch_id


def test_a_deleted_batch_ends_its_lease(desk: Desk) -> None:
    batches = desk.open()
    with pytest.raises(LeaseLost):
        batches.renew("batch_0", "runner", 30)


def test_files_and_batches_are_purged_with_their_tenant(desk: Desk, tmp_path: Path) -> None:
    batches = desk.open()
    batch = desk.submit(batches, 2)
    batches.claim("runner", 30, ())
    with desk.database.transaction() as connection:
        row = {"tenant_id": "acme", "name": "acme", "created_at": 0, **SHARE}
        connection.execute(insert(schema.tenants), row)
    batches.record(batch, "runner", [LineAnswer(1, b"one\n", is_error=False)])
    tenants = open_tenant_store(desk.database, tmp_path)
    tenants.begin_purge("acme")
    with pytest.raises(NotFound):
        batches.find("acme", batch.batch_id)
    counts = tenants.finish_purge("acme", {})
    assert (counts["files"], counts["file_pieces"], counts["batches"]) == (0, 2, 0)
    with pytest.raises(LeaseLost):
        batches.record(batch, "runner", [LineAnswer(2, b"two\n", is_error=False)])


def test_a_file_that_is_deleted_or_expires_while_a_batch_is_created_is_not_its_input(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Born from a bug: the batch ended as if the lines that were left were the whole file."""
    batches = desk.open()
    find = batches.files.find

    def delete(file_id: str) -> None:
        batches.files.delete("acme", file_id)

    def expire(file_id: str) -> None:
        desk.now += 3601

    for lose in (delete, expire):
        file_id = desk.store(batches, b"{}\n", expires_after_s=3600)

        def find_and_lose(tenant: str, file_id: str, lose: Callable[[str], None] = lose) -> StoredFile:
            monkeypatch.setattr(batches.files, "find", find)
            found = find(tenant, file_id)
            lose(file_id)
            return found

        monkeypatch.setattr(batches.files, "find", find_and_lose)
        with pytest.raises(NotFound):
            batches.create("acme", "key", PATH, file_id, None)
    assert not batches.list("acme", 10, None)


def test_files_and_batches_leave_the_caches_of_other_processes_valid(
    database_place: str, tmp_path: Path
) -> None:
    """Born from a bug: each upload made the other API processes read keys and names from the database again."""
    changes: list[str] = []
    with closing(Database(database_place, on_change=lambda: changes.append("change"))) as database:
        changes.clear()
        desk = Desk(database, tmp_path)
        batches = desk.open()
        batch = desk.submit(batches, 1)
        batches.cancel("acme", batch.batch_id)
        batches.files.delete("acme", desk.store(batches, b"{}"))
    assert not changes


def test_an_expired_file_is_deleted_unless_a_batch_reads_it(desk: Desk) -> None:
    batches = desk.open()
    free = desk.store(batches, b"x" * 100_000, expires_after_s=3600)
    assert b"".join(batches.files.read(free)) == b"x" * 100_000
    batch = desk.submit(batches, 1)
    with pytest.raises(InUse):
        batches.files.delete("acme", batch.input_file_id)
    desk.now += 3601
    while batches.files.delete_expired():
        pass
    with pytest.raises(NotFound):
        batches.files.find("acme", free)
    assert len(desk.blobs()) == 1 and batches.files.find("acme", batch.input_file_id)


def test_lines_are_found_wherever_the_pieces_of_a_file_are_cut() -> None:
    content = b'{"a": 1}\n\n  \n{"b": 2}\n{"c": 3}'
    expected = [(1, b'{"a": 1}'), (4, b'{"b": 2}'), (5, b'{"c": 3}')]
    for size in (1, 2, 7, 100):
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        assert [line for line in split_lines(pieces) if line] == expected


def test_answered_lines_are_skipped_when_a_batch_goes_on() -> None:
    line = b'{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {}}\n'
    content = [line % number for number in range(5)]
    found = [one.custom_id for one in read_lines(content, PATH, {1, 3}) if one is not None]
    assert found == ["1", "3", "4"]


def test_a_line_is_in_the_ledger_once_and_as_usage_of_a_batch(database_place: str) -> None:
    with closing(Database(database_place)) as database:
        ledger = UsageLedger(database)
        line = UsageRecord("batch_0-1-0", "acme", "key", None, 60.0, RequestUsage(10, 0, 4), is_batch=True)
        other = UsageRecord("other", "acme", "key", None, 60.0, RequestUsage(5, 0, 1))
        assert ledger.add([line, other]) == 2
        assert ledger.add([replace(line, usage=RequestUsage(10, 0, 3))]) == 0
        (row,) = ledger.read(UsageFilter(60, 0, 120), None, 10)
        assert (row.num_requests, row.usage.prompt_tokens) == (2, 15)
        assert row.batch == BatchUsage(1, 10, 4)


def test_a_record_that_an_older_release_wrote_is_no_batch() -> None:
    record = UsageRecord("r", "acme", "key", None, 60.0, RequestUsage(5, 0, 1))
    body = record.to_line()[9:-1].replace(b',"is_batch":false', b"")
    assert UsageRecord.from_line(b"%08x %s\n" % (zlib.crc32(body), body)) == record


# Announces each request to the engine.
PROGRAM = """
import sys, time
from pathlib import Path
from slora.request import FinishReason
from tests.api.platform import open_tenant_store, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of

announce = lambda request: print(request.request_id, flush=True)
engine = ScriptedEngine([deltas_of(b"hi", FinishReason.STOP)], on_request=announce)
with running_platform(Path(sys.argv[1]), engine, runs_batches=True, batch_lines_in_flight=4):
    time.sleep(600)
"""


def test_every_line_is_answered_once_although_its_process_is_killed(tmp_path: Path) -> None:
    with running_platform(tmp_path, ScriptedEngine([deltas_of(b"hi")])) as platform:
        lines = [
            {
                "custom_id": f"line {n}",
                "method": "POST",
                "url": PATH,
                "body": {"model": "base", "prompt": "a"},
            }
            for n in range(50)
        ]
        content = "\n".join(map(json.dumps, lines))
        key = platform.key("acme")
        acme = platform.tenant_id("acme")
        with platform.client(key) as client:
            sent = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", content)})
            body = {"input_file_id": sent.json()["id"], "endpoint": PATH, "completion_window": "24h"}
            batch_id = client.post("/v1/batches", json=body).json()["id"]
    with closing(Database(tmp_path / "slora.db")) as database:
        files = Files(database, open_catalog(database, tmp_path), FileLimits(100, 1 << 30))
        batches = Batches(database, files, 10)
        with ForkedProgram(PROGRAM, tmp_path) as program:
            for _ in range(20):
                assert program.output.readline().startswith(batch_id)
            program.kill()
            program.wait()
        halfway = batches.find(acme, batch_id)
        assert halfway.status is BatchStatus.IN_PROGRESS and 0 < halfway.num_completed < 50
        # The lease of the dead process ends by itself, but only after half a minute.
        batches.release(batch_id, lease_owner(database))
        with ForkedProgram(PROGRAM, tmp_path) as program:
            while not batches.find(acme, batch_id).is_final:
                time.sleep(0.05)
        batch = batches.find(acme, batch_id)
        output = b"".join(batches.files.read(batch.output_file_id)).splitlines()
    assert batch.status is BatchStatus.COMPLETED and (batch.num_completed, batch.num_failed) == (50, 0)
    assert [json.loads(line)["custom_id"] for line in output] == [f"line {n}" for n in range(50)]


def lease_owner(database: Database) -> str:
    ((owner,),) = database.read(select(schema.batches.c.lease_owner))
    return str(owner)
