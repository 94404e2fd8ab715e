"""The board: memory that the API processes of one host share.

Each API process writes only its own column, and reads all columns. So no process waits for a lock, and a stopped or
killed process does not block the others. The main process also writes the state of the host, and clears the column of a
process that died.

The memory consists of 64-bit words. It starts with the state of the host: a change counter, the length of the state's
JSON, and the JSON. The columns follow. A column has the words of `_Word` and one table for each tally.

Tells an API process that another process on this host has committed a change to the database.

A client that has changed an alias through one process may send its next request to another process. That process reads
the change from the feed only some tens of milliseconds later. Until then, that process looks up keys and names in the
database instead of its caches. So the request sees the change.
"""

import json
import mmap
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from itertools import islice
from threading import Lock
from typing import Any, Literal

TallyName = Literal["answers", "uploads", "body bytes", "connections"]
_TALLIES: tuple[TallyName, ...] = ("answers", "uploads", "body bytes", "connections")
_WORD_BYTES = 8
_MAX_STATE_BYTES = 64 << 10
_STATE_AT = 2 * _WORD_BYTES
_HEADER_BYTES = _STATE_AT + _MAX_STATE_BYTES


# The number of bits of a word. A cluster may have more engines.
_MAX_ENGINES = 64


class _Word(IntEnum):
    """The first words of a column.

    CHANGES: number of changes that the process has committed to the database, including those before a restart.
    SERVING: bit N is 1 while the process can send requests to engine N. CONNECTIONS: number of its open connections.
    """

    CHANGES = 0
    SERVING = 1
    CONNECTIONS = 2


@dataclass(frozen=True, slots=True)
class BoardSize:
    """The numbers that determine the size of the board. num_processes: the main process and all workers. num_keys: the
    maximum number of keys of one process in one tally.
    """

    num_processes: int
    num_keys: int

    @property
    def table_bytes(self) -> int:
        # A table consists of the total, the number of rows ever used, the hashes of the keys, and the counts of the
        # keys.
        return _WORD_BYTES * (2 + 2 * self.num_keys)

    @property
    def column_bytes(self) -> int:
        return _WORD_BYTES * len(_Word) + len(_TALLIES) * self.table_bytes

    @property
    def num_bytes(self) -> int:
        return _HEADER_BYTES + self.num_processes * self.column_bytes


class _Table:
    """One process's part of a tally: a count for each key. Another process may read it at any time.

    at: the position of the table's first byte in the memory. A row without a key has the hash 0.
    """

    def __init__(self, memory: mmap.mmap, words: "memoryview[int]", at: int, num_keys: int) -> None:
        self._memory, self._words = memory, words
        self._first_word = at // _WORD_BYTES
        self._hashes_at = at + 2 * _WORD_BYTES
        self._num_keys = num_keys
        # The row of each key, and the rows that are free again. Only the process that writes the table uses these two
        # fields.
        self._rows: dict[str, int] = {}
        self._free_rows: list[int] = []

    @property
    def total(self) -> int:
        return self._words[self._first_word]

    def count_of(self, key_hash: bytes) -> int:
        used = self._words[self._first_word + 1] * _WORD_BYTES
        at = self._memory.find(key_hash, self._hashes_at, self._hashes_at + used)
        while at >= 0 and at % _WORD_BYTES:  # Skip a match that spans two hashes.
            at = self._memory.find(key_hash, at + 1, self._hashes_at + used)
        return 0 if at < 0 else self._words[at // _WORD_BYTES + self._num_keys]

    def write(self, key: str, count: int, total: int) -> None:
        first = self._first_word
        self._words[first] = total
        row = self._rows.get(key)
        if row is None and not count:
            return
        if row is None:
            row = self._rows[key] = self._free_rows.pop() if self._free_rows else self._words[first + 1]
            assert row < self._num_keys, f"a table of {self._num_keys} keys is full"
            self._words[first + 2 + self._num_keys + row] = count
            self._words[first + 2 + row] = int.from_bytes(_hash(key), sys.byteorder)
            self._words[first + 1] = max(self._words[first + 1], row + 1)
        elif count:
            self._words[first + 2 + self._num_keys + row] = count
        else:
            self._words[first + 2 + row] = 0
            self._free_rows.append(self._rows.pop(key))


class Tally:
    """Counts what each key, such as a tenant, holds in all API processes of the host. A new tally is empty.

    own: the table of this process; None if there are no other processes. others: the tables of the other processes.
    """

    def __init__(self, own: _Table | None = None, others: Sequence[_Table] = ()) -> None:
        self._own, self._others = own, others
        self._counts: Counter[str] = Counter()
        self._total = 0

    @property
    def total(self) -> int:
        return self._total + sum(table.total for table in self._others)

    def count_of(self, key: str) -> int:
        own = self._counts[key]
        if not self._others:
            return own
        key_hash = _hash(key)
        return own + sum(table.count_of(key_hash) for table in self._others)

    def add(self, key: str, count: int) -> None:
        """Adds `count` to the count of a key. A negative count removes what was added."""
        self._total += count
        self._counts[key] += count
        left = self._counts[key]
        if not left:
            del self._counts[key]
        if self._own is not None:
            self._own.write(key, left, self._total)


class HostBoard:
    """The board as process number `process` sees it; the main process has number 0.

    descriptor: the file descriptor of the shared memory; None if this is the only process.
    """

    def __init__(self, descriptor: int | None, size: BoardSize, process: int = 0) -> None:
        self.descriptor, self.size, self.process = descriptor, size, process
        self._memory = mmap.mmap(-1 if descriptor is None else descriptor, size.num_bytes)
        self._words: memoryview[int] = memoryview(self._memory).cast("Q")
        self._seen_state = 0
        self._lock = Lock()

    @staticmethod
    def create(size: BoardSize) -> "HostBoard":
        """Creates the board of the main process, all zeros. `close` closes its descriptor."""
        if size.num_processes == 1:
            return HostBoard(None, size)
        descriptor = os.memfd_create("slora-board")
        os.ftruncate(descriptor, size.num_bytes)
        return HostBoard(descriptor, size)

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        if self.descriptor is not None:
            os.close(self.descriptor)

    def tally(self, name: TallyName) -> Tally:
        """Returns the tally of this name. Call it once for each name, because all tallies of a name would share one
        table.
        """
        tables = [self._table(process, name) for process in range(self.size.num_processes)]
        return Tally(tables.pop(self.process), tables)

    def clear(self, process: int) -> None:
        """Clears the column of a process that has ended, which releases what it held."""
        start = self._column(process) + _WORD_BYTES * _Word.SERVING
        end = self._column(process + 1)
        self._memory[start:end] = bytes(end - start)

    # -- the state of the host --------------------------------------------------------------------------------------

    def write_state(self, state: dict[str, Any]) -> None:
        """Replaces the state of the host. Only the main process calls this method."""
        text = json.dumps(state).encode()
        if len(text) > _MAX_STATE_BYTES:
            raise ValueError(f"the state has {len(text)} bytes; the board has room for {_MAX_STATE_BYTES}")
        self._words[0] += 1  # The change counter is odd while the text is incomplete.
        self._words[1] = len(text)
        self._memory[_STATE_AT : _STATE_AT + len(text)] = text
        self._words[0] += 1

    def read_state(self) -> dict[str, Any] | None:
        """Returns the state of the host; None if it has not changed since the last call, or is being written."""
        number = self._words[0]
        if number == self._seen_state or number % 2:
            return None
        text = self._memory[_STATE_AT : _STATE_AT + self._words[1]]
        if self._words[0] != number:
            return None
        self._seen_state = number
        state: dict[str, Any] = json.loads(text)
        return state

    # -- words of columns -------------------------------------------------------------------------------------------

    def count_change(self) -> None:
        """Tells the other processes that this process has committed a change. May be called from any thread."""
        with self._lock:
            self._words[self._word(self.process, _Word.CHANGES)] += 1

    def changes_elsewhere(self) -> tuple[int, ...]:
        """Returns, for every other process, the number of changes that it has committed."""
        return tuple(self._read_others(_Word.CHANGES))

    def set_serving(self, engines: Iterable[bool]) -> None:
        """Tells the other processes to which engines this process can send requests.

        Only the first 64 engines are told. A cluster may have more.
        """
        bits = sum(is_serving << number for number, is_serving in enumerate(islice(engines, _MAX_ENGINES)))
        self._words[self._word(self.process, _Word.SERVING)] = bits

    def are_others_ready(self) -> bool:
        return all(self._read_others(_Word.SERVING))

    def serves_elsewhere(self, engine: int) -> bool:
        """Returns whether all other API processes can send requests to the engine with this number.

        With workers, the main process answers no requests, so it does not count. True for an engine of which the board
        does not tell.
        """
        if engine >= _MAX_ENGINES:
            return True
        workers = (process for process in range(1, self.size.num_processes) if process != self.process)
        return all(self._words[self._word(process, _Word.SERVING)] >> engine & 1 for process in workers)

    def set_connections(self, count: int) -> None:
        self._words[self._word(self.process, _Word.CONNECTIONS)] = count

    def least_connections_elsewhere(self) -> int | None:
        """Returns the lowest number of open connections among the other ready processes; None if no other process is
        ready.
        """
        counts = zip(self._read_others(_Word.CONNECTIONS), self._read_others(_Word.SERVING), strict=True)
        return min((count for count, is_ready in counts if is_ready), default=None)

    def _read_others(self, word: _Word) -> list[int]:
        others = (process for process in range(self.size.num_processes) if process != self.process)
        return [self._words[self._word(process, word)] for process in others]

    def _word(self, process: int, word: _Word) -> int:
        return self._column(process) // _WORD_BYTES + word

    def _column(self, process: int) -> int:
        return _HEADER_BYTES + process * self.size.column_bytes

    def _table(self, process: int, name: TallyName) -> _Table:
        tables_at = self._column(process) + _WORD_BYTES * len(_Word)
        at = tables_at + _TALLIES.index(name) * self.size.table_bytes
        return _Table(self._memory, self._words, at, self.size.num_keys)


def _hash(key: str) -> bytes:
    """Returns the 8-byte hash of a key."""
    return blake2b(key.encode(), digest_size=_WORD_BYTES).digest()


# The longest time for which the caches are bypassed. After this time, the caches are used again even if the feed could
# not be read, because the database may be unavailable.
_MAX_BEHIND_S = 1.0


class HostChanges:
    """Tracks the changes that the other API processes of this host have committed. clock: monotonic seconds."""

    def __init__(self, board: HostBoard, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._clock = clock
        self._applied = board.changes_elsewhere()
        # The other processes' counts that the follower has not reached yet, and the time at which these counts were
        # first seen.
        self._missing: tuple[int, ...] = ()
        self._missing_since = 0.0

    def announce(self) -> None:
        """Tells the other processes that this process has committed a change. May be called from any thread."""
        self._board.count_change()

    def read(self) -> tuple[int, ...]:
        """Returns, for every other process, the number of changes that it has committed. Pass these numbers to `apply`
        after reading the feed.
        """
        return self._board.changes_elsewhere()

    def apply(self, committed: tuple[int, ...]) -> None:
        self._applied = committed

    def is_behind(self) -> bool:
        """Returns whether the caches may lack a change by another process of this host."""
        committed = self._board.changes_elsewhere()
        if committed == self._applied:
            return False
        if committed != self._missing:
            self._missing, self._missing_since = committed, self._clock()
        return self._clock() - self._missing_since < _MAX_BEHIND_S
