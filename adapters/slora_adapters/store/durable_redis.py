"""A Redis that must not lose what it acknowledged: how it has to be set up, and what to wait for after a write.

Needs the package redis, so only modules that `store_url.py` and `registry_url.py` load import this one.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from slora_adapters.errors import StoreUnavailable, StoreUnfit, TryAgain

# A write is refused if Redis takes longer to bring it to its disk; busy disks stall for tens of seconds.
_DISK_WAIT_S = 60.0
# One question's part of that, well within the socket's time; and the pause between two questions that do not wait.
_DISK_QUESTION_S = 5.0
_DISK_PAUSE_S = 0.01
_CONNECT_S = 2.0
# Longer than a question to the disk takes.
DURABLE_TIMEOUT_S = 20.0


def connect(url: str, timeout_s: float, num_retries: int) -> "redis.Redis[bytes]":
    """A client, which contacts nobody yet. timeout_s: for each answer. num_retries: of what got no answer."""
    return redis.Redis.from_url(
        url,
        socket_connect_timeout=_CONNECT_S,
        socket_timeout=timeout_s,
        retry=Retry(NoBackoff(), num_retries),
    )


def check_settings(client: "redis.Redis[bytes]", loses: str, remedy: str) -> None:
    """Raises StoreUnfit, naming what to set, unless this Redis keeps what it is given; StoreUnavailable if it does not
    answer. loses, remedy: how the message begins, and what else can be done."""
    with as_unavailable():
        info: dict[str, Any] = {**client.info("persistence"), **client.info("memory")}
    faults = []
    if not info.get("aof_enabled"):
        faults.append("'appendonly yes' (it is no)")
    if info.get("maxmemory_policy") != "noeviction":
        faults.append(f"'maxmemory-policy noeviction' (it is {info.get('maxmemory_policy')})")
    if _setting(client, "appendfsync") == "no":
        faults.append("'appendfsync everysec' or 'always' (it is no)")
    if faults:
        raise StoreUnfit(f"{loses} it needs {' and '.join(faults)}. {remedy}")


def wait_for_disk(connection: "redis.Redis[bytes]") -> None:
    """Waits until what this connection wrote survives the death of Redis; from Redis 7.2 on, that of its machine, too.
    Raises StoreUnavailable if that takes too long.

    Before 7.2 Redis can't be asked to wait for its disk. `appendfsync always` answers after the disk. `everysec`
    answers earlier: while an earlier fsync goes on, it keeps what it was told in a buffer of its own, for up to two
    seconds, and its death loses that. So this waits until the buffer is empty, which leaves the second that everysec is
    about for the death of the machine.
    """
    deadline = time.monotonic() + _DISK_WAIT_S
    while not _is_kept(connection):
        if time.monotonic() > deadline:
            raise TryAgain(f"Redis took longer than {_DISK_WAIT_S:.0f} s to write to its disk")


@contextmanager
def as_unavailable() -> Iterator[None]:
    """Redis' errors as StoreUnavailable."""
    try:
        yield
    except redis.RedisError as error:
        raise StoreUnavailable(f"Redis does not answer as it should: {error}") from error


def _is_kept(connection: "redis.Redis[bytes]") -> bool:
    """Whether all of the connection's writes are in the append-only file; waits a moment for it."""
    try:
        synced, _ = connection.execute_command("WAITAOF", 1, 0, int(_DISK_QUESTION_S * 1000))
        return bool(synced)
    except redis.ResponseError as error:
        if "unknown command" not in str(error).lower():
            raise
    if connection.info("persistence").get("aof_buffer_length", 0) == 0:
        return True
    time.sleep(_DISK_PAUSE_S)
    return False


def _setting(client: "redis.Redis[bytes]", name: str) -> str | None:
    """Hosted Redis often forbids CONFIG; then nobody can tell."""
    try:
        with as_unavailable():
            value: str | None = client.config_get(name).get(name)
            return value
    except StoreUnavailable:
        return None
