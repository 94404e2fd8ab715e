"""Checks the settings of a Redis that must not lose acknowledged writes, and waits until writes are on its disk.

The module needs the package redis, so only modules that `store_url.load_optional` loads import it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from slora_adapters.errors import StoreUnavailable, StoreUnfit, TryAgain

# How long Redis may take to sync a write to disk before the write fails. Busy disks stall for tens of seconds.
_DISK_WAIT_S = 60.0
# _DISK_QUESTION_S: timeout of one WAITAOF command, well below the socket timeout. _DISK_PAUSE_S: pause between two
# polls if Redis does not have WAITAOF.
_DISK_QUESTION_S = 5.0
_DISK_PAUSE_S = 0.01
_CONNECT_S = 2.0
# Socket timeout of a durable Redis, longer than the timeout of one WAITAOF command.
DURABLE_TIMEOUT_S = 20.0


def connect(url: str, timeout_s: float, num_retries: int) -> "redis.Redis[bytes]":
    """Returns a client, which connects at its first command. timeout_s: timeout of each reply. num_retries: how often a
    command is repeated if it gets no reply.
    """
    return redis.Redis.from_url(
        url,
        socket_connect_timeout=_CONNECT_S,
        socket_timeout=timeout_s,
        retry=Retry(NoBackoff(), num_retries),
    )


def check_settings(client: "redis.Redis[bytes]", loses: str, remedy: str) -> None:
    """Raises StoreUnfit, naming the settings to change, if the settings of this Redis allow data loss. Raises
    StoreUnavailable if it does not answer.

    loses: beginning of the message, which says what would be lost. remedy: end of the message, an alternative for the
    operator.
    """
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
    """Waits until the writes of this connection survive a crash of Redis. From Redis 7.2 on, they also survive a crash
    of its machine. Raises StoreUnavailable on a timeout.

    Before 7.2, Redis has no command that waits for its disk. With `appendfsync always`, Redis replies after the write
    is on disk. With `everysec` it replies earlier. While an earlier fsync runs, Redis keeps new writes in a buffer for
    up to two seconds. A crash of Redis loses that buffer. So this function waits until the buffer is empty. A crash of
    the machine can then still lose the last second of writes, as `everysec` allows.
    """
    deadline = time.monotonic() + _DISK_WAIT_S
    while not _is_kept(connection):
        if time.monotonic() > deadline:
            raise TryAgain(f"Redis took longer than {_DISK_WAIT_S:.0f} s to write to its disk; try again")


@contextmanager
def as_unavailable() -> Iterator[None]:
    """Converts errors of Redis in the block to StoreUnavailable."""
    try:
        yield
    except redis.RedisError as error:
        raise StoreUnavailable(f"Redis is unavailable: {str(error).rstrip('.')}") from error


def _is_kept(connection: "redis.Redis[bytes]") -> bool:
    """Returns whether all writes of the connection are in the append-only file. Waits briefly for it."""
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
    """Returns the value of a setting; None if it cannot be read. Hosted Redis services often forbid CONFIG."""
    try:
        with as_unavailable():
            value: str | None = client.config_get(name).get(name)
            return value
    except StoreUnavailable:
        return None


_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """Facts about a Redis."""

    version: str
    max_bytes: int  # the setting maxmemory; 0 means no limit
    used_bytes: int
    eviction: str  # the setting maxmemory-policy
    is_logged: bool  # the setting appendonly


def read_redis_facts(url: str) -> RedisFacts:
    """Reads the facts. Raises StoreUnavailable, within seconds even if the Redis hangs."""
    with _client(url) as client, as_unavailable():
        info: dict[str, Any] = {
            **client.info("server"),
            **client.info("memory"),
            **client.info("persistence"),
        }
        return RedisFacts(
            str(info.get("redis_version", "of unknown version")),
            int(info.get("maxmemory", 0)),
            int(info.get("used_memory", 0)),
            str(info.get("maxmemory_policy", "unknown")),
            bool(info.get("aof_enabled")),
        )


@contextmanager
def _client(url: str) -> Iterator["redis.Redis[bytes]"]:
    client = connect(url, _TIMEOUT_S, num_retries=0)
    try:
        yield client
    finally:
        client.close()
