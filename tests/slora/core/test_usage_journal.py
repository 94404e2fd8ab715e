"""A usage record that was reported durable is shipped exactly once, whatever happens to its writer."""

import asyncio
import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora.core.errors import UsageJournalFull
from slora.core.request import RequestUsage
from slora.core.usage_journal import (
    MAX_LINE_BYTES,
    BadLine,
    ClosedSegment,
    OpenSegment,
    UsageJournal,
    UsageRecord,
    closed_segments,
)
from tests.support.event_loop import on_event_loop

SMALL = 4096


def make_record(number: int = 0) -> UsageRecord:
    usage = RequestUsage(prompt_tokens=number, cached_tokens=1, generated_tokens=2, page_seconds=0.25)
    return UsageRecord(f"request-{number}", "acme", "key", None, 1.5, usage)


def ship(directory: Path) -> list[UsageRecord]:
    found = []
    for segment in closed_segments(directory):
        found += segment.records
        segment.delete()
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < limit_s
        time.sleep(0.01)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[UsageJournal]:
    journal = UsageJournal(tmp_path / "usage", SMALL)
    yield journal
    journal.close()


numbers = st.integers(0, 2**60)
records = st.builds(
    UsageRecord,
    st.text(max_size=8),
    st.text(max_size=8),
    st.text(max_size=8),
    st.none() | st.text("0123456789abcdef", min_size=64, max_size=64),
    st.floats(0, 2**40),
    st.builds(RequestUsage, numbers, numbers, numbers, numbers, st.floats(0, 2**40)),
    st.booleans(),
)


@given(records)
def test_a_record_survives_the_way_through_its_line(record: UsageRecord) -> None:
    line = record.to_line()
    assert UsageRecord.from_line(line) == record
    assert line.count(b"\n") == 1 and b"\0" not in line and len(line) <= MAX_LINE_BYTES


@given(st.integers(0), st.integers(1, 255))
def test_a_record_with_a_changed_byte_is_refused(position: int, flip: int) -> None:
    line = bytearray(make_record().to_line().rstrip(b"\n"))
    line[position % len(line)] ^= flip
    # A changed checksum digit may have the same value: `A` for `a`.
    if bytes(line).lower() != make_record().to_line().rstrip(b"\n").lower():
        with pytest.raises(BadLine):
            UsageRecord.from_line(bytes(line))


def test_fields_of_a_newer_release_are_ignored() -> None:
    body = make_record().to_line()[9:-1].replace(b"{", b'{"color":"red",', 1)
    assert UsageRecord.from_line(b"%08x %s\n" % (zlib.crc32(body), body)) == make_record()


def test_records_are_shipped_once_their_segment_is_closed(journal: UsageJournal, tmp_path: Path) -> None:
    written = [make_record(number) for number in range(3)]
    for record in written:
        journal.append(record).result()
    assert not ship(tmp_path / "usage"), "the open segment is still locked"
    journal.rotate().result()
    assert ship(tmp_path / "usage") == written
    journal.rotate().result()
    assert not ship(tmp_path / "usage")


def test_a_record_is_not_durable_before_its_sync(
    journal: UsageJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_sync, num_syncs = threading.Event(), []

    def sync(descriptor: int) -> None:
        assert may_sync.wait(300)
        num_syncs.append(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    futures = [journal.append(make_record(number)) for number in range(10)]
    assert not any(future.done() for future in futures)
    may_sync.set()
    for future in futures:
        future.result(30)
    assert len(num_syncs) <= 2, "records that wait at the same time share one sync"


@on_event_loop
async def test_a_cancelled_caller_leaves_the_record_in_the_journal(
    journal: UsageJournal, tmp_path: Path
) -> None:
    task = asyncio.create_task(journal.write(make_record(7)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await journal.write(make_record(8))
    journal.rotate().result()
    assert ship(tmp_path / "usage") == [make_record(7), make_record(8)]


def test_many_records_fill_several_segments_in_order(journal: UsageJournal, tmp_path: Path) -> None:
    written = [make_record(number) for number in range(100)]
    for future in [journal.append(record) for record in written]:
        future.result()
    journal.close()
    assert len(list((tmp_path / "usage").iterdir())) > 3
    assert sorted(ship(tmp_path / "usage"), key=lambda one: one.usage.prompt_tokens) == written
    assert not list((tmp_path / "usage").iterdir())


def test_a_segment_is_shipped_by_one_process_at_a_time(journal: UsageJournal, tmp_path: Path) -> None:
    journal.append(make_record()).result()
    journal.rotate().result()
    first = closed_segments(tmp_path / "usage")
    segment = next(first)
    assert not ship(tmp_path / "usage")
    first.close()  # shipped to a database that did not answer
    assert ship(tmp_path / "usage") == segment.records == [make_record()]


@pytest.mark.parametrize("keep", range(5))
def test_records_that_were_durable_at_a_kill_are_shipped(tmp_path: Path, keep: int) -> None:
    command = [sys.executable, "-P", str(Path(__file__).with_name("usage_writer.py")), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(1 + 5 * keep):
            writer.stdout.readline()
        writer.kill()
        last = [*writer.stdout.read().split(), b"0"][0]
    shipped = {record.request_id: record.usage for record in ship(tmp_path)}
    for number in range(int(last)):
        assert shipped[f"request-{number}"] == RequestUsage(prompt_tokens=number, page_seconds=number / 8)
    assert not list(tmp_path.iterdir())


lines = [make_record(number).to_line() for number in range(4)]


@given(st.integers(0, sum(map(len, lines))), st.integers(0, 40))
def test_a_torn_tail_loses_no_complete_record(length: int, num_nuls: int) -> None:
    segment = ClosedSegment(Path("torn"), b"".join(lines)[:length] + bytes(num_nuls))
    complete = [index for index in range(4) if length >= sum(map(len, lines[: index + 1]))]
    assert segment.records == [make_record(index) for index in complete]


@given(st.integers(0, 3), st.integers(0), st.binary(min_size=1, max_size=20))
def test_damage_in_the_middle_costs_one_record(index: int, position: int, noise: bytes) -> None:
    whole = [line.removesuffix(b"\n") for line in lines]
    at = position % len(whole[index])
    damaged = bytearray(whole[index])
    damaged[at : at + len(noise)] = noise
    content = b"\n".join([*whole[:index], bytes(damaged), *whole[index + 1 :]]) + b"\n"
    segment = ClosedSegment(Path("damaged"), content)
    others = [make_record(number) for number in range(4) if number != index]
    assert [one for one in segment.records if one != make_record(index)] == others


def test_a_damaged_segment_is_kept_and_its_offset_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.usage").write_bytes(lines[0] + b"damaged\n" + lines[1])
    assert ship(tmp_path) == [make_record(0), make_record(1)]
    assert f"byte {len(lines[0])} is damaged" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["a.corrupt"]


def test_a_journal_at_its_limit_refuses_requests_until_it_was_shipped(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, SMALL, max_bytes=3 * SMALL)
    journal.check()
    num_written = 0
    with pytest.raises(UsageJournalFull, match=f"limit is {3 * SMALL}"):
        while True:
            journal.check()
            journal.append(make_record(num_written)).result()
            num_written += 1
    for number in range(num_written, num_written + 5):  # requests in progress
        journal.append(make_record(number)).result()
    num_shipped = len(ship(tmp_path))
    journal.append(make_record()).result()
    wait_until(lambda: not is_full(journal))
    journal.close()
    assert num_shipped + len(ship(tmp_path)) == num_written + 6


def is_full(journal: UsageJournal) -> bool:
    try:
        journal.check()
    except UsageJournalFull:
        return True
    return False


@contextmanager
def full_disk() -> Iterator[None]:
    error = OSError(errno.ENOSPC, "No space left on device")
    with patch.object(os, "posix_fallocate", side_effect=error):
        yield


def test_records_in_progress_need_no_free_space(journal: UsageJournal, tmp_path: Path) -> None:
    first, second = (SMALL // len(make_record(10).to_line()) for _ in range(2))
    with full_disk():
        for number in range(10, 10 + first + second):
            journal.append(make_record(number)).result()
        with pytest.raises(UsageJournalFull, match="No space left"):
            journal.check()
        with pytest.raises(UsageJournalFull, match="No space left"):
            journal.append(make_record(99)).result()
    journal.append(make_record(100)).result()
    journal.check()
    journal.close()
    assert len(ship(tmp_path / "usage")) == first + second + 1


def test_a_full_disk_refuses_no_request_while_there_is_room_for_many_records(
    journal: UsageJournal, tmp_path: Path
) -> None:
    with full_disk():
        journal.append(make_record(1)).result()
        journal.rotate().result()
        assert ship(tmp_path / "usage") == [make_record(1)]
        journal.check()
        journal.append(make_record(2)).result()
        journal.rotate().result()
        journal.check()
        assert not ship(tmp_path / "usage"), "there is no spare segment, so the open one stays open"
        num_written = 1
        while not is_full(journal):
            journal.append(make_record(3)).result()
            num_written += 1
    assert SMALL // 2 < num_written * len(make_record(3).to_line()) < SMALL


def test_a_record_that_cannot_be_written_is_logged_in_full(
    journal: UsageJournal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(UsageJournalFull):
        journal.append(make_record(5)).result()
    assert make_record(5).to_line().decode().strip() in caplog.text


def test_records_of_a_failed_sync_are_written_to_another_segment(
    journal: UsageJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, failures = os.fdatasync, [OSError(errno.EIO, "Input/output error")]

    def fail_once(descriptor: int) -> None:
        if failures:
            raise failures.pop()
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", fail_once)
    journal.append(make_record(1)).result()
    journal.close()
    assert make_record(1) in ship(tmp_path / "usage")


def test_a_journal_starts_on_a_full_disk_and_refuses_requests(tmp_path: Path) -> None:
    with full_disk():
        journal = UsageJournal(tmp_path, SMALL)
        with pytest.raises(UsageJournalFull):
            journal.check()
    wait_until(lambda: not is_full(journal))
    journal.close()
    assert ship(tmp_path) == []


def test_a_journal_on_a_full_disk_continues_the_segments_of_an_earlier_process(tmp_path: Path) -> None:
    (tmp_path / "torn.usage").write_bytes((lines[0] + lines[1][:-5]).ljust(SMALL, b"\0"))
    (tmp_path / "short.usage").write_bytes(lines[0])
    with closing(UsageJournal(tmp_path, SMALL)) as journal:
        journal.append(make_record(1)).result()
    with full_disk():
        with closing(UsageJournal(tmp_path, SMALL)) as journal:
            journal.check()
            journal.append(make_record(2)).result()
        assert {make_record(1), make_record(2)} <= set(ship(tmp_path))
        with closing(UsageJournal(tmp_path, SMALL)) as journal, pytest.raises(UsageJournalFull):
            journal.check()


def test_an_empty_file_that_is_taken_away_before_its_lock_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["first", "second"])

    def choose_name(num_bytes: int) -> str:
        return next(names)

    monkeypatch.setattr("slora.core.usage_journal.secrets.token_hex", choose_name)
    flock = fcntl.flock

    def ship_first(descriptor: int, operation: int) -> None:
        (tmp_path / "first.usage").unlink(missing_ok=True)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", ship_first)
    segment = OpenSegment.create(tmp_path, SMALL)
    segment.append(lines[0])
    segment.close()
    assert [path.name for path in tmp_path.iterdir()] == ["second.usage"]
