"""`slora top`: shows the traffic, page pool, tenants, adapters and events of a running server in a terminal."""

import argparse
import json
import os
import shutil
import sys
from contextlib import closing

import httpx

from slora_api.cli.remote import CommandFailed, admin_client, explained, server_url, tenant_client
from slora_api.metrics.top.live_frames import Frame, Interruption, follow_frames, read_frames
from slora_api.metrics.top.screen import LiveHistory, draw_screen
from slora_api.metrics.top.terminal import full_screen, show

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
