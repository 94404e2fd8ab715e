"""Records reach the ledger exactly once: after crashes of either side, outages, and from journals of dead processes."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slora.core.request import RequestUsage
from slora.core.usage_journal import UsageJournal, UsageRecord
from slora_adapters.database.database import Database
from slora_adapters.process.full_disk import DiskReserve
from slora_api.usage.usage_ledger import DAY_S, MINUTE_S, UsageFilter, UsageLedger
from slora_api.usage.usage_shipper import UsageShipper
from tests.api.served import wait_for
from tests.postgresql_server import PostgresqlServer
from tests.support.forked_program import ForkedProgram

NOW = 1_700_000_000.0
# Writes records, says so, and waits to be killed.
WRITER = """
import sys, time
from pathlib import Path
from slora.core.request import RequestUsage
from slora.core.usage_journal import UsageJournal
from slora.core.usage_journal import UsageRecord

journal = UsageJournal(Path(sys.argv[1]))
for number in range(50):
    last = journal.append(UsageRecord(f"dead{number}", "acme", "key1", None, 1e9, RequestUsage(1, 0, 2)))
last.result()
print("written", flush=True)
time.sleep(600)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "usage"


@pytest.fixture
def journal(directory: Path) -> Iterator[UsageJournal]:
    with closing(UsageJournal(directory)) as journal:
        yield journal


@pytest.fixture
def ledger(database_place: str) -> Iterator[UsageLedger]:
    with closing(Database(database_place)) as database:
        yield UsageLedger(database)


def write(journal: UsageJournal, *names: str, ended_at: float = NOW) -> None:
    for name in names:
        journal.append(UsageRecord(name, "acme", "key1", None, ended_at, RequestUsage(1, 0, 2))).result()


def count(ledger: UsageLedger, width: int = DAY_S) -> int:
    return sum(row.num_requests for row in ledger.read(UsageFilter(width, 0, 1 << 40), None, 1000))


def test_records_are_shipped_once_and_their_files_deleted(
    journal: UsageJournal, directory: Path, ledger: UsageLedger
) -> None:
    shipper = UsageShipper(journal, directory, ledger, 36_500)
    unused = shipper.measure_journal()
    for names in (("a", "b"), ("c",), ()):
        write(journal, *names)
        shipper.ship()
    assert count(ledger) == 3
    assert shipper.measure_journal() == unused and len(list(directory.iterdir())) == 2, "open and spare"


def test_a_segment_that_was_committed_but_not_deleted_is_counted_once(
    journal: UsageJournal, directory: Path, ledger: UsageLedger, tmp_path: Path
) -> None:
    shipper = UsageShipper(journal, directory, ledger, 36_500)
    write(journal, "a", "b")
    journal.rotate().result()
    shutil.copytree(directory, tmp_path / "copy")
    shipper.ship()
    for path in (tmp_path / "copy").iterdir():
        shutil.copy(path, directory)
    shipper.ship()
    assert count(ledger) == 2 and len(list(directory.iterdir())) == 2


def test_the_journal_of_a_killed_process_is_shipped_by_another(
    journal: UsageJournal, directory: Path, ledger: UsageLedger
) -> None:
    shipper = UsageShipper(journal, directory, ledger, 36_500)
    with ForkedProgram(WRITER, directory) as writer:
        assert writer.output.readline() == "written\n"
        shipper.ship()
        assert count(ledger) == 0, "its writer lives, and ships it itself"
        writer.kill()
        writer.wait()
    shipper.ship()
    assert count(ledger) == 50


def test_during_an_outage_records_stay_in_few_files_and_the_error_is_logged_once(
    directory: Path, journal: UsageJournal, postgresql_server: PostgresqlServer,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "slora_api.usage.usage_shipper")
    now = NOW
    with closing(Database(postgresql_server.make_database())) as database:
        ledger = UsageLedger(database)
        shipper = UsageShipper(journal, directory, ledger, 36_500, lambda: now)
        write(journal, "before")
        shipper.ship()
        assert shipper.lag_s == 0
        postgresql_server.kill()
        for number in range(4):
            write(journal, f"during{number}")
            shipper.ship()
        now += 60
        assert shipper.lag_s == 60
        assert len(list(directory.iterdir())) == 2, "the open segment and the spare"
        postgresql_server.start()
        wait_for(lambda: shipper.ship() or shipper.lag_s == 0 or None)
        assert count(ledger) == 5
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2 and "until the database answers" in messages[0] and "again" in messages[1]


def test_on_a_full_disk_records_stay_in_the_journal(
    directory: Path, journal: UsageJournal, tmp_path: Path
) -> None:
    reserve = DiskReserve(tmp_path / "reserve", 1 << 20)
    with closing(Database(tmp_path / "slora.db", reserve)) as database:
        ledger = UsageLedger(database)
        shipper = UsageShipper(journal, directory, ledger, 36_500)
        reserve.report_full()
        write(journal, "a")
        shipper.ship()
        assert count(ledger) == 0
        reserve.watch()
        shipper.ship()
        assert count(ledger) == 1


def test_only_the_sums_of_days_outlive_the_retention(
    journal: UsageJournal, directory: Path, ledger: UsageLedger
) -> None:
    now = NOW
    shipper = UsageShipper(journal, directory, ledger, 32, lambda: now)
    write(journal, "a", ended_at=now)
    shipper.ship()
    assert count(ledger, MINUTE_S) == 1
    now += 34 * DAY_S
    shipper.ship()
    assert (count(ledger, MINUTE_S), count(ledger)) == (0, 1)
