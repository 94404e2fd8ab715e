"""A small file is complete whenever its writer dies. If the disk was full, it is absent or has its old content."""

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slora_adapters.process.durable_file import create_durably, replace_durably
from tests.support.file_limit import largest_file
from tests.support.forked_program import ForkedProgram

# A process that dies at its n-th file system operation (an audit event of Python) within the call named in argv.
DIES = """
import os, signal, sys
from pathlib import Path
from slora_adapters.process import durable_file
write, path, left = getattr(durable_file, sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
def count(event, arguments):
    global left
    if event in ("open", "os.link", "os.rename", "os.remove", "tempfile.mkstemp"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
write(path, b"new" * 100)
left = 1 << 60
print("survived")
"""


def run_and_die(function: str, path: Path, after: int) -> bool:
    """Runs the process. Returns whether it completed the call."""
    status, output = ForkedProgram(DIES, function, path, after).finish()
    assert status in (0, -9), output
    return status == 0


@pytest.mark.parametrize(("function", "before"), [("create_durably", None), ("replace_durably", b"old")])
def test_a_writer_killed_at_any_operation_leaves_a_whole_file_or_the_old_state(
    tmp_path: Path, function: str, before: bytes | None
) -> None:
    path, after = tmp_path / "secret", 0
    while True:
        path.unlink(missing_ok=True)
        if before is not None:
            path.write_bytes(before)
        survived = run_and_die(function, path, after)
        found = path.read_bytes() if path.exists() else None
        assert found in ((b"new" * 100,) if survived else (before, b"new" * 100))
        if survived:
            break
        after += 1
    assert after >= 3, "it was killed at several operations"


def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    create_durably(tmp_path / "made", b"x")
    replace_durably(tmp_path / "replaced", b"x")
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_of_concurrent_creators_exactly_one_creates_the_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda n: create_durably(path, b"%d" % n), range(8)))
    assert made.count(True) == 1 and path.read_bytes() == b"%d" % made.index(True)
    assert os.listdir(tmp_path) == ["secret"], "no temporary file is left"


@pytest.mark.parametrize("write", [create_durably, replace_durably])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, write: Callable[[Path, bytes], object]) -> None:
    with largest_file(0), pytest.raises(OSError, match="File too large"):
        write(tmp_path / "secret", b"x")
    assert os.listdir(tmp_path) == []


def test_writing_unchanged_content_needs_no_space(tmp_path: Path) -> None:
    replace_durably(tmp_path / "state", b"same")
    with largest_file(0):
        replace_durably(tmp_path / "state", b"same")
