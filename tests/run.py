"""Runs the tests: `python -P tests/run.py [options of pytest]`.

Each group of tests is a run of pytest in a process of its own. Four run at once: on two cores, some of them compute
while others wait for a server. They are forked from one process that has imported the largest packages. The output of
a group is printed at its end, and the exit status is 0 only if all groups passed. Its CPU time is without the servers
and engines, which are forked from a process that the groups share.
"""

import atexit
import gc
import importlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

_ROOT = Path(__file__).parents[1]
_NUM_AT_ONCE = 4
# Paths and options of pytest. The tests of a group share models. Groups that wait for servers and the longest of those
# that only compute start first, and the shortest last, so that both cores are busy until the end.
_GROUPS = (
    # Both of these groups start the server of tests/api/conftest.py, and the first one another, which tests kill.
    "tests/api/server",
    "tests/api/adapters tests/api/cli tests/api/console tests/api/generation tests/api/tenants",
    "tests/slora/engine",
    "tests/kernels",
    "tests/api --ignore=tests/api/adapters --ignore=tests/api/cli --ignore=tests/api/console --ignore=tests/api/fuzz"
    " --ignore=tests/api/generation --ignore=tests/api/server --ignore=tests/api/tenants",
    "tests/slora/models",
    "tests/slora --ignore=tests/slora/engine --ignore=tests/slora/models --ignore=tests/slora/llm"
    " --ignore=tests/slora/scheduler --ignore=tests/slora/sampling",
    "tests/slora/scheduler",
    # The server of the last folder wakes 200 times a second until its group ends.
    "tests/adapters tests/api/fuzz",
    "--ignore=tests/slora --ignore=tests/api --ignore=tests/adapters --ignore=tests/kernels",
    "tests/slora/sampling",
    "tests/slora/llm",
)
# `tests.conftest` is the first, because it sets variables that torch and Triton read when they are imported. None of
# these may start a thread, because a forked process has only the thread that forked.
_IMPORTED_ONCE = (
    "tests.conftest",
    "hypothesis.stateful",
    "openai",
    "tests.api.platform",
    "tests.support.engine_stack",
    "tests.support.oracle",
)
# Some of these packages are also plugins of pytest, whose assertions it would rewrite.
_IGNORED = "ignore:Module already imported so cannot be rewritten"


def _start(arguments: list[str], output: int) -> int:
    """Runs pytest in a forked process that writes to the descriptor `output`. Returns the process's id."""
    if pid := os.fork():
        return pid
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    # multiprocessing imports the main module in each process that it starts, except one of this name.
    sys.modules["__main__"] = importlib.import_module("pytest.__main__")
    _end(pytest.main([*arguments, "-W", _IGNORED]))


def _end(code: int) -> NoReturn:
    """Ends this process. Python would also free all that was imported, which takes 3 s of CPU time."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _import_packages() -> None:
    # A collection takes up to a third of a second and finds nothing.
    gc.disable()
    sys.path.insert(0, str(_ROOT))
    importlib.import_module(_IMPORTED_ONCE[0])
    # The groups share the process that has imported the engine and the server. It imports while this one does.
    stack = importlib.import_module("tests.support.engine_stack")
    importlib.import_module("tests.support.engine_zygote").start_zygote(stack.SOURCES)
    for name in _IMPORTED_ONCE[1:]:
        importlib.import_module(name)
    # A process that collects an object copies its page of memory.
    gc.freeze()


def _run_groups(options: list[str], folder: Path) -> Iterator[int]:
    """Yields the exit code of each group. folder: for the files of the tests.

    Each group has a folder of its own. In pytest's common one, each run removes folders of earlier runs at its end, and
    runs that end at the same time disturb each other.
    """
    waiting, running = list(_GROUPS), dict[int, tuple[str, int, float]]()
    while waiting or running:
        while waiting and len(running) < _NUM_AT_ONCE:
            group, output = waiting.pop(0), os.memfd_create("output")
            arguments = [*group.split(), f"--basetemp={folder / str(len(waiting))}", *options]
            running[_start(arguments, output)] = group, output, time.monotonic()
        pid, status, used = os.wait4(-1, 0)
        group, output, started_at = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        wall_s, cpu_s = time.monotonic() - started_at, used.ru_utime + used.ru_stime
        with open(output, errors="replace", encoding="utf-8") as file:
            file.seek(0)
            print(f"pytest {group}", file.read(), sep="\n", end="")
        print(f"exit status {code} after {wall_s:.0f} s, with {cpu_s:.0f} s of CPU time\n", flush=True)
        yield code


def main(options: list[str]) -> int:
    os.chdir(_ROOT)
    _import_packages()
    folder = Path(tempfile.mkdtemp(prefix="slora-tests-"))
    codes = set(_run_groups(options, folder))
    shutil.rmtree(folder, ignore_errors=True)
    # The options may select no test of a group.
    return int(not codes <= {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED})


if __name__ == "__main__":
    _end(main(sys.argv[1:]))
