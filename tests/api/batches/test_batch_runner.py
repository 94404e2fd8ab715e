"""Runners that die, leases, and answers that are written once."""

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from sqlalchemy import func, insert, select

from slora.core.request import RequestUsage
from slora.core.usage_journal import UsageRecord
from slora_adapters.backup.backup import make_backup
from slora_adapters.backup.restore import restore_backup
from slora_adapters.database import schema
from slora_adapters.database.database import Database
from slora_adapters.errors import DiskFull, StoreUnavailable
from slora_adapters.process.full_disk import DiskReserve
from slora_adapters.registry.registry import Registry, StoredAdapters
from slora_adapters.store.file_store import FileStore
from slora_adapters.store.object_store import ObjectStore
from slora_adapters.store.store import Store
from slora_adapters.store.store_url import open_store
from slora_api.batches import files as files_module
from slora_api.batches.batch_line import TooManyLines, read_lines, split_lines, take_lines
from slora_api.batches.batches import Batch, Batches, BatchProblem, BatchStatus, LeaseLost, LineAnswer
from slora_api.batches.files import FileLimits, Files, StoredFile
from slora_api.core.errors import InUse, NotFound, QuotaExceeded
from slora_api.usage.usage_ledger import BatchUsage, UsageFilter, UsageLedger
from tests.api.platform import open_tenant_store, running_platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.api.served import wait_until
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
    def catalog(self) -> StoredAdapters:
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


def open_catalog(database: Database, directory: Path) -> StoredAdapters:
    return StoredAdapters(Registry(database), FileStore(directory / "adapters"))


def add_tenant(database: Database) -> None:
    row = {"tenant_id": "acme", "name": "acme", "created_at": 0, **SHARE}
    with database.transaction() as connection:
        connection.execute(insert(schema.tenants), row)


@pytest.fixture
def desk(database_place: str, tmp_path: Path) -> Iterator[Desk]:
    with closing(Database(database_place)) as database:
        add_tenant(database)
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


def test_files_and_batches_are_purged_with_their_tenant(desk: Desk, tmp_path: Path) -> None:
    batches = desk.open()
    batch = desk.submit(batches, 2)
    batches.claim("runner", 30, ())
    batches.record(batch, "runner", [LineAnswer(1, b"one\n", is_error=False)])
    tenants = open_tenant_store(desk.database, tmp_path)
    tenants.begin_purge("acme")
    with pytest.raises(NotFound):
        batches.find("acme", batch.batch_id)
    counts = tenants.finish_purge("acme", {})
    assert (counts["files"], counts["file_pieces"], counts["batches"]) == (0, 2, 0)
    with pytest.raises(LeaseLost):
        batches.record(batch, "runner", [LineAnswer(2, b"two\n", is_error=False)])
    kept = desk.blobs()  # `purge_blobs` deletes blobs.
    with pytest.raises(NotFound):
        desk.store(batches, b"late\n")
    assert desk.blobs() == kept
    assert not desk.database.read(select(schema.files.c.file_id))


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
        add_tenant(database)
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


def answer(number: int, content: bytes = b"answer\n", *, is_error: bool = False) -> LineAnswer:
    return LineAnswer(number, content, is_error)


def start(desk: Desk, batches: Batches, num_lines: int) -> Batch:
    batch = desk.submit(batches, num_lines)
    batches.claim("runner", 30, ())
    batches.begin(batch.batch_id, "runner", num_lines)
    return batch


def used_bytes(database: Database) -> int:
    ((used,),) = database.read(select(func.sum(schema.files.c.num_bytes)))
    return int(used or 0)


def test_answers_beyond_the_limit_of_bytes_are_not_written_and_earlier_ones_stay(desk: Desk) -> None:
    """Born from a bug: answers were stored beyond the limit, until the disk was full."""
    desk.max_bytes = 2000
    batches = desk.open()
    batch = start(desk, batches, 3)
    batches.record(batch, "runner", [answer(1, b"x" * 800 + b"\n")])
    before, blobs = used_bytes(desk.database), desk.blobs()
    for is_error in (False, True):
        with pytest.raises(QuotaExceeded, match="max_file_bytes_per_tenant"):
            batches.record(batch, "runner", [answer(2, b"y" * 1200, is_error=is_error)])
    assert (used_bytes(desk.database), desk.blobs()) == (before, blobs)
    problem = BatchProblem("file_bytes_exceeded", "too many bytes")
    batches.finish(batch.batch_id, "runner", BatchStatus.FAILED, [problem])
    ended = batches.find("acme", batch.batch_id)
    assert (ended.num_completed, ended.num_failed, ended.error_file_id) == (1, 0, "")
    stored = batches.files.find("acme", ended.output_file_id)
    assert b"".join(batches.files.read(stored.file_id)) == b"x" * 800 + b"\n" and stored.num_bytes == 801


def test_a_charge_is_given_back_if_the_store_fails_or_the_runner_dies(desk: Desk) -> None:
    batches = desk.open()
    batch = start(desk, batches, 3)
    before, blobs, tmp = used_bytes(desk.database), desk.blobs(), desk.directory / "adapters" / "tmp"
    tmp.rename(desk.directory / "elsewhere")
    with pytest.raises(StoreUnavailable):
        batches.record(batch, "runner", [answer(1)])
    with pytest.raises(StoreUnavailable):
        desk.store(batches, b"{}")
    (desk.directory / "elsewhere").rename(tmp)
    assert used_bytes(desk.database) == before and not batches.answered(batch)
    assert not desk.database.read(select(schema.adapter_reservations))
    with desk.database.transaction() as connection:
        stored = StoredFile(batch.output_file_id, "acme", "batch_output", "a", 500, desk.now, None)
        batches.files.charge(connection, stored, "ab" * 32)
    assert used_bytes(desk.database) == before + 500
    desk.now += 31
    assert batches.claim("second", 30, ()) is not None
    assert used_bytes(desk.database) == before
    assert not desk.database.read(select(schema.adapter_reservations))
    batches.record(batch, "second", [answer(1)])
    assert used_bytes(desk.database) == before + len(b"answer\n") and len(desk.blobs()) == len(blobs) + 1


def test_another_host_finishes_a_batch_and_every_host_reads_and_deletes_its_files(
    desk: Desk, database_place: str
) -> None:
    first = desk.open()
    batch = start(desk, first, 4)
    first.record(batch, "runner", [answer(3, b"three\n"), answer(1, b"one\n")])
    with closing(Database(database_place)) as database:
        other = replace(desk, database=database, now=desk.now + 31)
        second = other.open()
        taken = second.claim("second", 30, ())
        assert taken is not None and second.answered(taken) == {1, 3}
        second.record(taken, "second", [answer(4, b"four\n"), answer(2, b"two\n")])
        second.finish(taken.batch_id, "second", BatchStatus.COMPLETED)
        ended = second.find("acme", batch.batch_id)
        assert b"".join(first.files.read(ended.output_file_id)) == b"one\ntwo\nthree\nfour\n"
        first.files.delete("acme", ended.output_file_id)
        assert not list(second.files.read(ended.output_file_id))
        second.files.delete("acme", ended.input_file_id)
    assert not desk.blobs()


@pytest.mark.parametrize("kind", ["objects", "redis"])
def test_files_are_kept_in_every_kind_of_store(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store: Store
    if kind == "redis":
        store = open_store(request.getfixturevalue("redis_server").url)
    else:
        filesystem = LocalFileSystem(skip_instance_cache=True)
        store = ObjectStore(filesystem, str(tmp_path / "objects"), scheme="file")
        store.prepare()
    with closing(store), closing(Database(tmp_path / "slora.db")) as database:
        add_tenant(database)
        catalog = StoredAdapters(Registry(database), store)
        files = Files(database, catalog, FileLimits(100, 1 << 30))
        batches = Batches(database, files, 10)
        batch = start(Desk(database, tmp_path), batches, 9)
        for number in range(9, 0, -1):
            batches.record(batch, "runner", [answer(number, b"%d\n" % number)])
        assert files.compact(batch.output_file_id, -1) == 9
        batches.finish(batch.batch_id, "runner", BatchStatus.COMPLETED)
        assert b"".join(files.read(batch.output_file_id)) == b"".join(b"%d\n" % n for n in range(1, 10))
        for file_id in (batch.input_file_id, batch.output_file_id):
            files.delete("acme", file_id)
        assert not set(store.digests())


def test_small_answers_are_joined_and_a_failure_in_between_loses_none(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "ROWS_WRITTEN", 2)
    batches = desk.open()
    batch = start(desk, batches, 9)
    contents = {number: b"%d " % number * number + b"\n" for number in range(1, 10)}
    for number in (2, 1, 9, 3, 5, 4, 8, 7, 6):
        batches.record(batch, "runner", [answer(number, contents[number])])
    assert len(desk.blobs()) == 10
    expected = b"".join(contents.values())
    output, used = batch.output_file_id, used_bytes(desk.database)
    tmp = desk.directory / "adapters" / "tmp"
    tmp.rename(desk.directory / "elsewhere")
    with pytest.raises(StoreUnavailable):
        batches.files.compact(output, -1)
    (desk.directory / "elsewhere").rename(tmp)
    assert b"".join(batches.files.read(output)) == expected and len(desk.blobs()) == 10
    assert batches.files.compact(output, -1) == 9 and batches.files.compact(output, 9) is None
    assert len(desk.blobs()) == 2 and batches.answered(batch) == set(contents)
    assert b"".join(batches.files.read(output)) == expected
    before = desk.blobs()
    batches.files.compact(output, -1)
    assert desk.blobs() == before, "nothing is left to join"
    batches.finish(batch.batch_id, "runner", BatchStatus.COMPLETED)
    assert used_bytes(desk.database) == used
    assert not desk.database.read(select(schema.adapter_reservations))


def test_a_sweep_drops_the_blobs_of_a_killed_process_and_keeps_those_of_files(desk: Desk) -> None:
    batches = desk.open()
    batch = start(desk, batches, 2)
    batches.record(batch, "runner", [answer(1)])
    kept = desk.blobs()
    leftover = "cd" * 32
    batches.files.put(leftover, b"bytes without a row")
    assert desk.catalog.sweep() == 1
    assert desk.blobs() == kept


def test_a_backup_has_the_bytes_of_files_and_of_running_batches(desk: Desk) -> None:
    batches = desk.open()
    batch = start(desk, batches, 2)
    batches.record(batch, "runner", [answer(1, b"one\n")])
    make_backup(desk.database, desk.catalog.store, {}, desk.directory / "backup")
    restore_backup(desk.directory / "backup", desk.directory / "restored")
    with closing(Database(desk.directory / "restored" / "slora.db")) as database:
        restored = replace(desk, database=database, directory=desk.directory / "restored").open()
        assert b"".join(restored.files.read(batch.input_file_id)).count(b"\n") == 2
        assert b"".join(restored.files.read(batch.output_file_id)) == b"one\n"
        assert restored.answered(restored.find("acme", batch.batch_id)) == {1}


def test_a_cancelled_batch_ends_on_a_full_disk(tmp_path: Path) -> None:
    """Born from a bug: a full disk refused to cancel the batch that had filled it."""
    reserve = DiskReserve(tmp_path / "reserve", 1 << 20)
    with closing(Database(tmp_path / "slora.db", reserve)) as database:
        add_tenant(database)
        desk = Desk(database, tmp_path)
        batches = desk.open()
        batch = start(desk, batches, 2)
        other = desk.submit(batches, 1)
        batches.record(batch, "runner", [answer(1)])
        batches.release(batch.batch_id, "runner")
        reserve.report_full()
        with pytest.raises(DiskFull):
            batches.claim("runner", 30, ())
        batches.cancel("acme", batch.batch_id)
        assert not (tmp_path / "reserve").exists(), "the reserve makes room"
        taken = batches.claim("runner", 30, ())
        assert taken is not None and (taken.batch_id, taken.status) == (batch.batch_id, "cancelling")
        batches.finish(batch.batch_id, "runner", BatchStatus.CANCELLED)
        ended = batches.find("acme", batch.batch_id)
        assert (ended.status, ended.num_completed) == (BatchStatus.CANCELLED, 1)
        batches.files.delete("acme", ended.output_file_id)
        batches.files.delete("acme", ended.input_file_id)
        with pytest.raises(DiskFull):
            batches.claim("runner", 30, ())
        assert batches.find("acme", other.batch_id).status is BatchStatus.VALIDATING
        assert len(desk.blobs()) == 1


def test_lines_are_found_wherever_the_pieces_of_a_file_are_cut() -> None:
    content = b'{"a": 1}\n\n  \n{"b": 2}\n{"c": 3}'
    expected = [(1, b'{"a": 1}'), (4, b'{"b": 2}'), (5, b'{"c": 3}')]
    for size in (1, 2, 7, 100):
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        assert [line for line in split_lines(pieces) if line] == expected


def test_blank_lines_cost_no_step_each_and_too_many_of_them_are_refused() -> None:
    """Born from a bug: files of blank lines kept the threads on which keys are looked up busy for a minute."""
    num_read = 0

    def pieces(piece: bytes, count: int) -> Iterator[bytes]:
        nonlocal num_read
        for _ in range(count):
            num_read += 1
            yield piece

    with pytest.raises(TooManyLines, match="100000 lines, blank lines included"):
        list(split_lines(pieces(b"\n" * (1 << 18), 400)))
    assert num_read <= 2
    blank = b" " * ((1 << 18) - 1) + b"\n"
    assert list(split_lines([blank] * 40)) == [None] * 40
    assert list(split_lines([*[b"\n" * 1000] * 90, b"{}"]))[-1] == (90_001, b"{}")


def test_a_step_reads_a_bounded_number_of_lines() -> None:
    lines = split_lines([b"x\n" * 1000, b"y" * (3 << 20), b"\nz"])
    counts = []
    while (some := take_lines(lines)) is not None:
        counts.append(len(some))
    assert counts == [256, 256, 256, 232, 0, 1, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" + "[]," * 300_000 + "[]]", "values"),
        ("{" + ",".join(f'"{n}":0' for n in range(60_000)) + "}", "fields"),
        ('{"a": ' + "7" * 100_000 + "}", "number"),
    ],
)
def test_a_line_has_the_bounds_of_a_body(text: str, words: str) -> None:
    """Born from a bug: one line of brackets held the interpreter lock for 145 ms."""
    for line in (text, f'{{"custom_id":"a","method":"POST","url":"{PATH}","body":{text}}}'):
        (found,) = (one for one in read_lines([line.encode()], PATH, ()) if one is not None)
        assert found.problem is not None and words in found.problem.message and not found.body


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
from slora.core.request import FinishReason
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
        client = platform.api(key)
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
        with running_platform(tmp_path, ScriptedEngine([deltas_of(b"hi")]), runs_batches=True):
            wait_until(lambda: batches.find(acme, batch_id).is_final)
        batch = batches.find(acme, batch_id)
        output = b"".join(batches.files.read(batch.output_file_id)).splitlines()
    assert batch.status is BatchStatus.COMPLETED and (batch.num_completed, batch.num_failed) == (50, 0)
    assert [json.loads(line)["custom_id"] for line in output] == [f"line {n}" for n in range(50)]


def lease_owner(database: Database) -> str:
    ((owner,),) = database.read(select(schema.batches.c.lease_owner))
    return str(owner)
