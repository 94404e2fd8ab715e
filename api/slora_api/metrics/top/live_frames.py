"""Reads the live feed of a server, and connects again after a restart of the server."""

import json
import time
from collections.abc import Callable, Generator
from typing import Any

import httpx

from slora_api.cli.remote import CommandFailed, check

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
