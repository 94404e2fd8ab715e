"""A journal of key revocations that could not yet be written to the database.

The journal is a file of fixed size. Its space is allocated when it is created, so an entry needs no free space. Every
process of the host maps the file, so an entry takes effect in all processes at once and survives a restart. On a
copy-on-write file system an entry may still need free space. An entry that cannot be written takes effect only in this
process.

The file begins with a counter of changes and the number of entries, each as 8 bytes, little-endian. The key ids follow,
each as 8 bytes. Writers lock the file and write the counter last. A reader reads the entries again if the counter has
changed.
"""

import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from slora_adapters.process.durable_file import create_durably

logger = logging.getLogger(__name__)

_HEADER, _NUMBER = struct.Struct("<QQ"), struct.Struct("<Q")
_ENTRY_BYTES = 8
MAX_ENTRIES = 1022
_FILE_BYTES = _HEADER.size + MAX_ENTRIES * _ENTRY_BYTES


class RevocationJournal:
    """The journal at `path`, created if necessary. If the disk has no room for the file, this process keeps the entries
    in memory.

    It may be used by several threads. Key ids have 8 ASCII characters.
    """

    def __init__(self, path: Path) -> None:
        self._lock = Lock()
        # Entries that could not be written to the file.
        self._own: frozenset[str] = frozenset()
        self._seen_counter = -1
        self._shared: frozenset[str] = frozenset()
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
        if counter != self._seen_counter:
            end = _HEADER.size + min(count, MAX_ENTRIES) * _ENTRY_BYTES
            raw = self._map[_HEADER.size : end]
            self._shared = frozenset(_split(raw))
            self._seen_counter = counter
        return self._shared

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
