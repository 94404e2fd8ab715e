"""Work that goes on beside a test."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class RepeatingThread(threading.Thread):
    """Makes a call repeatedly until it is stopped. `check` raises the exception of a failed call."""

    def __init__(self, call: Callable[[], object], pause_s: float) -> None:
        super().__init__()
        self._call, self._pause_s = call, pause_s
        self._stopped = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopped.wait(self._pause_s):
                self._call()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stopped.set()
        self.join()


@contextmanager
def repeating(*calls: Callable[[], object], pause_s: float = 0.0) -> Iterator[Callable[[], None]]:
    """Makes all calls repeatedly, each on its own thread. Yields a function that raises an exception of any thread.

    pause_s: before each call.
    """
    threads = [RepeatingThread(call, pause_s) for call in calls]
    for thread in threads:
        thread.start()

    def check() -> None:
        for thread in threads:
            thread.check()

    try:
        yield check
    finally:
        for thread in threads:
            thread.stop()
    check()
