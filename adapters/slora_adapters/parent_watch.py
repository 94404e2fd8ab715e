"""Ends a child process when its parent ends, even by kill -9. The parent holds the other end of the child's standard
input.
"""

import os
import threading

__all__ = ["end_with_stdin"]


def end_with_stdin() -> None:
    """Ends this process as soon as its standard input closes."""

    def watch() -> None:
        # Read the descriptor instead of sys.stdin. Python aborts if a thread holds the lock of sys.stdin at exit.
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
