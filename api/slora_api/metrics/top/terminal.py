"""Uses the terminal's alternate screen, so that the previous content reappears at the end."""

import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO

from slora_api.metrics.top.screen import Line

# _ENTER selects the alternate screen, hides the cursor and turns line wrapping off. _LEAVE reverses this.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
# Signals that end the view. SIGINT is set explicitly, because the key q sends SIGINT, and background jobs of a shell
# ignore it by default.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


@contextmanager
def full_screen() -> Iterator[None]:
    """Shows the alternate screen for the duration of the context, and always restores the terminal. Raises
    KeyboardInterrupt when the user presses Ctrl-C or q, and on SIGTERM and SIGHUP.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, end) for number in _ENDING}
    saved = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    try:
        if saved is not None:
            tty.setcbreak(sys.stdin)
            threading.Thread(target=_wait_for_q, args=(sys.stdin,), name="keys", daemon=True).start()
        sys.stdout.write(_ENTER)
        sys.stdout.flush()
        yield
    finally:
        for number in _ENDING:  # A second Ctrl-C must not leave the terminal half restored.
            signal.signal(number, signal.SIG_IGN)
        with suppress(OSError):  # The terminal may have been closed.
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
            if saved is not None:
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait_for_q(keyboard: IO[str]) -> None:
    """Waits until the user presses q. Reads the file descriptor, because the lock of the text stream would delay the
    end of the process.
    """
    with suppress(OSError):
        while key := os.read(keyboard.fileno(), 1):
            if key == b"q":
                os.kill(os.getpid(), signal.SIGINT)
                return


def paint(line: Line) -> str:
    """Returns the line with its styles as escape sequences."""
    text, parts, at = line.text, [], 0
    for start, end, code in line.styles:
        if end > start:
            parts += [text[at:start], f"\x1b[{code}m{text[start:end]}\x1b[0m"]
            at = end
    return "".join([*parts, text[at:]])


def show(lines: Sequence[Line], *, has_color: bool) -> None:
    """Replaces the content of the screen. All lines are written at once, so that the screen does not flicker."""
    # Each line is cleared before it is painted. Clearing afterwards could erase the last column, where the cursor
    # stays.
    painted = [_CLEAR_LINE + (paint(line) if has_color else line.text) for line in lines]
    sys.stdout.write(_HOME + "\r\n".join(painted) + _CLEAR_BELOW)
    sys.stdout.flush()
