"""Adapters in Redis: as a durable store, or as a warm tier whose contents may be lost at any time.

A blob is split into chunks of 4 MiB, stored as plain strings. One large string would block the server for half a
second, and Redis limits a string to 512 MiB:

    slora:{<digest>}:m               manifest, a hash: members (JSON), upload
    slora:{<digest>}:c:<upload>:<i>  chunks, numbered across all members
    slora:claims                     set of registries that refer to blobs here

The keys of a warm tier begin with `slora:warm:{` instead of `slora:{`. A warm tier replaces, deletes and expires its
blobs at any time. The separate prefix protects a durable store in the same Redis, which may belong to another host.

The braces put all keys of a blob into one cluster slot. Each upload has its own chunk keys, which expire. A script
writes the manifest last, and makes the chunks permanent in a durable store. A blob exists only once its manifest
exists. So readers never see a partial blob, two uploads of one digest never mix, and the chunks of a crashed writer
expire.

The module needs the package redis, so only `store_url.py` imports it.
"""

import json
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import redis

from slora_adapters.errors import AdapterNotFound, StoreUnavailable, TryAgain
from slora_adapters.store.durable_redis import (
    DURABLE_TIMEOUT_S,
    as_unavailable,
    check_settings,
    connect,
    wait_for_disk,
)
from slora_adapters.store.file_store import LocalBlob
from slora_adapters.store.store import Blob, check_digest, check_member_name, is_digest

CHUNK_BYTES = 4 << 20
TIER = "redis"
_NUM_AHEAD = 2
_MAX_LINE_BYTES = 1 << 10


@dataclass(slots=True)
class _Answer:
    """The reply to one command: `num_bytes` of a chunk, of which `num_left` are still unread."""

    num_bytes: int
    num_left: int
    begun: bool = False  # whether the first line of the reply was read


class RedisBlob:
    """Implements `store.Blob`. Reads chunk by chunk over one connection, directly into the reader's memory.

    While the reader reads sequentially, the next chunk is requested before the current one is fully read. At most
    `_NUM_AHEAD` chunks are requested at a time, so Redis buffers at most 8 MiB for a slow reader.

    redis-py copies each reply into its own buffers first, which limits throughput. Measured on a Unix socket: 1.1 GB/s
    with redis-py, 4.3 GB/s with this class. So redis-py provides the connection and sends the commands, and this class
    reads the replies from the socket. The length of each reply is known in advance.

    pool: connection pool of redis-py. prefix: prefix of the chunk keys. Chunks are numbered across all members, and
    each member begins with a new chunk. members: (name, bytes), in the order of the chunks.
    """

    tier = next_tier = TIER

    def __init__(self, pool: Any, prefix: str, members: Iterable[tuple[str, int]]) -> None:
        self.members = dict(members)
        self._pool = pool
        self._prefix = prefix
        # Positions count bytes across all members, concatenated in order.
        sizes = list(self.members.values())
        self._first = dict(zip(self.members, accumulate(sizes, initial=0), strict=False))
        self._chunk_starts = [
            first + start
            for first, size in zip(self._first.values(), sizes, strict=True)
            for start in range(0, size, CHUNK_BYTES)
        ]
        self._end = sum(sizes)
        self._position = 0
        self._asked_to = 0
        self._reads_on = True
        self._answers: deque[_Answer] = deque()
        self._connection: Any = pool.get_connection()

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        position = self._first[name] + start
        try:
            self._move_to(position)
            while len(buffer):
                self._ask(self._position + len(buffer))
                count = self._receive_some(buffer)
                self._position += count
                buffer = buffer[count:]
        except (redis.RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis failed during a read: {str(error).rstrip('.')}") from error

    def close(self) -> None:
        """Returns the connection to the pool. A connection with unread replies cannot be reused, so it is disconnected
        first.
        """
        if self._connection is None:
            return
        connection, self._connection = self._connection, None
        if self._answers:
            connection.disconnect()
        self._pool.release(connection)

    def _move_to(self, position: int) -> None:
        """Moves to `position`. If that is not the current position, discards the pending replies and turns read-ahead
        off until the reads are sequential again.
        """
        self._reads_on = position == self._position
        if self._reads_on:
            return
        scratch = memoryview(bytearray(1 << 16)) if self._answers else memoryview(b"")
        while self._answers:
            self._receive_some(scratch)
        self._position = self._asked_to = position

    def _ask(self, end: int) -> None:
        """Requests the bytes up to `end`. During sequential reads, also requests the next chunks."""
        while self._asked_to < self._end:
            is_ahead = self._asked_to >= end
            if is_ahead and not (self._reads_on and len(self._answers) < _NUM_AHEAD):
                return
            chunk_id = bisect_right(self._chunk_starts, self._asked_to) - 1
            chunk_start = self._chunk_starts[chunk_id]
            chunk_end = (
                self._chunk_starts[chunk_id + 1] if chunk_id + 1 < len(self._chunk_starts) else self._end
            )
            stop = chunk_end if self._reads_on else min(chunk_end, end)
            self._send(chunk_id, self._asked_to - chunk_start, stop - chunk_start, chunk_end - chunk_start)
            self._answers.append(_Answer(stop - self._asked_to, stop - self._asked_to))
            self._asked_to = stop

    def _send(self, chunk_id: int, start: int, stop: int, chunk_bytes: int) -> None:
        key = f"{self._prefix}{chunk_id}"
        if (start, stop) == (0, chunk_bytes):
            self._connection.send_command("GET", key)
        else:
            self._connection.send_command("GETRANGE", key, start, stop - 1)

    def _receive_some(self, buffer: memoryview) -> int:
        """Reads available bytes of the first unread reply into `buffer`. Returns how many were read."""
        answer = self._answers[0]
        if not answer.begun:
            self._receive_length(answer)
        count = self._receive(buffer[: answer.num_left])
        answer.num_left -= count
        if not answer.num_left:
            self._receive_line()  # reads the line end after the content
            self._answers.popleft()
        return count

    def _receive_length(self, answer: _Answer) -> None:
        line = self._receive_line()
        if line == b"$%d" % answer.num_bytes:
            answer.begun = True
        elif line.startswith((b"$", b"_")):  # the reply is shorter than expected, or nil
            raise AdapterNotFound("the copy was removed from Redis while it was being read")
        else:
            raise StoreUnavailable(f"Redis sent an unexpected reply: {line[:200].decode('ascii', 'replace')}")

    def _receive_line(self) -> bytes:
        """Reads byte by byte, because the bytes after the line belong to the content. A chunk of 4 MiB needs about a
        dozen of these reads.
        """
        line = bytearray()
        byte = memoryview(bytearray(1))
        while not line.endswith(b"\r\n"):
            self._receive(byte)
            line += byte
            if len(line) > _MAX_LINE_BYTES:
                raise StoreUnavailable(
                    f"Redis sent an unexpected reply: a line longer than {_MAX_LINE_BYTES} bytes"
                )
        return bytes(line[:-2])

    def _receive(self, buffer: memoryview) -> int:
        count: int = self._connection._sock.recv_into(buffer)
        if not count:
            raise redis.ConnectionError("the connection was closed")
        return count


# TTL of a chunk before the commit. An upload must complete within this time after it wrote its first chunk.
UPLOAD_EXPIRY_S = 3600
# TTL of a warm copy after its last use.
WARM_EXPIRY_S = 24 * 3600
_WARM_TIMEOUT_S = 5.0
_CLAIMS_KEY = "slora:claims"

# KEYS: the manifest, then the new chunks. ARGV: members, upload, TTL in seconds (0: no expiry), prefix of chunk keys.
# Deletes the chunks of the previous upload. Returns 0 if a chunk is missing, else 1.
_COMMIT = """
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return 0 end
end
for i = 2, #KEYS do
  if ARGV[3] == '0' then redis.call('PERSIST', KEYS[i]) else redis.call('EXPIRE', KEYS[i], ARGV[3]) end
end
local old = redis.call('HMGET', KEYS[1], 'upload', 'chunks')
redis.call('HSET', KEYS[1], 'members', ARGV[1], 'upload', ARGV[2], 'chunks', #KEYS - 1)
if ARGV[3] ~= '0' then redis.call('EXPIRE', KEYS[1], ARGV[3]) else redis.call('PERSIST', KEYS[1]) end
if old[1] then
  for i = 0, tonumber(old[2]) - 1 do redis.call('UNLINK', ARGV[4] .. old[1] .. ':' .. i) end
end
return 1
"""

# KEYS: the manifest. ARGV: prefix of chunk keys, the upload. If another upload has replaced this one since the caller
# read the manifest, nothing is deleted.
_DELETE = """
local old = redis.call('HMGET', KEYS[1], 'upload', 'chunks')
if old[1] == ARGV[2] then
  for i = 0, tonumber(old[2]) - 1 do redis.call('UNLINK', ARGV[1] .. old[1] .. ':' .. i) end
  redis.call('UNLINK', KEYS[1])
end
return 1
"""


def open_redis_store(url: str, *, durable: bool) -> "RedisStore":
    """Opens a store on the Redis at `url`.

    With `durable`, raises StoreUnavailable if the Redis does not answer, and StoreUnfit if its settings allow data
    loss. A warm tier may be unavailable, so it is not contacted here.
    """
    client = connect(url, DURABLE_TIMEOUT_S if durable else _WARM_TIMEOUT_S, num_retries=1 if durable else 0)
    if durable:
        check_settings(
            client,
            "the settings of this Redis allow the loss of adapters; as the only store",
            "Change the settings, or use a file store with this Redis as its warm tier",
        )
    return RedisStore(client, durable=durable)


class RedisStore:
    """Implements `store.Store` with Redis. It can also be a warm tier in front of another store."""

    tiers = (TIER,)

    def __init__(self, client: "redis.Redis[bytes]", *, durable: bool) -> None:
        self._client = client
        self._durable = durable
        self._space = "slora:" if durable else "slora:warm:"
        self._expiry_s = 0 if durable else WARM_EXPIRY_S
        self._commit = client.register_script(_COMMIT)
        self._delete = client.register_script(_DELETE)

    def put(self, digest: str, members: Mapping[str, Path | bytes]) -> None:
        self._put(digest, _local_blobs(members))

    def copy(self, digest: str, blob: Blob) -> None:
        """Like `put`, with the content of a blob from another store. Raises what reading that blob raises."""
        self._put(digest, [blob])

    def open(self, digest: str) -> RedisBlob:
        with as_unavailable():
            found = self._client.hmget(self._manifest_key(digest), ["members", "upload"])
            manifest = None if None in found else _parse_manifest(found[0])
            if manifest is None:
                raise AdapterNotFound(f"the store has no adapter {digest[:12]}")
            prefix = f"{self._chunk_prefix(digest)}{found[1].decode('ascii', 'replace')}:"
            self._keep_warm(digest, prefix, manifest)
            return RedisBlob(self._client.connection_pool, prefix, manifest)

    def exists(self, digest: str) -> bool:
        with as_unavailable():
            return bool(self._client.exists(self._manifest_key(digest)))

    def delete(self, digest: str) -> None:
        with as_unavailable():
            upload = self._client.hget(self._manifest_key(digest), "upload")
            if upload is not None:
                self._delete(keys=[self._manifest_key(digest)], args=[self._chunk_prefix(digest), upload])

    def report_corrupt(self, digest: str) -> bool:
        """Returns False, because this store has only one copy."""
        return False

    def digests(self) -> Iterator[str]:
        with as_unavailable():
            found = [key.decode() for key in self._client.scan_iter(f"{self._space}{{*}}:m", count=1000)]
        names = {key.removeprefix(f"{self._space}{{").removesuffix("}:m") for key in found}
        return (name for name in names if is_digest(name))

    def claim(self, registry: str) -> None:
        with as_unavailable(), self._client.client() as connection:
            connection.sadd(_CLAIMS_KEY, registry)
            if self._durable:
                wait_for_disk(connection)

    def claims(self) -> frozenset[str]:
        with as_unavailable():
            return frozenset(claim.decode() for claim in self._client.smembers(_CLAIMS_KEY))

    def check(self) -> None:
        with as_unavailable():
            self._client.ping()

    def close(self) -> None:
        self._client.close()

    def _put(self, digest: str, blobs: Iterable[Blob]) -> None:
        """Stores the members of all `blobs` together as one blob."""
        check_digest(digest)
        upload = uuid.uuid4().hex
        keys: list[str] = []
        manifest: list[tuple[str, int]] = []
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with as_unavailable(), self._client.client() as connection:
            for part, name, num_bytes in ((p, *member) for p in blobs for member in p.members.items()):
                manifest.append((check_member_name(name), num_bytes))
                for start in range(0, num_bytes, CHUNK_BYTES):
                    chunk = buffer[: min(CHUNK_BYTES, num_bytes - start)]
                    part.read_into(name, start, chunk)
                    keys.append(f"{self._chunk_prefix(digest)}{upload}:{len(keys)}")
                    connection.set(keys[-1], chunk, ex=UPLOAD_EXPIRY_S)
            done = self._commit(
                keys=[self._manifest_key(digest), *keys],
                args=[json.dumps(manifest), upload, self._expiry_s, self._chunk_prefix(digest)],
                client=connection,
            )
            if not done:
                raise TryAgain(
                    "Redis dropped part of the upload, perhaps because it is out of memory; try again"
                )
            if self._durable:
                wait_for_disk(connection)

    def _keep_warm(self, digest: str, prefix: str, manifest: list[tuple[str, int]]) -> None:
        """Extends the expiry of a warm copy when it is used."""
        if self._durable:
            return
        num_chunks = sum(_num_chunks(num_bytes) for _, num_bytes in manifest)
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.expire(self._manifest_key(digest), self._expiry_s)
            for chunk_id in range(num_chunks):
                pipeline.expire(f"{prefix}{chunk_id}", self._expiry_s)
            pipeline.execute()

    def _manifest_key(self, digest: str) -> str:
        return f"{self._space}{{{check_digest(digest)}}}:m"

    def _chunk_prefix(self, digest: str) -> str:
        return f"{self._space}{{{digest}}}:c:"


def _local_blobs(members: Mapping[str, Path | bytes]) -> Iterator[Blob]:
    """Yields a blob for each member, so that only one file is open at a time."""
    for name, content in members.items():
        with closing(LocalBlob({check_member_name(name): content})) as blob:
            yield blob


def _parse_manifest(raw: bytes) -> list[tuple[str, int]] | None:
    """Parses a manifest. Returns None for an invalid manifest: another program may have written the key, and a warm
    tier must not break reads.
    """
    try:
        entries = [(str(name), int(num_bytes)) for name, num_bytes in json.loads(raw)]
    except (ValueError, TypeError):
        return None
    return entries if all(num_bytes >= 0 for _, num_bytes in entries) else None


def _num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)
