import asyncio
import errno
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from slora_adapters.process import shortage
from slora_adapters.process.shortage import find_shortage, run_despite_shortage, run_event_loop

NO_THREAD = RuntimeError("can't start new thread")
SHORT = (errno.EAGAIN, errno.EMFILE, errno.ENOMEM)


def test_a_lack_of_threads_processes_files_or_memory_is_recognized() -> None:
    lacking = [NO_THREAD, MemoryError(), *(OSError(number, "") for number in SHORT)]
    assert all(map(find_shortage, lacking)) and find_shortage(ExceptionGroup("", lacking))
    others = [RuntimeError("a bug"), OSError(errno.ENOENT, ""), OSError("no number"), ValueError()]
    assert not any(map(find_shortage, [*others, ExceptionGroup("", [NO_THREAD, ValueError()])]))


def test_background_work_starts_again_after_a_shortage_and_fails_with_a_bug(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shortage, "_MIN_PAUSE_S", 0)
    errors: list[Exception] = [NO_THREAD, OSError(errno.EMFILE, "too many open files")]

    async def follow() -> None:
        if errors:
            raise errors.pop(0)

    asyncio.run(run_despite_shortage(follow))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "the machine lacks processes or threads (ulimit -u, pids.max)", "the machine lacks open files (ulimit -n)",
    ]  # fmt: skip
    errors.append(KeyError("a bug"))
    with pytest.raises(KeyError):
        asyncio.run(run_despite_shortage(follow))


def test_work_on_threads_is_done_by_the_threads_that_the_machine_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, first = threading.Thread.start, threading.Event()

    def refuse_further(thread: threading.Thread) -> None:
        if first.is_set():
            raise NO_THREAD
        first.set()
        start(thread)

    free: Future[None] = Future()

    async def work() -> None:
        monkeypatch.setattr(threading.Thread, "start", refuse_further)
        calls = [asyncio.create_task(asyncio.to_thread(free.result)) for _ in range(8)]
        await asyncio.sleep(0)
        free.set_result(None)
        await asyncio.gather(*calls)

    run_event_loop(work())  # Joining the thread needs another thread, which is refused, too.
    assert first.is_set()


PRINTS = """
import logging, os, sys
from slora_adapters.process.logs import open_missing_streams, print_line
open_missing_streams()
logging.basicConfig(stream=sys.stderr)
for line in ("first", "a letter: \\u0416", "last"):
    print_line(line)
print_line("an error", sys.stderr)
with open(os.devnull) as file:
    assert file.fileno() > 2
raise SystemExit(7)
"""


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "redirection", [">/dev/full", ">&-", "2>&-", ">&- 2>&- <&-", "2>/dev/full", "| true", ""]
)
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_output_for_people_never_decides_over_the_process(redirection: str, encoding: str) -> None:
    program = f'{sys.executable} -P -c "$PROGRAM" {redirection}; exit ${{PIPESTATUS[0]}}'
    variables = {"PROGRAM": PRINTS, "PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": encoding}
    run = subprocess.run(
        ["bash", "-c", program],
        env=variables,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    assert run.returncode == 7 and "Traceback" not in run.stderr and "Exception ignored" not in run.stderr
    if redirection == "":
        assert run.stdout.splitlines()[::2] == ["first", "last"]
