"""Options of the whole test run, and environment variables that must be set before a test module is imported."""

import atexit
import gc
import os
import sys
from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

# This sets variables that are read when torch is loaded.
import slora_kernels  # noqa: F401

# isort: split
import torch

# Triton reads this variable when a kernel is defined, and transformers imports triton.
if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    assert "triton" not in sys.modules, "triton was imported before TRITON_INTERPRET=1 could be set"
    os.environ["TRITON_INTERPRET"] = "1"

from tests.support.covering import choose_covering
from tests.support.triton_interpreter import hasten_interpreter

# No deadline and no health check of the speed: machines differ, and a slow one must not fail a test. The quick run
# tries the same examples each time, so that a failure belongs to the change. The soak run tries new ones.
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile(
    "test",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=_SLOW,
    stateful_step_count=50,
    max_examples=25,
)
settings.register_profile(
    "soak", deadline=None, suppress_health_check=_SLOW, stateful_step_count=200, max_examples=1000
)


@pytest.fixture
def set_variables(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets environment variables until the end of the test. None removes one."""

    def set_or_remove(**variables: str | None) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return set_or_remove


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="the same tests with large counts; up to an hour")


def pytest_configure(config: pytest.Config) -> None:
    # Until all tests are imported, a collection takes up to a third of a second and finds nothing.
    gc.disable()
    # Otherwise, packages with extensions report at the end of the process that they leak.
    atexit.register(gc.unfreeze)
    soak = config.getoption("--soak")
    settings.load_profile("soak" if soak else "test")
    if os.environ.get("TRITON_INTERPRET") == "1":
        hasten_interpreter(detect_overflow=soak)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leaves cases to the soak run that wait for a compilation, or without a GPU for Triton's interpreter."""
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get("kernels", "triton") if callspec else "triton"
    is_slow = {
        "cpu": item.get_closest_marker("compiled_late"),
        "triton": item.get_closest_marker("interpreted_slowly") and not torch.cuda.is_available(),
    }
    if is_slow.get(name):
        item.add_marker(pytest.mark.soak)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--soak"):
        _leave_to_soak(items)
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


def _leave_to_soak(items: list[pytest.Item]) -> None:
    """Marks the cases that the marker `covering` leaves out of the quick run."""
    cases = defaultdict[str, list[pytest.Function]](list)
    for item in items:
        is_quick = item.get_closest_marker("covering") and not item.get_closest_marker("soak")
        if is_quick and isinstance(item, pytest.Function):
            cases[item.nodeid.partition("[")[0]].append(item)
    for functions in cases.values():
        (strength,) = next(functions[0].iter_markers("covering")).args
        chosen = choose_covering([function.callspec.params for function in functions], strength)
        for index in set(range(len(functions))) - set(chosen):
            functions[index].add_marker(pytest.mark.soak)


def pytest_collection_finish() -> None:
    """Exempts all that was imported from garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether a test may use large counts: it may then take minutes instead of seconds."""
    return bool(request.config.getoption("--soak"))


_FIGURES: list[str] = []


@pytest.fixture(scope="session")
def report() -> Callable[[str], None]:
    """Accepts a line of figures that a test measured. All lines are printed at the end of the run."""
    return _FIGURES.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _FIGURES:
        terminalreporter.section("figures")
        for line in _FIGURES:
            terminalreporter.line(line)
