"""A journal entry takes effect at once in every process of the host, needs no disk space, and survives a restart."""

import os
from pathlib import Path

from slora_api.keys.key_store import MAX_ENTRIES, RevocationJournal
from tests.support.file_limit import largest_file
from tests.support.forked_program import ForkedProgram

# For each key id that is written to a pipe, prints whether it is revoked.
READER = """
import sys
from pathlib import Path
from slora_api.keys.key_store import RevocationJournal
journal = RevocationJournal(Path(sys.argv[1]))
print("ready", flush=True)
for line in open(sys.argv[2]):
    print(line.strip() in journal, flush=True)
"""


def test_an_entry_on_a_full_disk_is_visible_to_another_process_at_once(tmp_path: Path) -> None:
    path, pipe = tmp_path / "revocations", tmp_path / "pipe"
    journal = RevocationJournal(path)
    os.mkfifo(pipe)
    with ForkedProgram(READER, path, pipe) as reader:
        assert reader.output.readline() == "ready\n"
        with pipe.open("w", encoding="utf-8") as asked:

            def is_revoked(key_id: str) -> bool:
                print(key_id, file=asked, flush=True)
                return reader.output.readline() == "True\n"

            assert not is_revoked("aaaaaaaa")
            size = path.stat().st_size
            with largest_file(size):  # no file may grow
                assert journal.add("aaaaaaaa") and journal.add("bbbbbbbb")
            assert is_revoked("aaaaaaaa") and is_revoked("bbbbbbbb") and not is_revoked("cccccccc")
            journal.remove(["aaaaaaaa"])
            assert not is_revoked("aaaaaaaa") and is_revoked("bbbbbbbb")
    journal.close()
    again = RevocationJournal(path)
    assert again.pending() == {"bbbbbbbb"} and "bbbbbbbb" in again
    again.close()


def test_adding_an_existing_entry_is_a_no_op(tmp_path: Path) -> None:
    journal = RevocationJournal(tmp_path / "revocations")
    for _ in range(3):
        assert journal.add("aaaaaaaa")
    journal.remove(["aaaaaaaa", "unknown1"])
    assert journal.pending() == frozenset()
    journal.close()


def test_entries_that_the_journal_cannot_hold_are_kept_in_memory(tmp_path: Path) -> None:
    journal = RevocationJournal(tmp_path / "revocations")
    assert all(journal.add(f"{number:08}") for number in range(MAX_ENTRIES))
    assert not journal.add("one-more") and "one-more" in journal
    assert len(journal.pending()) == MAX_ENTRIES + 1
    journal.remove([f"{number:08}" for number in range(MAX_ENTRIES)])
    assert journal.pending() == {"one-more"} and journal.add("a-second")
    journal.close()


def test_without_room_for_the_journal_entries_hold_in_this_process(tmp_path: Path) -> None:
    with largest_file(0):
        journal = RevocationJournal(tmp_path / "revocations")
        assert not journal.add("aaaaaaaa")
    assert "aaaaaaaa" in journal and "bbbbbbbb" not in journal
    journal.remove(["aaaaaaaa"])
    assert "aaaaaaaa" not in journal
    journal.close()
