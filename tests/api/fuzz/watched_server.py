"""A server under fuzzing, and its oracle. These properties must hold for all input:

1. There is no 5xx except documented ones, and every error has OpenAI's form.
2. No callback of the event loop uses more than 20 ms of CPU time.
3. The memory of the API process returns to within 32 MiB of its start.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
import psutil

from tests.api.served import Served, serving, wait_for
from tests.api.server.test_server import upload
from tests.support.recorded_slora import recorded_slora, slow_callbacks
from tests.support.slow_callbacks import SlowCallback

__all__ = ["MAX_GROWTH_BYTES", "PATIENCE_S", "WatchedServer", "explain_answer", "watched_server"]

MAX_GROWTH_BYTES = 32 << 20
# A request may set a deadline for its first token that the engine can't meet.
_DOCUMENTED = {(503, "deadline_missed")}
_FIELDS = {"message", "type", "param", "code"}
_REPEATS = 3
# The longest that a test waits for an answer.
PATIENCE_S = 120

T = TypeVar("T")


@dataclass
class WatchedServer:
    """key: the key of a tenant whose default adapter is `small`."""

    served: Served
    slow_file: Path
    key: str
    rss_bytes: int = 0
    slow: list[str] = field(default_factory=list)

    def client(self, key: str | None = None) -> httpx.Client:
        client = self.served.client(key or self.key)
        client.timeout = httpx.Timeout(PATIENCE_S)
        return client

    def begin(self) -> None:
        """Starts the measurement of memory and callbacks."""
        self.rss_bytes = self._rss_bytes()
        self.slow.clear()

    def send(self, sent: object, send: Callable[[], T]) -> T:
        """Sends a request. Records a slow callback only if the same request causes one each of three more times.

        CPU time is inexact on a busy virtual machine: one of 10,000 small requests appeared to take 24 ms, and one of
        another 10,000 did so twice.
        """
        answer, slow = self._send_watched(send)
        for _ in range(_REPEATS):
            if not slow:
                return answer
            _, slow = self._send_watched(send)
        self.slow += [f"{one}\n    while the server answered {sent}" for one in slow]
        return answer

    def _send_watched(self, send: Callable[[], T]) -> tuple[T, list[SlowCallback]]:
        since_s = time.time()
        return send(), slow_callbacks(self.slow_file, since_s)

    def check(self) -> None:
        """Checks properties 2 and 3 for all requests since `begin`."""
        self.served.alive()
        assert not self.slow, f"{len(self.slow)} slow callbacks:\n" + "\n".join(self.slow[:5])
        limit = self.rss_bytes + MAX_GROWTH_BYTES
        wait_for(lambda: self._rss_bytes() <= limit or None, self.served.alive)

    def _rss_bytes(self) -> int:
        return int(psutil.Process(self.served.process.pid).memory_info().rss)


def explain_answer(status: int, content: bytes, content_type: str) -> str | None:
    """Checks property 1 for one answer. Returns the fault, or None."""
    if content_type.startswith("text/event-stream"):
        events = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: ")]
        if not events:
            return "a stream without an event"
        failed = [event for event in events if event.startswith(b'{"error"')]
        return _explain_error(status, failed[0]) if failed else None
    if status < 400:
        return None
    return _explain_error(status, content)


def _explain_error(status: int, content: bytes) -> str | None:
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return f"{status} without an error object: {content[:200]!r}"
    if not error.keys() >= _FIELDS or not isinstance(error["message"], str) or not error["message"]:
        return f"{status} with an error of another form: {content[:200]!r}"
    is_server_error = status >= 500 or error["type"] in ("server_error", "service_unavailable")
    if is_server_error and (503, error["code"]) not in _DOCUMENTED:
        return f"{status}: {content[:300]!r}"
    return None


@contextmanager
def watched_server(base: Path, adapter: Path, folder: Path) -> Iterator[WatchedServer]:
    slow_file = folder / "slow.jsonl"
    command = recorded_slora(slow_file)
    with serving(base, folder / "data", "--lora-root", str(adapter.parent), command=command) as served:
        served.wait_until_ready()
        server = WatchedServer(served, slow_file, served.make_key("fuzz", "small"))
        upload(served, server.key, "small", adapter).raise_for_status()
        yield server
