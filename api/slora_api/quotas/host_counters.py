"""Quota counters that all API processes of one host share: a memory-mapped file of fixed size.

The layout, all numbers little-endian:

    header        the layout's name and the boot id, then the number of entries in the log
    log           the writes of the change in progress
    accounts      a hash table of tenants and keys, by a digest of their names
    reservations  the open reservations, each with its process

A process changes the file under a file lock, which the kernel releases when the process dies. All writes of a change
are first copied to the log. If the process is then killed, the next holder of the lock completes the change. The main
process settles the open reservations of a dead process as unused.

The counters need not survive a crash of the machine. A file of an earlier boot is replaced. A restart of the server
keeps the file, so that it does not reset any quota.

A new account may replace an idle account. If the tenant or key of the idle account later sends a request, the account
is seeded again.
"""

import asyncio
import fcntl
import hashlib
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

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
T = TypeVar("T")

_LAYOUT = b"slora quotas 2 "
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NUMBER = struct.Struct("<q")
_LOG_LENGTH_AT = 64
_LOG_AT = 128
_LOG_ENTRY = struct.Struct("<qq")
_ACCOUNTS_AT = 4096
_DIGEST_BYTES = 16
_ACCOUNT = struct.Struct(f"<{_DIGEST_BYTES}s8q{BUCKETS}I{BUCKETS}q")
# The fields are: process, two accounts (-1 is none), second, day, month, requests, tokens and answers. The field
# `process` is the number of the process plus 1; 0 marks a free entry.
_RESERVATION = struct.Struct("<9q")
_NO_ACCOUNT = -1

_MAX_ACCOUNTS = 4096
_MAX_RESERVATIONS = 8192
# An account is in one of this many consecutive entries. The digest of its name determines the first of them.
_PROBES = 32
_LOCK_TRIES = 16
_LOCK_PAUSE_S = 0.0005
# A process holds the lock for about ten microseconds, unless the process is stopped.
_LOCK_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class _FileHandle:
    place: int
    entry: bytes  # what the reservation is in the file, as long as it is open


class HostCounters:
    """Implements `QuotaCounters`. If the disk has no room for the file, each process has counters of its own.

    process: the number of this process on the host. The main process has number 0 and creates the file before the
    others start.
    clock_ns: nanoseconds on a clock that all processes of the host share. utc: Unix time.
    """

    def __init__(
        self,
        path: Path,
        process: int = 0,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        utc: Callable[[], float] = time.time,
        max_accounts: int = _MAX_ACCOUNTS,
        max_reservations: int = _MAX_RESERVATIONS,
    ) -> None:
        self._process = process
        self._clock_ns = clock_ns
        self._utc = utc
        self._max_accounts = max_accounts
        self._max_reservations = max_reservations
        self._reservations_at = _ACCOUNTS_AT + max_accounts * _ACCOUNT.size
        num_bytes = self._reservations_at + max_reservations * _RESERVATION.size
        self._descriptor = _open(path, num_bytes, creates=process == 0)
        self._map = mmap.mmap(-1 if self._descriptor is None else self._descriptor, num_bytes)
        self._next_reservation = os.getpid() * 37 % max_reservations
        # Settlements to apply when this process gets the lock.
        self._waiting: list[Callable[[Moment], None]] = []
        self._day = self._month = 0
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            self._complete_log()
            # When the main process starts, all other processes are of an earlier server.
            self._return_reservations(process or None, self._now())
        finally:
            self._unlock()

    # -- the protocol ------------------------------------------------------------------------------------------------

    async def reserve(
        self, subjects: tuple[Subject, ...], charge: Charge
    ) -> Reservation | Refusal | NotSeeded:
        return await self._run_locked(partial(self._reserve, subjects, charge))

    def settle(self, reservation: Reservation, used_tokens: int, *, counts: bool = True) -> None:
        assert isinstance(reservation.handle, _FileHandle)
        self._run_soon(partial(self._settle, reservation.handle, used_tokens, counts=counts))

    def release(self, process: int) -> None:
        self._run_soon(partial(self._return_reservations, process))

    async def read(self, subjects: tuple[Subject, ...]) -> tuple[Use, ...]:
        return await self._run_locked(
            lambda now: tuple(account.use(now) for *_, account in self._find_accounts(subjects, now))
        )

    async def seed(self, subject: Subject, tokens_today: int, tokens_this_month: int) -> None:
        def write(now: Moment) -> None:
            ((place, digest, account),) = self._find_accounts((subject,), now)
            account.tokens_today = max(account.tokens_today, tokens_today)
            account.tokens_this_month = max(account.tokens_this_month, tokens_this_month)
            account.is_seeded = True
            self._commit([(self._account_offset(place), _pack(digest, account))])

        await self._run_locked(write)

    async def run(self) -> None:
        """Nothing has to be kept alive."""

    async def close(self) -> None:
        await self._run_locked(partial(self._return_reservations, self._process))
        self._map.close()
        if self._descriptor is not None:
            os.close(self._descriptor)

    # -- reservations --------------------------------------------------------------------------------------------------

    def _reserve(
        self, subjects: tuple[Subject, ...], charge: Charge, now: Moment
    ) -> Reservation | Refusal | NotSeeded:
        found = self._find_accounts(subjects, now)
        accounts = [account for *_, account in found]
        pairs = list(zip(subjects, accounts, strict=True))
        if unseeded := [
            subject for subject, account in pairs if subject.quota.has_budget and not account.is_seeded
        ]:
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
        entry = _RESERVATION.pack(
            self._process + 1,
            *(*(place for place, *_ in found), _NO_ACCOUNT)[:2],
            *(accounts[0].second, now.day, now.month),
            *(charge.requests, charge.tokens, charge.answers),
        )
        handle = _FileHandle(self._find_free_reservation(), entry)
        writes = [(self._account_offset(place), _pack(digest, account)) for place, digest, account in found]
        self._commit([*writes, (self._reservation_offset(handle.place), entry)])
        return Reservation(charge, tuple(account.use(now) for account in accounts), handle)

    def _settle(self, handle: _FileHandle, used_tokens: int, now: Moment, *, counts: bool) -> None:
        offset = self._reservation_offset(handle.place)
        if self._map[offset : offset + _RESERVATION.size] != handle.entry:
            return  # The main process has returned it.
        _, first, second, charged_s, day, month, requests, tokens, answers = _RESERVATION.unpack(handle.entry)
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
            place = (self._next_reservation + step) % self._max_reservations
            if not self._owner(place):
                self._next_reservation = place + 1
                return place
        raise StoreUnavailable(
            f"the quota counters of this host have {self._max_reservations} open reservations, which is the limit: "
            "retry when some requests have ended"
        )

    def _return_reservations(self, process: int | None, now: Moment) -> None:
        """Settles the reservations of a process, or of all processes, as unused."""
        # One read of the table instead of one for each entry, because other processes wait for the lock.
        table = memoryview(self._map[self._reservations_at :]).cast("q")
        for place, owner in enumerate(table[:: _RESERVATION.size // table.itemsize].tolist()):
            if owner and (process is None or owner == process + 1):
                offset = self._reservation_offset(place)
                entry = self._map[offset : offset + _RESERVATION.size]
                self._settle(_FileHandle(place, entry), 0, now, counts=True)

    def _owner(self, place: int) -> int:
        owner: int = _NUMBER.unpack_from(self._map, self._reservation_offset(place))[0]
        return owner

    # -- accounts ----------------------------------------------------------------------------------------------------

    def _find_accounts(self, subjects: tuple[Subject, ...], now: Moment) -> list[tuple[int, bytes, Account]]:
        """Returns the place, the digest and the account, updated to `now`, of each subject."""
        found: list[tuple[int, bytes, Account]] = []
        for subject in subjects:
            digest = hashlib.blake2b(subject.account.encode(), digest_size=_DIGEST_BYTES).digest()
            place, account = self._find_account(digest, now, [place for place, *_ in found])
            account.advance(now)
            found.append((place, digest, account))
        return found

    def _find_account(self, digest: bytes, now: Moment, taken: list[int]) -> tuple[int, Account]:
        """Returns an account, which may be new, with its place in the hash table. taken: places of other accounts of
        the same request, which must not be replaced.
        """
        first = int.from_bytes(digest[:8], "little") % (self._max_accounts - _PROBES + 1)
        places = range(first, first + _PROBES)
        for place in places:
            at = self._account_offset(place)
            if self._map[at : at + _DIGEST_BYTES] == digest:
                return place, self._read_account(place)[1]
        idle = [
            (account.second, place)
            for place in places
            if place not in taken and (account := self._read_account(place)[1]).is_idle(now)
        ]
        if not idle:
            raise StoreUnavailable("the quota counters of this host are full of active tenants and keys")
        return min(idle)[1], Account()

    def _read_account(self, place: int) -> tuple[bytes, Account]:
        values = _ACCOUNT.unpack_from(self._map, self._account_offset(place))
        digest, second, day, month, today, this_month, reserved, answers, is_seeded = values[:9]
        requests, tokens = [*values[9 : 9 + BUCKETS]], [*values[9 + BUCKETS :]]
        account = Account(
            second, day, month, today, this_month, reserved, answers, bool(is_seeded), requests, tokens
        )
        return digest, account

    def _now(self) -> Moment:
        utc = self._utc()
        day = int(utc // 86400)
        if day != self._day:
            date = time.gmtime(utc)
            self._day, self._month = day, date.tm_year * 12 + date.tm_mon
        return Moment(self._clock_ns() // 1_000_000, day, self._month)

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
        if not length:
            return
        at = _LOG_AT
        for _ in range(length):
            offset, size = _LOG_ENTRY.unpack_from(self._map, at)
            at += _LOG_ENTRY.size
            self._map[offset : offset + size] = self._map[at : at + size]
            at += size
        _NUMBER.pack_into(self._map, _LOG_LENGTH_AT, 0)

    def _account_offset(self, place: int) -> int:
        return _ACCOUNTS_AT + place * _ACCOUNT.size

    def _reservation_offset(self, place: int) -> int:
        return self._reservations_at + place * _RESERVATION.size

    # -- the lock ------------------------------------------------------------------------------------------------------

    async def _run_locked(self, work: Callable[[Moment], T]) -> T:
        """Runs `work` under the lock. While another process holds the lock, the event loop goes on."""
        deadline: float | None = None
        while not any(self._try_lock() for _ in range(_LOCK_TRIES)):
            deadline = time.monotonic() + _LOCK_PATIENCE_S if deadline is None else deadline
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"another process has held the lock of the quota counters for {_LOCK_PATIENCE_S:.0f} s: if this "
                    "lasts, restart the server"
                )
            await asyncio.sleep(_LOCK_PAUSE_S)
        try:
            now = self._now()
            self._run_waiting(now)
            return work(now)
        finally:
            self._unlock()

    def _run_soon(self, work: Callable[[Moment], None]) -> None:
        """Runs `work` under the lock: at once, or as soon as no other process holds the lock."""
        if not self._map.closed:  # `close` has settled all reservations.
            self._waiting.append(work)
            self._try_waiting()

    def _try_waiting(self) -> None:
        if not self._waiting:
            return
        if not self._try_lock():
            asyncio.get_running_loop().call_later(_LOCK_PAUSE_S, self._try_waiting)
            return
        try:
            self._run_waiting(self._now())
        finally:
            self._unlock()

    def _run_waiting(self, now: Moment) -> None:
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work(now)

    def _try_lock(self) -> bool:
        if self._descriptor is not None:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        self._complete_log()
        return True

    def _unlock(self) -> None:
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


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


def _open(path: Path, num_bytes: int, *, creates: bool) -> int | None:
    """Opens the file. Returns None if that fails.

    creates: whether to create a new file if there is none, or if it is from an earlier boot or has another layout.
    """
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        header = _LAYOUT + _BOOT_ID.read_bytes()
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDWR)
            fits = os.fstat(descriptor).st_size == num_bytes
            if fits and os.pread(descriptor, len(header), 0) == header:
                return descriptor
            os.close(descriptor)
        if not creates:
            raise OSError("the main process could not create the file")
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
