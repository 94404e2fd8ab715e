"""Content that is expensive to make and the same for all clients."""

from collections.abc import Callable
from threading import Lock


class LazyContent:
    """Content that the first request makes by calling `make`. Requests that arrive meanwhile wait for the same
    content.
    """

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._lock = Lock()
        self._content: bytes | None = None

    def content(self) -> bytes:
        with self._lock:
            if self._content is None:
                self._content = self._make()
            return self._content
