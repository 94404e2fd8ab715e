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
import time
import tty
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from types import FrameType
from typing import IO, Any, NamedTuple

import httpx

from slora_api.cli.declaration import argument, command
from slora_api.cli.remote import CommandFailed, admin_client, check, explained, server_url, tenant_client

# The first part reads the feed, the second draws frames as lines of text, the third shows these lines. A line is never
# wider than the screen, and contains no control characters.

# Use of a page -> its name in the legend, its character in the bar, and its SGR color code.
_CONTENTS = {
    "kv": ("KV", "#", "36"),
    "prefixes": ("prefixes", "+", "34"),
    "adapters": ("adapters", "=", "32"),
    "idle_adapters": ("idle adapters", "-", "33"),
    "other": ("others", "o", "35"),
    "free": ("free", ".", "90"),
}
_EVENT_KINDS = {
    "load": "loads",
    "eviction": "evictions",
    "prefix_eviction": "prefix evictions",
    "preemption": "preemptions",
}
_RECENT_S = 60.0
_MAX_EVENTS = 500
_MIN_ROWS = 3
_NAME_CHARS = 32

Frame = dict[str, Any]

# The server sends a frame at least every nine seconds.
_TIMEOUT = httpx.Timeout(20.0, connect=5.0)

# The server ends the stream after this many frames. `follow_frames` then requests a new stream.
_NUM_FRAMES = 100_000

_PAUSE_S = 1.0


class Interruption(str):
    """The reason why there are no frames at present."""


def read_frames(client: httpx.Client, path: str, num_frames: int) -> Generator[Frame | None, None, None]:
    """Yields frames until the server ends the stream; None while no engine answers.

    Raises CommandFailed with the server's message, httpx.HTTPStatusError for a 5xx, which a proxy or a stopping server
    may send, and httpx.TransportError if the connection breaks.
    """
    with client.stream("GET", path, params={"frames": num_frames}, timeout=_TIMEOUT) as answer:
        if answer.is_server_error:
            answer.raise_for_status()
        if not answer.is_success:
            answer.read()
            check(answer)
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            frame = json.loads(line.removeprefix("data: "))
            if frame is not None and "error" in frame:
                raise CommandFailed(frame["error"]["message"])
            yield frame


def follow_frames(
    client: httpx.Client, path: str, sleep: Callable[[float], None] = time.sleep
) -> Generator[Frame | Interruption | None, None, None]:
    """Yields frames without end. If the server stops answering after the first frame, yields an Interruption about
    every second until it answers again, instead of raising an error.
    """
    has_begun = False
    while True:
        why = "the server ended the connection"
        try:
            for frame in read_frames(client, path, _NUM_FRAMES):
                has_begun = True
                yield frame
        except httpx.TransportError as error:
            if not has_begun:
                raise
            why = f"no answer from the server: {error}"
        except httpx.HTTPStatusError as error:
            why = f"the server answers {error.response.status_code}"
        yield Interruption(f"{why}; trying again")
        sleep(_PAUSE_S)


class Line(NamedTuple):
    """One line of the screen. text: has no control characters. styles: (start, end, SGR code) of each part that a
    terminal emphasizes.
    """

    text: str
    styles: tuple[tuple[int, int, str], ...] = ()


@dataclass
class LiveHistory:
    """The newest frame, and the events of recent frames. The newest event comes first. frame: None while no engine
    answers.
    """

    frame: Frame | None = None
    events: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_MAX_EVENTS))
    _last_number: int = 0

    def take(self, frame: Frame | None) -> None:
        self.frame = frame
        if frame is None:
            return
        numbers = [event["number"] for event in frame["events"]]
        if not numbers or numbers[-1] < self._last_number:
            # The event numbers of a new engine, or of an engine that was not observed for a while, start at 1 again.
            self._last_number = 0
        new = [event for event in frame["events"] if event["number"] > self._last_number]
        self.events.extendleft(new)
        if numbers:
            self._last_number = numbers[-1]

    def count_recent(self) -> Counter[str]:
        """Returns the number of events of each kind in the last minute."""
        assert self.frame is not None
        since = self.frame["time"] - _RECENT_S
        counts: Counter[str] = Counter()
        for event in self.events:
            if event["time"] >= since:
                counts[event["kind"]] += event["times"]
        return counts


def draw_screen(
    history: LiveHistory, title: str, width: int, height: int | None = None, message: str = ""
) -> list[Line]:
    """Returns the lines of the screen. height: the maximum number of lines; None for all rows. message: a text below
    the title.
    """
    clock = datetime.fromtimestamp(history.frame["time"]).strftime("%H:%M:%S") if history.frame else ""
    room = max(0, width - len(clock) - 1)
    lines = [_bold(f"{_clean(title)[:room].ljust(room)} {clock}")]
    if message:
        lines.append(_bold(_clean(message)))
    frame = history.frame
    if frame is None:
        lines.append(Line("No engine answers. It may be starting; this view continues by itself."))
    else:
        lines += _draw_figures(frame["traffic"])
        lines += _draw_pool(frame["pool"], width)
        counts = history.count_recent()
        shown = "   ".join(f"{name} {counts[kind]}" for kind, name in _EVENT_KINDS.items())
        lines += [Line(f"last 60 s  {shown}"), Line("")]
        engines = [_list_engines(frame)] if len(frame["engines"]) > 1 else []
        tables = [*engines, _list_tenants(frame), _list_adapters(frame)]
        if height is None:
            for table in tables:
                lines += [*table, Line("")]
            lines.pop()
        else:
            lines += _share_room([*tables, _list_events(history)], height - len(lines))
    return [_clip(line, width) for line in lines[:height]]


def _draw_figures(traffic: Mapping[str, Any]) -> Iterator[Line]:
    fetching = traffic["awaiting_adapter"]
    waiting = f"{traffic['waiting']}" + (f" ({fetching} for an adapter)" if fetching else "")
    yield Line(
        f"traffic    {_number(traffic['tokens_per_s'])} tokens/s   running {traffic['running']}   waiting {waiting}"
    )
    yield Line(
        f"latency    TTFT {_quantiles(traffic['first_token'])}   ITL {_quantiles(traffic['interval'])}"
    )
    yield Line(
        f"steps      {_quantiles(traffic['step'])}   {_number(traffic['steps_per_s'])}/s   "
        f"{_number(traffic['tokens_per_step'])} tokens each"
    )


def _draw_pool(pool: Mapping[str, Any], width: int) -> Iterator[Line]:
    """Yields a bar that shows the contents of the page pool, and a legend."""
    counts, num_pages = pool["counts"], max(1, pool["num_pages"])
    tail = f" {num_pages} pages"
    size = max(10, width - len("pool       []") - len(tail))
    text, styles = "pool       [", []
    stop = len(text) + size
    for content, (_, mark, color) in _CONTENTS.items():
        # Even a few pages of a large pool get one mark. Free pages come last and take the rest of the bar.
        marks = max(1, round(size * counts[content] / num_pages)) if counts[content] else 0
        end = stop if content == "free" and marks else min(stop, len(text) + marks)
        styles.append((len(text), end, color))
        text = text.ljust(end, mark)
    text = text.ljust(stop)
    yield Line(f"{text}]{tail}", tuple(styles))
    text, styles = "           ", []
    for content, (name, mark, color) in _CONTENTS.items():
        if counts[content] or content == "free":
            styles.append((len(text), len(text) + 1, color))
            text += f"{mark} {name} {counts[content]}  "
    yield Line(text.rstrip(), tuple(styles))


def _list_engines(frame: Frame) -> list[Line]:
    columns: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("ENGINE", lambda one: one["name"]),
        ("STATE", lambda one: "serving" if one["serving"] else one["detail"]),
        ("DEVICE", lambda one: one["device"] or "-"),
        (
            "POOL",
            lambda one: "-" if one["num_pages"] is None else f"{one['used_pages'] / one['num_pages']:.0%}",
        ),
        ("RUNNING", lambda one: "-" if one["running"] is None else str(one["running"])),
        ("WAITING", lambda one: "-" if one["waiting"] is None else str(one["waiting"])),
        ("STEPS/S", lambda one: "-" if one["steps_per_s"] is None else _number(one["steps_per_s"])),
    ]
    return _tabulate(frame["engines"], columns, num_names=3)


def _list_tenants(frame: Frame) -> list[Line]:
    rows = sorted(
        frame["tenants"],
        key=lambda one: (one["tenant"] is None, -one["tokens_per_s"], -one["running"], -_pages(one)),
    )
    columns: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("TENANT", lambda one: _tenant(one["tenant"])),
        ("TOKENS/S", lambda one: _number(one["tokens_per_s"])),
        ("RUNNING", lambda one: str(one["running"])),
        ("WAITING", lambda one: str(one["waiting"])),
        ("PAGES", lambda one: str(_pages(one))),
    ]
    return _tabulate(rows, columns, num_names=1)


def _list_adapters(frame: Frame) -> list[Line]:
    rows = sorted(frame["adapters"], key=lambda one: (one["tenant"] is None, -one["share"]))
    columns: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("ADAPTER", _adapter),
        ("TENANT", lambda one: _tenant(one["tenant"])),
        ("WORK", lambda one: f"{one['share']:.0%}"),
    ]
    return _tabulate(rows, columns, num_names=2)


def _list_events(history: LiveHistory) -> list[Line]:
    lines = [_bold("EVENTS")]
    for event in history.events:
        at = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
        times = f" ({event['times']} times)" if event["times"] > 1 else ""
        kind = event["kind"].replace("_", " ")
        what = f" of {event['adapter']}" if event["adapter"] else ""
        lines.append(Line(_clean(f"{at}  {kind}{what}, tenant {event['tenant']}{times}")))
    return lines if history.events else [*lines, Line("none yet")]


def _tabulate(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]],
    num_names: int,
) -> list[Line]:
    """Returns the lines of a table. The first `num_names` columns are texts, which are shortened; the others are
    numbers.
    """
    cells = [[heading for heading, _ in columns]]
    cells += [[_clean(write(row)) for _, write in columns] for row in rows]
    widths = [max(len(row[at]) for row in cells) for at in range(len(columns))]
    widths[:num_names] = [min(_NAME_CHARS, max(14, one)) for one in widths[:num_names]]
    lines = []
    for row in cells:
        parts = [
            _shorten(cell, width).ljust(width) if at < num_names else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(Line("  ".join(parts).rstrip()))
    return [_bold(lines[0].text), *lines[1:]]


def _share_room(tables: Sequence[list[Line]], room: int) -> list[Line]:
    """Returns the tables one below the other, in at most `room` lines. A long table is cut so that the other tables get
    rows.
    """
    lines: list[Line] = []
    for at, table in enumerate(tables):
        left = tables[at + 1 :]
        # Each further table needs an empty line, its heading and a few rows.
        reserved = sum(1 + min(len(one), 1 + _MIN_ROWS) for one in left)
        size = max(1 + _MIN_ROWS, room - len(lines) - reserved)
        lines += table[:size]
        if left:
            lines.append(Line(""))
    return lines[: max(0, room)]


def _tenant(name: str | None) -> str:
    return "(other tenants)" if name is None else name


def _adapter(work: Mapping[str, Any]) -> str:
    if work["adapter"] is not None:
        return str(work["adapter"])
    return "" if work["tenant"] is None else "(base model)"


def _pages(tenant: Mapping[str, Any]) -> int:
    return int(tenant["kv"] + tenant["prefixes"] + tenant["adapters"] + tenant["idle_adapters"])


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _quantiles(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else f"p50 {_seconds(found['p50'])} p99 {_seconds(found['p99'])}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _clean(text: str) -> str:
    """Replaces control characters and non-ASCII characters by `?`. Tenants choose names, and a terminal would obey
    control characters in a name.
    """
    return "".join(one if one.isascii() and one.isprintable() else "?" for one in text)


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}~"


def _bold(text: str) -> Line:
    return Line(text, ((0, len(text), "1"),))


def _clip(line: Line, width: int) -> Line:
    return Line(
        line.text[:width],
        tuple((start, min(end, width), code) for start, end, code in line.styles if start < width),
    )


# The engine measures rates and times only while a client reads the feed. The first frames therefore lack rates and
# times.
NUM_FIRST_FRAMES = 6


@command(
    "top",
    None,
    argument("--once", action="store_true", help="print one table after a few seconds"),
    argument("--json", action="store_true", help="print each frame as a line of JSON"),
    epilog="q or Ctrl-C ends it. Without a terminal, it prints one table, as with --once.",
)
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
        print_frame(history.frame)
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
                print_frame(frame)


def print_frame(frame: Frame | None) -> None:
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
            threading.Thread(
                target=_wait_for_q, args=(sys.stdin, threading.get_ident()), name="keys", daemon=True
            ).start()
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


def _wait_for_q(keyboard: IO[str], main_thread: int) -> None:
    """Waits until the user presses q. Reads the file descriptor, because the lock of the text stream would delay the
    end of the process.
    """
    with suppress(OSError):
        while key := os.read(keyboard.fileno(), 1):
            if key == b"q":
                # Another thread would take the signal without waking the main thread.
                signal.pthread_kill(main_thread, signal.SIGINT)
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
