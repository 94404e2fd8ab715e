"""Quota counters that all API processes of one host share: a memory-mapped file of fixed size.

The layout, all numbers little-endian:

    header        the layout's name, the boot id, and the number of entries in the log
    processes     process id and start time of each process that uses the file
    log           the writes of the change in progress
    accounts      a hash table of tenants and keys, by a digest of their names
    reservations  the open reservations, each with its process

A process changes the file under a file lock, which the kernel releases when the process dies. All writes of a change
are first copied to the log. If the process is then killed, the next holder of the lock completes the change. Once a
second, each process looks for reservations of dead processes, and settles these reservations as unused.

The counters need not survive a crash of the machine. A file of an earlier boot is replaced. A restart of the server
keeps the file, so that it does not reset any quota.

A new account may replace an idle account. If the tenant or key of the idle account later sends a request, the account
is seeded again.
"""

import asyncio
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slora_adapters.errors import StoreUnavailable
from slora_api.quotas.quota_account import Account, Moment
from slora_api.quotas.quota_counters import (
    BUCKETS,
    Charge,
    NotSeeded,
    Obstacle,
    Refusal,
    Reservation,
    Subject,
    Use,
)

logger = logging.getLogger(__name__)

_LAYOUT = b"slora quotas 1\0\0"
_HEADER = struct.Struct("<16s16s")
_NUMBER = struct.Struct("<q")
_LOG_LENGTH_AT = 64
_PROCESS = struct.Struct("<qq")
_PROCESSES_AT = 128
_MAX_PROCESSES = 128
_LOG_AT = 4096
_LOG_ENTRY = struct.Struct("<qq")
_ACCOUNTS_AT = 8192
_DIGEST_BYTES = 16
_ACCOUNT = struct.Struct(f"<{_DIGEST_BYTES}s8q{BUCKETS}I{BUCKETS}q")
# The fields are: process, two accounts (-1 is none), second, day, month, requests, tokens and answers. The field
# `process` is the position of the process plus 1; 0 marks a free entry.
_RESERVATION = struct.Struct("<9q")
_NO_ACCOUNT = -1
_NO_DIGEST = bytes(_DIGEST_BYTES)

_MAX_ACCOUNTS = 4096
_MAX_RESERVATIONS = 8192
# An account is in one of this many consecutive entries. The digest of its name determines the first of them.
_PROBES = 32
_LOCK_TRIES = 16
_LOCK_PAUSE_S = 0.0005
# A process holds the lock for about ten microseconds, unless the process is stopped.
_LOCK_PATIENCE_S = 5.0
_SWEEP_S = 1.0


class HostCounters:
    """Implements `QuotaCounters`. The file is created if necessary. If the disk has no room for the file, this process
    has counters of its own.

    clock_ns: nanoseconds on a clock that all processes of the host share. utc: Unix time.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        utc: Callable[[], float] = time.time,
        max_accounts: int = _MAX_ACCOUNTS,
        max_reservations: int = _MAX_RESERVATIONS,
    ) -> None:
        self._clock_ns = clock_ns
        self._utc = utc
        self._max_accounts = max_accounts
        self._max_reservations = max_reservations
        self._reservations_at = _ACCOUNTS_AT + max_accounts * _ACCOUNT.size
        self._num_bytes = self._reservations_at + max_reservations * _RESERVATION.size
        self._descriptor = _open(path, self._num_bytes)
        self._map = mmap.mmap(-1 if self._descriptor is None else self._descriptor, self._num_bytes)
        # Name of an account -> the place in the hash table where the account was last found.
        self._places: dict[str, int] = {}
        self._next_reservation = os.getpid() * 37 % max_reservations
        # Settlements to apply when this process gets the lock.
        self._unsettled: list[tuple[int, int, bool]] = []
        self._day = self._month = 0
        self._lock_blocking()
        try:
            self._complete_log()
            self._process_id = self._register()
        finally:
            self._unlock()

    # -- the protocol ------------------------------------------------------------------------------------------------

    async def reserve(
        self, subjects: tuple[Subject, ...], charge: Charge
    ) -> Reservation | Refusal | NotSeeded:
        await self._lock()
        try:
            return self._reserve(subjects, charge)
        finally:
            self._unlock()

    def settle(self, reservation: Reservation, used_tokens: int, *, counts: bool = True) -> None:
        assert isinstance(reservation.handle, int)
        if self._map.closed:  # `close` has settled all reservations.
            return
        self._unsettled.append((reservation.handle, used_tokens, counts))
        self._settle_waiting()

    async def read(self, subjects: tuple[Subject, ...]) -> tuple[Use, ...]:
        await self._lock()
        try:
            now = self._now()
            return tuple(account.use(now) for _, account in self._find_accounts(subjects, now))
        finally:
            self._unlock()

    async def seed(self, subject: Subject, tokens_today: int, tokens_this_month: int) -> None:
        await self._lock()
        try:
            ((place, account),) = self._find_accounts((subject,), self._now())
            account.tokens_today = max(account.tokens_today, tokens_today)
            account.tokens_this_month = max(account.tokens_this_month, tokens_this_month)
            account.is_seeded = True
            self._commit([self._account_write(place, subject.account, account)])
        finally:
            self._unlock()

    async def run(self) -> None:
        while True:
            try:
                self._settle_waiting()
                await self._sweep()
            except StoreUnavailable as error:
                logger.warning("reservations of dead processes cannot be settled now: %s", error)
            await asyncio.sleep(_SWEEP_S)

    async def close(self) -> None:
        await self._lock()
        try:
            self._return_reservations(self._process_id)
        finally:
            self._unlock()
        self._map.close()
        if self._descriptor is not None:
            os.close(self._descriptor)

    # -- reservations --------------------------------------------------------------------------------------------------

    def _reserve(self, subjects: tuple[Subject, ...], charge: Charge) -> Reservation | Refusal | NotSeeded:
        now = self._now()
        found = self._find_accounts(subjects, now)
        accounts = [account for _, account in found]
        pairs = list(zip(subjects, accounts, strict=True))
        if unseeded := [one for one, account in pairs if one.quota.has_budget and not account.is_seeded]:
            return NotSeeded(tuple(unseeded))
        obstacles = tuple(
            Obstacle(subject, name, wait_ms)
            for subject, account in pairs
            for name, wait_ms in account.find_obstacles(subject.quota, charge, now)
        )
        if obstacles:
            return Refusal(obstacles, tuple(account.use(now) for account in accounts))
        for account in accounts:
            account.charge(charge)
        places = [place for place, _ in found]
        handle = self._find_free_reservation()
        entry = _RESERVATION.pack(
            self._process_id + 1,
            *(*places, _NO_ACCOUNT)[:2],
            *(accounts[0].second, now.day, now.month),
            *(charge.requests, charge.tokens, charge.answers),
        )
        writes = [
            self._account_write(place, subject.account, account)
            for place, (subject, account) in zip(places, pairs, strict=True)
        ]
        self._commit([*writes, (self._reservation_offset(handle), entry)])
        return Reservation(charge, tuple(account.use(now) for account in accounts), handle)

    def _settle_waiting(self) -> None:
        """Applies the waiting settlements. If another process holds the lock, tries again after a pause."""
        if not self._unsettled:
            return
        if not self._try_lock():
            asyncio.get_running_loop().call_later(_LOCK_PAUSE_S, self._settle_waiting)
            return
        try:
            self._settle_all()
        finally:
            self._unlock()

    def _settle_all(self) -> None:
        now, waiting = self._now(), self._unsettled
        self._unsettled = []
        for handle, used_tokens, counts in waiting:
            self._settle(handle, used_tokens, now, counts=counts)

    def _settle(self, handle: int, used_tokens: int, now: Moment, *, counts: bool) -> None:
        offset = self._reservation_offset(handle)
        owner, first, second, charged_s, day, month, requests, tokens, answers = _RESERVATION.unpack_from(
            self._map, offset
        )
        if not owner:
            return
        charge, charged_at = Charge(tokens, answers, requests), Moment(charged_s * 1000, day, month)
        writes = []
        for place in (first, second):
            if place != _NO_ACCOUNT:
                digest, account = self._read_account(place)
                account.advance(now)
                account.settle(charge, charged_at, used_tokens, counts=counts)
                writes.append((self._account_offset(place), _pack(digest, account)))
        self._commit([*writes, (offset, bytes(_RESERVATION.size))])

    def _find_free_reservation(self) -> int:
        for step in range(self._max_reservations):
            handle = (self._next_reservation + step) % self._max_reservations
            if not _NUMBER.unpack_from(self._map, self._reservation_offset(handle))[0]:
                self._next_reservation = handle + 1
                return handle
        raise StoreUnavailable(
            f"the quota counters of this host have {self._max_reservations} open reservations, which is the limit: "
            "retry when some requests have ended"
        )

    async def _sweep(self) -> None:
        if not all(_is_alive(*process) for _, process in self._processes()):
            await self._lock()
            try:
                self._return_of_dead()
            finally:
                self._unlock()

    def _return_of_dead(self) -> None:
        """Settles the reservations of dead processes. The caller must hold the lock. Otherwise, a new process could
        take the entry of a dead process.
        """
        for process_id, process in list(self._processes()):
            if not _is_alive(*process):
                self._return_reservations(process_id)

    def _return_reservations(self, process_id: int) -> None:
        """Settles all reservations of a process as unused, and frees its entry in the file."""
        now = self._now()
        for handle in range(self._max_reservations):
            (owner,) = _NUMBER.unpack_from(self._map, self._reservation_offset(handle))
            if owner == process_id + 1:
                self._settle(handle, 0, now, counts=True)
        self._commit([(self._process_offset(process_id), bytes(_PROCESS.size))])

    # -- accounts ----------------------------------------------------------------------------------------------------

    def _find_accounts(self, subjects: tuple[Subject, ...], now: Moment) -> list[tuple[int, Account]]:
        """Returns each subject's account, updated to `now`, with its place in the hash table."""
        found: list[tuple[int, Account]] = []
        for subject in subjects:
            place, account = self._find_account(subject.account, now, [place for place, _ in found])
            account.advance(now)
            found.append((place, account))
        return found

    def _find_account(self, name: str, now: Moment, taken: list[int]) -> tuple[int, Account]:
        """Returns an account, which may be new, with its place in the hash table. taken: places of other accounts of
        the same request, which must not be replaced.
        """
        digest = _digest(name)
        place = self._places.get(name)
        if place is not None:
            known, account = self._read_account(place)
            if known == digest:
                return place, account
        first = int.from_bytes(digest[:8], "little") % self._max_accounts
        best: int | None = None
        best_s = now.second - BUCKETS
        for place in ((first + step) % self._max_accounts for step in range(_PROBES)):
            at = self._account_offset(place)
            known = self._map[at : at + _DIGEST_BYTES]
            if known == digest:
                _, account = self._read_account(place)
                break
            if place in taken or best_s < 0:
                continue
            if known == _NO_DIGEST:
                best, best_s = place, -1
                continue
            _, account = self._read_account(place)
            if account.second <= best_s and not account.answers and not account.reserved_tokens:
                best, best_s = place, account.second
        else:
            if best is None:
                raise StoreUnavailable("the quota counters of this host are full of active tenants and keys")
            place, account = best, Account()
        if len(self._places) >= 2 * self._max_accounts:
            self._places.clear()
        self._places[name] = place
        return place, account

    def _read_account(self, place: int) -> tuple[bytes, Account]:
        values = _ACCOUNT.unpack_from(self._map, self._account_offset(place))
        digest, second, day, month, today, this_month, reserved, answers, is_seeded = values[:9]
        requests, tokens = [*values[9 : 9 + BUCKETS]], [*values[9 + BUCKETS :]]
        account = Account(
            second, day, month, today, this_month, reserved, answers, bool(is_seeded), requests, tokens
        )
        return digest, account

    def _account_write(self, place: int, name: str, account: Account) -> tuple[int, bytes]:
        return self._account_offset(place), _pack(_digest(name), account)

    def _now(self) -> Moment:
        utc = self._utc()
        day = int(utc // 86400)
        if day != self._day:
            date = time.gmtime(utc)
            self._day, self._month = day, date.tm_year * 12 + date.tm_mon
        return Moment(self._clock_ns() // 1_000_000, day, self._month)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _register(self) -> int:
        """Enters this process into the file. Returns its position."""
        self._return_of_dead()
        used = {process_id for process_id, _ in self._processes()}
        free = [process_id for process_id in range(_MAX_PROCESSES) if process_id not in used]
        if not free:
            raise StoreUnavailable(f"{_MAX_PROCESSES} processes use the quota counters, which is the limit")
        entry = _PROCESS.pack(os.getpid(), _started_at(os.getpid()) or 0)
        self._commit([(self._process_offset(free[0]), entry)])
        return free[0]

    def _processes(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yields position, process id and start time of each process in the file."""
        for process_id in range(_MAX_PROCESSES):
            pid, started = _PROCESS.unpack_from(self._map, self._process_offset(process_id))
            if pid:
                yield process_id, (pid, started)

    # -- the file ------------------------------------------------------------------------------------------------------

    def _commit(self, writes: list[tuple[int, bytes]]) -> None:
        """Makes all writes. If the process is killed before the log is complete, no write takes effect."""
        shared, at = self._map, _LOG_AT
        for offset, content in writes:
            _LOG_ENTRY.pack_into(shared, at, offset, len(content))
            at += _LOG_ENTRY.size
            shared[at : at + len(content)] = content
            at += len(content)
        # The count is below 256, so only one of its bytes changes. A killed process cannot leave it half written.
        _NUMBER.pack_into(shared, _LOG_LENGTH_AT, len(writes))
        for offset, content in writes:
            shared[offset : offset + len(content)] = content
        _NUMBER.pack_into(shared, _LOG_LENGTH_AT, 0)

    def _complete_log(self) -> None:
        """Completes the change of a killed process: makes the logged writes again."""
        (length,) = _NUMBER.unpack_from(self._map, _LOG_LENGTH_AT)
        at, writes = _LOG_AT, []
        for _ in range(length):
            offset, size = _LOG_ENTRY.unpack_from(self._map, at)
            at += _LOG_ENTRY.size
            writes.append((offset, self._map[at : at + size]))
            at += size
        for offset, content in writes:
            self._map[offset : offset + len(content)] = content
        if length:
            _NUMBER.pack_into(self._map, _LOG_LENGTH_AT, 0)

    def _account_offset(self, place: int) -> int:
        return _ACCOUNTS_AT + place * _ACCOUNT.size

    def _reservation_offset(self, handle: int) -> int:
        return self._reservations_at + handle * _RESERVATION.size

    def _process_offset(self, process_id: int) -> int:
        return _PROCESSES_AT + process_id * _PROCESS.size

    # -- the lock ------------------------------------------------------------------------------------------------------

    async def _lock(self) -> None:
        """Takes the lock without blocking the event loop, and applies the waiting settlements."""
        deadline: float | None = None
        while not any(self._try_lock() for _ in range(_LOCK_TRIES)):
            deadline = time.monotonic() + _LOCK_PATIENCE_S if deadline is None else deadline
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"another process has held the lock of the quota counters for {_LOCK_PATIENCE_S:.0f} s: if this "
                    "lasts, restart the server"
                )
            await asyncio.sleep(_LOCK_PAUSE_S)
        if self._unsettled:
            self._settle_all()

    def _try_lock(self) -> bool:
        if self._descriptor is not None:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        self._complete_log()
        return True

    def _lock_blocking(self) -> None:
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def _unlock(self) -> None:
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()


def _pack(digest: bytes, account: Account) -> bytes:
    return _ACCOUNT.pack(
        digest,
        account.second,
        account.day,
        account.month,
        account.tokens_today,
        account.tokens_this_month,
        account.reserved_tokens,
        account.answers,
        account.is_seeded,
        *account.requests,
        *account.tokens,
    )


def _open(path: Path, num_bytes: int) -> int | None:
    """Opens the file. Creates a new file if there is none, or if it is from an earlier boot or has another layout.
    Returns None if the disk has no room.
    """
    header = _HEADER.pack(_LAYOUT, _boot_id())
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with _locked_directory(path.parent):
            try:
                descriptor = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                return _create(path, num_bytes, header)
            fits = os.fstat(descriptor).st_size == num_bytes
            if fits and os.pread(descriptor, _HEADER.size, 0) == header:
                return descriptor
            os.close(descriptor)
            return _create(path, num_bytes, header)
    except OSError as error:
        logger.error(
            "the quota counters cannot be kept in %s, so each process counts for itself: %s", path, error
        )
        return None


def _create(path: Path, num_bytes: int, header: bytes) -> int:
    """Creates the file and allocates all of its space, so that no write to the map can fail on a full disk."""
    draft = path.with_suffix(".new")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        os.pwrite(descriptor, header, 0)
        draft.rename(path)
    except BaseException:
        os.close(descriptor)
        draft.unlink(missing_ok=True)
        raise
    return descriptor


@contextmanager
def _locked_directory(directory: Path) -> Iterator[None]:
    """Locks the directory, so that no other process creates the file at the same time."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _boot_id() -> bytes:
    return bytes.fromhex(
        Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip().replace("-", "")
    )


def _started_at(pid: int) -> int | None:
    """Returns when a process started, in the kernel's ticks; None if it does not run. The start identifies a process,
    because the kernel reuses process ids.
    """
    try:
        state, *rest = (
            Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESRCH):
            raise
        return None
    return None if state in "ZX" else int(rest[18])


def _is_alive(pid: int, started: int) -> bool:
    return _started_at(pid) == started
