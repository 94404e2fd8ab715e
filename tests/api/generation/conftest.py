"""A platform with a scripted engine, which most tests of answers need. A module overrides what it needs otherwise."""

from collections.abc import Callable, Iterator

import pytest

from slora_api.http import sse
from tests.api.platform import Platform
from tests.api.scripted_engine import ScriptedEngine, deltas_of
from tests.support.slow_callbacks import Recorder, recording


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    with recording() as running:
        yield running


@pytest.fixture(scope="module")
def shared(start_platform: Callable[..., Platform]) -> Platform:
    return start_platform(ScriptedEngine())


@pytest.fixture
def platform(shared: Platform) -> Platform:
    """The shared platform. Its engine answers "Hi!"."""
    shared.engine.reset(deltas_of(b"Hi!"))
    return shared


@pytest.fixture(scope="module")
def key(shared: Platform) -> str:
    return shared.key("acme")


@pytest.fixture
def hold_heads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets for how long the head of a stream is held, and after which pause a comment comes: less than on a server."""

    def hold(hold_s: float = 0.01, keep_alive_s: float = 0.01) -> None:
        monkeypatch.setattr(sse, "HOLD_S", hold_s)
        monkeypatch.setattr(sse, "KEEP_ALIVE_S", keep_alive_s)

    return hold
