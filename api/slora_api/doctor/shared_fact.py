"""A fact that several checks need and that is slow to determine."""

from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from slora.errors import SloraError

__all__ = ["SharedFact"]

T = TypeVar("T")


class SharedFact(Generic[T]):
    """Calls `find` once, on the first thread that asks. All threads get its result or its error."""

    def __init__(self, find: Callable[[], T]) -> None:
        self._find = find
        self._lock = Lock()
        self._found: T | None = None
        self._error: Exception | None = None

    def get(self) -> T:
        with self._lock:
            if self._found is None and self._error is None:
                try:
                    self._found = self._find()
                except (SloraError, OSError, ValueError) as error:
                    self._error = error
            if self._found is None:
                assert self._error is not None
                raise self._error
            return self._found

    def get_if_known(self) -> T | None:
        """Returns the fact, or None if `find` failed. Another check then shows the error."""
        try:
            return self.get()
        except (SloraError, OSError, ValueError):
            return None
