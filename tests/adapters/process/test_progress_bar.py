"""Progress bars are for people at a terminal, and for nobody else."""

import io
import time
from contextlib import redirect_stderr

from slora_adapters.process.progress_bar import count_reads, show_progress, track_progress
from tests.support.terminal import Terminal


def test_a_terminal_shows_what_is_done_and_the_rate() -> None:
    with redirect_stderr(Terminal()) as terminal, show_progress("Copying", 4, "blob") as advance:
        advance(4)
    assert "Copying" in terminal.getvalue() and "blob/s" in terminal.getvalue()


def test_a_loop_shows_which_part_of_its_items_is_done() -> None:
    shown = []
    with redirect_stderr(Terminal()) as terminal:
        for item in track_progress("Rounds", range(3), "round"):
            time.sleep(0.11)  # A bar is drawn ten times a second.
            shown.append(f"{item}/3" in terminal.getvalue())
    assert shown == [True] * 3 and "round/s" in terminal.getvalue()


def test_nothing_is_shown_without_a_terminal_or_if_the_caller_is_quiet() -> None:
    for stderr, is_quiet in ((io.StringIO(), False), (Terminal(), True)):
        with redirect_stderr(stderr), show_progress("Copying", 4, is_quiet=is_quiet) as advance:
            advance(4)
        assert stderr.getvalue() == ""


def test_each_read_of_a_counted_file_advances_the_bar_by_its_bytes() -> None:
    found: list[int] = []
    file = count_reads(io.BytesIO(b"a" * 10), found.append)
    assert file.read(6) + file.read() == b"a" * 10 and found == [6, 4]
    assert file.seek(0) == 0
