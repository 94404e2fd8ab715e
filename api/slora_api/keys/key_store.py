"""Which API keys are valid now: the keys in the database, a cache of them, and revocations that are not in the database
yet. Keys are stored as hashes. `key_admin.py` creates, rotates and revokes them.

Each process caches the keys that it has seen, each with its tenant's share. On the host that makes a change, the change
applies from the next request on. Other hosts apply the change within a second, when they read the feed of changes.
While the database does not answer, revocations of other hosts cannot arrive, so cached keys stay valid only for
`max_stale_s`. Whether a key has expired is checked at each request.

Each revocation is written to a journal first, which needs no free space, and then to the database. So it takes effect
even if the database cannot be written, for example on a full disk. Every process of the host reads the journal at each
request. The entry stays in the journal until the revocation is in the database.

Hosts that share a database need the same pepper. The first host stores a check value of its pepper in the database, and
a host with another pepper is refused.

Methods block on the database, so an event loop must call them on a thread; see also `is_lookup_local`. This module does
not depend on HTTP.
"""

import fcntl
import logging
import mmap
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from sqlalchemy import select, update

from slora_adapters.database import schema
from slora_adapters.database.change_feed import Changes
from slora_adapters.database.database import CHANGES, Database
from slora_adapters.errors import StoreUnfit
from slora_adapters.process.durable_file import create_durably
from slora_api.core.errors import ApiError, KeyRevoked, TenantSuspended
from slora_api.keys.key_record import (
    VALID_KEY,
    Caller,
    KeyRecord,
    Pepper,
    TenantStatus,
    make_record,
    read_key_id,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _StoredKey:
    """The cached form of a key that is not revoked. digest: see `Pepper`."""

    record: Caller
    digest: bytes = field(repr=False)


class KeyStore:
    """The keys in the shared database, as requests see them.

    journal: the revocation journal of this host.
    max_stale_s: how long cached keys are used after the last `apply_changes`. After this time, keys are read from the
    database.
    clock: monotonic seconds. wall_clock: Unix time.

    The constructor raises StoreUnfit if the keys in the database were made with another pepper.
    """

    def __init__(
        self,
        database: Database,
        pepper: Pepper,
        journal: "RevocationJournal",
        max_stale_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.database = database
        self.pepper = pepper
        self.journal = journal
        self.wall_clock = wall_clock
        self._max_stale_s = max_stale_s
        self._clock = clock
        self._cache = KeyCache[_StoredKey](lambda stored: stored.record.tenant, is_behind=database.is_behind)
        self._current_at = clock()
        # A key with an unknown id is compared with this digest, so that refusing it takes as long as refusing a wrong
        # secret.
        self._no_digest = pepper.digest("")
        self._check_pepper()

    def authenticate(self, secret: str) -> Caller | None:
        """Returns the record of the key `secret`. Returns None if the key is malformed, unknown, revoked or expired.
        Raises StoreUnavailable if the cache has no valid entry and the database does not answer.
        """
        key_id = read_key_id(secret)
        found = None if key_id is None or self._is_in_journal(key_id) else self._find_key(key_id)
        matches = self.pepper.matches(secret, self._no_digest if found is None else found.digest)
        return found.record if found is not None and matches and self._is_unexpired(found.record) else None

    def is_lookup_local(self, secret: str) -> bool:
        """Whether `authenticate` needs no database for this key, so that an event loop may call it."""
        key_id = read_key_id(secret)
        return key_id is None or self.is_key_local(key_id)

    def find_refusal(self, key_id: str) -> ApiError | None:
        """Returns the error that must end the requests of a key: KeyRevoked or TenantSuspended. Returns None if the
        requests may continue. Raises StoreUnavailable like `authenticate`.
        """
        found = None if self._is_in_journal(key_id) else self._find_key(key_id)
        if found is None:
            return KeyRevoked()
        if isinstance(found.record, KeyRecord) and found.record.status is not TenantStatus.ACTIVE:
            return TenantSuspended(found.record.tenant_name)
        return None

    def has_expired(self, key_id: str) -> bool:
        """Whether the key has expired. Raises StoreUnavailable like `authenticate`."""
        found = self._find_key(key_id)
        return found is not None and not self._is_unexpired(found.record)

    def find_key(self, key_id: str) -> KeyRecord | None:
        """Returns the record of a tenant's key; None if the key is unknown, revoked or expired. Raises StoreUnavailable
        like `authenticate`.
        """
        found = None if self._is_in_journal(key_id) else self._find_key(key_id)
        if found is None or not isinstance(found.record, KeyRecord):
            return None
        return found.record if self._is_unexpired(found.record) else None

    def is_key_local(self, key_id: str) -> bool:
        """Whether `find_refusal` needs no database for this key, so that an event loop may call it."""
        if key_id in self.journal or self._cache.is_absent(key_id):
            return True
        return self._is_current() and self._cache.get(key_id) is not None

    def apply_changes(self, changes: Changes) -> None:
        """Drops changed keys from the cache. changes: the changes that were just read from the feed."""
        self._cache.apply_changes(changes)
        self._current_at = self._clock()

    def drop_key(self, key_id: str) -> None:
        """Drops a key that has changed from the cache."""
        self._cache.drop(key_id)

    def drop_tenant(self, tenant: str) -> None:
        """Drops the cached keys of a tenant that has changed. The next request with each key reads it from the
        database.
        """
        self._cache.drop_tenant(tenant)

    def _is_unexpired(self, record: Caller) -> bool:
        return record.expires_at is None or self.wall_clock() < record.expires_at

    def _is_in_journal(self, key_id: str) -> bool:
        """Returns whether the journal revokes the key. If so, also drops the key from the cache, because the cached key
        could become valid again for a moment when another process moves the revocation from the journal to the
        database.
        """
        if key_id not in self.journal:
            return False
        self._cache.drop(key_id)
        return True

    def _find_key(self, key_id: str) -> _StoredKey | None:
        if self._cache.is_absent(key_id):
            return None
        found = self._cache.get(key_id) if self._is_current() else None
        return self._cache.look_up(key_id, lambda: self._read_key(key_id)) if found is None else found

    def _read_key(self, key_id: str) -> _StoredKey | None:
        rows = self.database.read(VALID_KEY, {"key_id": key_id})
        return _StoredKey(make_record(rows[0][:-1]), bytes(rows[0][-1])) if rows else None

    def _is_current(self) -> bool:
        return self._clock() - self._current_at <= self._max_stale_s

    def _check_pepper(self) -> None:
        query = select(schema.platform.c.pepper_check)
        check = self._no_digest
        ((stored,),) = self.database.read(query)
        if stored is None:
            with self.database.transaction(CHANGES) as connection:
                first = update(schema.platform).where(schema.platform.c.pepper_check.is_(None))
                connection.execute(first.values(pepper_check=check))
            ((stored,),) = self.database.read(query)
        if not self.pepper.matches("", bytes(stored)):
            raise StoreUnfit(
                "the API keys in the database were made with another pepper, so this server would refuse all of "
                "them: copy the file `pepper` from the data directory of a server that uses the database"
            )


# An entry takes about one kilobyte.
_MAX_KEYS = 100_000
# The maximum number of unknown ids in the cache, and the seconds for which each id stays. A client that repeats a wrong
# key causes only one lookup in this time. A client may send a key before another host creates it. The key is then
# refused until the id has left the cache.
_MAX_ABSENT, _ABSENT_S = 10_000, 1.0


class KeyCache(Generic[T]):
    """A thread-safe LRU cache in one process: key id -> a value about the key, such as its record or its quotas.

    A key stays until the cache is full, or until it is dropped because the key or its tenant changed. If any key is
    dropped during a lookup, the result of the lookup is not cached, because it may be outdated.

    tenant_of: returns the id of the tenant that owns the key; None for an operator's key.
    is_behind: whether entries may lack a change of another process. If so, `get` finds nothing. clock: monotonic
    seconds.
    """

    def __init__(
        self,
        tenant_of: Callable[[T], str | None],
        max_keys: int = _MAX_KEYS,
        is_behind: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenant_of = tenant_of
        self._max_keys = max_keys
        self._is_behind = is_behind
        self._clock = clock
        self._keys: OrderedDict[str, T] = OrderedDict()
        # Unknown id -> when its entry expires.
        self._absent: OrderedDict[str, float] = OrderedDict()
        self._num_drops = 0
        self._lock = Lock()

    def get(self, key_id: str) -> T | None:
        """Returns the value of a key; None if it is not cached."""
        if self._is_behind():
            return None
        with self._lock:
            found = self._keys.get(key_id)
            if found is not None:
                self._keys.move_to_end(key_id)
            return found

    def is_absent(self, key_id: str) -> bool:
        """Whether a lookup has recently found no key with this id."""
        if self._is_behind():
            return False
        with self._lock:
            return self._absent.get(key_id, 0.0) > self._clock()

    def look_up(self, key_id: str, find: Callable[[], T | None]) -> T | None:
        """Calls `find`, caches its result and returns it. The result None is cached only briefly."""
        num_drops = self._num_drops
        found = find()
        with self._lock:
            if num_drops != self._num_drops:
                return found
            if found is None:
                self._absent[key_id] = self._clock() + _ABSENT_S
                self._absent.move_to_end(key_id)
                if len(self._absent) > _MAX_ABSENT:
                    self._absent.popitem(last=False)
            else:
                self._keys[key_id] = found
                self._keys.move_to_end(key_id)
                if len(self._keys) > self._max_keys:
                    self._keys.popitem(last=False)
        return found

    def drop(self, key_id: str) -> None:
        with self._lock:
            self._num_drops += 1
            self._keys.pop(key_id, None)
            self._absent.pop(key_id, None)

    def drop_tenant(self, tenant: str) -> None:
        """Drops all keys of a tenant."""
        with self._lock:
            self._num_drops += 1
            for key_id in [
                key_id for key_id, found in self._keys.items() if self._tenant_of(found) == tenant
            ]:
                del self._keys[key_id]

    def apply_changes(self, changes: Changes) -> None:
        """Drops changed keys, and all keys of changed tenants."""
        if changes.resync:
            self.clear()
        for change in changes.changes:
            if change.key_id:
                self.drop(change.key_id)
            elif not change.name:
                self.drop_tenant(change.tenant)

    def clear(self) -> None:
        with self._lock:
            self._num_drops += 1
            self._keys.clear()
            self._absent.clear()


_HEADER, _NUMBER = struct.Struct("<QQ"), struct.Struct("<Q")
_ENTRY_BYTES = 8
MAX_ENTRIES = 1022
_FILE_BYTES = _HEADER.size + MAX_ENTRIES * _ENTRY_BYTES


class RevocationJournal:
    """A journal of key revocations that could not yet be written to the database, in the file `path`. It is created
    if necessary. If the disk has no room for the file, this process keeps the entries
    in memory.

    The file has a fixed size. Its space is allocated when it is created, so an entry needs no free space. Every process
    of the host maps the file, so an entry takes effect in all processes at once and survives a restart. On a
    copy-on-write file system an entry may still need free space. An entry that cannot be written takes effect only in
    this process.

    The file begins with a counter of changes and the number of entries, each as 8 bytes, little-endian. The key ids
    follow, each as 8 bytes. Writers lock the file and write the counter last. A reader reads the entries again if the
    counter has changed.

    It may be used by several threads. Key ids have 8 ASCII characters.
    """

    def __init__(self, path: Path) -> None:
        self._lock = Lock()
        # Entries that could not be written to the file.
        self._own: frozenset[str] = frozenset()
        # The counter of changes that was read, and the entries. They are one value, because threads replace it.
        self._seen: tuple[int, frozenset[str]] = -1, frozenset()
        self._descriptor = _open(path)
        self._map = None
        if self._descriptor is not None:
            self._map = mmap.mmap(self._descriptor, _FILE_BYTES, prot=mmap.PROT_READ)

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._own or key_id in self._read()

    def pending(self) -> Set[str]:
        """Returns all entries."""
        return self._own | self._read()

    def add(self, key_id: str) -> bool:
        """Revokes the key at once. Returns True if the entry is in the file. It then survives a restart, and other
        processes see it.
        """
        with self._lock:
            try:
                with self._writing() as entries:
                    if len(entries) >= MAX_ENTRIES:
                        raise OSError(
                            f"the journal of revocations is full: it has {MAX_ENTRIES} entries; make the "
                            "database writable, which empties it"
                        )
                    if key_id not in entries:
                        self._write((*entries, key_id))
                    return True
            except OSError as error:
                logger.error(
                    "the revocation of key %s is in memory only, and a restart would lose it: %s",
                    key_id,
                    error,
                )
                self._own |= {key_id}
                return False

    def remove(self, key_ids: Iterable[str]) -> None:
        """Removes entries whose revocations are in the database now."""
        gone = frozenset(key_ids)
        with self._lock:
            self._own -= gone
            if self._descriptor is None:
                return
            with self._writing() as entries:
                if not gone.isdisjoint(entries):
                    self._write([one for one in entries if one not in gone])

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._map = self._descriptor = None

    def _read(self) -> frozenset[str]:
        if self._map is None:
            return frozenset()
        counter, count = _HEADER.unpack_from(self._map)
        seen, entries = self._seen
        if counter != seen:
            end = _HEADER.size + min(count, MAX_ENTRIES) * _ENTRY_BYTES
            entries = frozenset(_split(self._map[_HEADER.size : end]))
            self._seen = counter, entries
        return entries

    @contextmanager
    def _writing(self) -> Iterator[list[str]]:
        """Locks the file and yields its entries. Raises OSError if there is no file."""
        if self._descriptor is None:
            raise OSError("there was no space to create the journal of revocations")
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            _, count = _HEADER.unpack(os.pread(self._descriptor, _HEADER.size, 0))
            size = min(count, MAX_ENTRIES) * _ENTRY_BYTES
            yield _split(os.pread(self._descriptor, size, _HEADER.size))
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _write(self, entries: Iterable[str]) -> None:
        """Replaces the entries. If a reader sees half-written entries, it reads them again, because the counter changes
        last.
        """
        assert self._descriptor is not None
        raw = b"".join(one.encode("ascii") for one in entries)
        counter, _ = _HEADER.unpack(os.pread(self._descriptor, _HEADER.size, 0))
        os.pwrite(self._descriptor, raw, _HEADER.size)
        os.pwrite(self._descriptor, _NUMBER.pack(len(raw) // _ENTRY_BYTES), _NUMBER.size)
        os.pwrite(self._descriptor, _NUMBER.pack(counter + 1), 0)
        os.fsync(self._descriptor)


def _open(path: Path) -> int | None:
    try:
        if not path.exists() or path.stat().st_size != _FILE_BYTES:
            path.unlink(missing_ok=True)
            create_durably(path, bytes(_FILE_BYTES))
        return os.open(path, os.O_RDWR)
    except OSError as error:
        logger.error("the journal of revocations cannot be created: %s", error)
        return None


def _split(raw: bytes) -> list[str]:
    return [raw[at : at + _ENTRY_BYTES].decode("ascii", "replace") for at in range(0, len(raw), _ENTRY_BYTES)]
