"""What a server answered, in a few words; and requests that are sent beside each other."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

__all__ = ["beside_each_other", "count", "say", "seconds_until", "sent"]

_MESSAGE_CHARS = 160


def say(answer: httpx.Response) -> str:
    """Status and the head of the error's message, with the field that it names."""
    if answer.status_code < 400:
        return f"{answer.status_code} ({len(answer.content)} bytes)"
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.text[:_MESSAGE_CHARS]}"
    return f"{answer.status_code} [{error.get('param')}] {error['message'][:_MESSAGE_CHARS]}"


def sent(send: Callable[[], httpx.Response]) -> str:
    """As `say`; an exception of the connection is an answer too."""
    try:
        return say(send())
    except httpx.HTTPError as error:
        return type(error).__name__


def beside_each_other(sends: Sequence[Callable[[], httpx.Response]]) -> list[str]:
    """The answers, in the order of `sends`."""
    with ThreadPoolExecutor(len(sends)) as pool:
        return list(pool.map(sent, sends))


def count(answers: Sequence[str]) -> str:
    """Each different answer once, with its number."""
    return "; ".join(f"{number} x {answer}" for answer, number in Counter(answers).most_common(4))


def seconds_until(happened: Callable[[], bool], patience_s: float, *, every_s: float = 0.1) -> float | None:
    """None if it did not happen in time."""
    start = time.perf_counter()
    while time.perf_counter() - start < patience_s:
        if happened():
            return round(time.perf_counter() - start, 1)
        time.sleep(every_s)
    return None
