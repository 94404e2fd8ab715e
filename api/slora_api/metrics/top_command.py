"""`slora top`: shows the traffic, page pool, tenants, adapters and events of a running server in a terminal.

It uses the terminal's alternate screen, so that the previous content reappears at the end.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import IO

import httpx

from slora_api.cli.remote import CommandFailed, admin_client, explained, server_url, tenant_client
from slora_api.metrics.top_screen import (
    Frame,
    Interruption,
    Line,
    LiveHistory,
    draw_screen,
    follow_frames,
    read_frames,
)

# The engine measures rates and times only while a client reads the feed. The first frames therefore lack rates and
# times.
NUM_FIRST_FRAMES = 6


@explained
def watch(arguments: argparse.Namespace) -> None:
    is_operator = bool(os.environ.get("SLORA_ADMIN_KEY"))
    path = "/admin/live" if is_operator else "/v1/live"
    title = f"slora top   {_public_url()}   {'all tenants' if is_operator else 'your tenant'}"
    with admin_client() if is_operator else tenant_client() as client:
        try:
            if arguments.once or not (arguments.json or sys.stdout.isatty()):
                _print_once(client, path, title, as_json=arguments.json)
            elif arguments.json:
                _print_frames(client, path)
            else:
                _show_screen(client, path, title)
        except KeyboardInterrupt:
            return


def _public_url() -> str:
    """Returns the URL of the server without credentials."""
    return str(httpx.URL(server_url()).copy_with(userinfo=b""))


def _print_once(client: httpx.Client, path: str, title: str, *, as_json: bool) -> None:
    history = LiveHistory()
    try:
        with closing(read_frames(client, path, NUM_FIRST_FRAMES)) as frames:
            for frame in frames:
                history.take(frame)
    except httpx.HTTPStatusError as error:
        raise CommandFailed(f"the server answers {error.response.status_code}; try again later") from error
    if as_json:
        _print_json(history.frame)
    if history.frame is None:
        raise CommandFailed("no engine answers; it may be starting")
    if not as_json:
        for line in draw_screen(history, title, shutil.get_terminal_size().columns):
            print(line.text.rstrip())


def _print_frames(client: httpx.Client, path: str) -> None:
    with closing(follow_frames(client, path)) as frames:
        for frame in frames:
            if isinstance(frame, Interruption):
                print(f"slora: {frame}", file=sys.stderr, flush=True)
            else:
                _print_json(frame)


def _print_json(frame: Frame | None) -> None:
    print(json.dumps(frame, separators=(",", ":")), flush=True)


def _show_screen(client: httpx.Client, path: str, title: str) -> None:
    history, has_color = LiveHistory(), not os.environ.get("NO_COLOR")
    with closing(follow_frames(client, path)) as frames:
        # Get the first frame before the alternate screen opens, so that an error stays visible.
        frame = next(frames)
        with full_screen():
            while True:
                message = ""
                if isinstance(frame, Interruption):
                    message = frame
                else:
                    history.take(frame)
                size = shutil.get_terminal_size()
                lines = draw_screen(history, title, size.columns, size.lines, message)
                show(lines, has_color=has_color)
                frame = next(frames)


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
