"""Checks the database, the store of adapters, each Redis, and their clocks."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from slora.byte_text import format_bytes
from slora_adapters.clock_offset import ClockOffset
from slora_adapters.database.database_facts import measure_database_clock, read_database_facts
from slora_adapters.errors import StoreUnavailable
from slora_adapters.store.store import Store
from slora_adapters.store.store_url import (
    FILE_SCHEMES,
    REDIS_SCHEMES,
    check_redis_url,
    load_optional,
    open_store,
)
from slora_api.data_dir import DataDir
from slora_api.doctor.data_directory import check_directory
from slora_api.doctor.finding import Finding, failure, fine, warning
from slora_api.server.children import store_url
from slora_api.settings import Settings

if TYPE_CHECKING:
    from slora_adapters.store.redis_facts import RedisFacts

__all__ = ["check_clock", "check_database", "check_redis", "check_store"]

_PROBE = "probe"
# A check warns if two clocks differ by more than the first limit, and fails above the second limit. Each host uses its
# own clock for leases of batches, which last half a minute.
_MOST_SKEW_S, _UNUSABLE_SKEW_S = 2.0, 30.0


def check_database(settings: Settings) -> Iterator[Finding]:
    data = DataDir(Path(settings.data_dir).resolve())
    facts = read_database_facts(settings.database or data.database)
    if facts.revisions is None:
        yield fine(f"{facts.label} does not exist yet; the first start creates it")
        return
    found, head = facts.revisions
    if found is None:
        yield fine(f"{facts.server} {facts.label} has no tables of this release yet; the server creates them")
    elif found == head:
        yield fine(f"{facts.server} {facts.label} has the schema of this release ({head})")
    else:
        yield warning(
            f"{facts.server} {facts.label} has schema {found}; the server migrates it to {head} when it starts",
            "make a backup first, because older releases refuse the migrated schema",
        )


def check_store(settings: Settings) -> Iterator[Finding]:
    """Opens the store as a server does, and writes, reads and deletes a blob. If the store is a directory that does not
    exist yet, the directory is not created.
    """
    url = store_url(settings, DataDir(Path(settings.data_dir).resolve()))
    directory = _directory_of(url)
    if directory is not None:
        yield from check_directory(directory, "--store")
        if not (directory / "blobs").is_dir():
            return
    with closing(open_store(url)) as store:
        _try_blob(store)
    if directory is None:
        yield fine(f"a {urlsplit(url).scheme}:// store")
    yield fine("a blob was written, read and deleted")


def _directory_of(url: str) -> Path | None:
    parts = urlsplit(url)
    if "://" not in url:
        return Path(url).resolve()
    return Path(unquote(parts.path)).resolve() if parts.scheme in FILE_SCHEMES else None


def _try_blob(store: Store) -> None:
    """Writes, reads and deletes a blob. Its content is random, so the blob belongs to no adapter and no other check.
    Raises StoreUnavailable.
    """
    content = os.urandom(64)
    digest = hashlib.sha256(content).hexdigest()
    try:
        store.put(digest, {_PROBE: content})
        with closing(store.open(digest)) as blob:
            read = bytearray(len(content))
            blob.read_into(_PROBE, 0, memoryview(read))
    finally:
        store.delete(digest)
    if bytes(read) != content:
        raise StoreUnavailable("the store returned different bytes from those written: check its disk")


def check_redis(settings: Settings) -> Iterator[Finding]:
    """Checks the warm tier and the Redis of quotas. If the store is a Redis, `check_store` checks it."""
    if settings.redis:
        yield from _check_warm_tier(settings.redis)
    if settings.quota_redis:
        yield from _check_quotas(settings.quota_redis)
    if not settings.redis and not settings.quota_redis:
        yield fine("not used as a warm tier or for quotas")


def _check_warm_tier(url: str) -> Iterator[Finding]:
    facts = _read_facts(url, "the warm tier")
    yield fine(_describe("warm tier", facts))
    if facts.eviction == "noeviction" and facts.max_bytes and facts.used_bytes > 0.9 * facts.max_bytes:
        yield warning(
            "the warm tier is nearly full; when it is full, it refuses new copies of adapters",
            "raise maxmemory, or set maxmemory-policy allkeys-lru if nothing else is in this Redis",
        )


def _check_quotas(url: str) -> Iterator[Finding]:
    facts = _read_facts(url, "--quota-redis")
    yield fine(_describe("quotas", facts))
    if facts.eviction != "noeviction":
        yield warning("this Redis may forget counters of quotas", "set maxmemory-policy noeviction")


def _describe(use: str, facts: "RedisFacts") -> str:
    limit = format_bytes(facts.max_bytes) if facts.max_bytes else "no limit"
    return (
        f"{use}: Redis {facts.version}, {format_bytes(facts.used_bytes)} used of {limit}, maxmemory-policy "
        f"{facts.eviction}, appendonly {'yes' if facts.is_logged else 'no'}"
    )


def _read_facts(url: str, what: str) -> "RedisFacts":
    check_redis_url(url, what)
    module = load_optional("slora_adapters.store.redis_facts", "redis", what)
    try:
        facts: RedisFacts = module.read_redis_facts(url)
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{what}: {error}; check its URL, and that it runs") from error
    return facts


def check_clock(settings: Settings) -> Iterator[Finding]:
    """Compares this machine's clock with the clocks of PostgreSQL and Redis. Leases and quota windows depend on these
    clocks.
    """
    compared = 0
    for name, offset in _measure_clocks(settings):
        compared += 1
        skew_s = max(0.0, abs(offset.seconds) - offset.uncertainty_s)
        side = "ahead of" if offset.seconds > 0 else "behind"
        text = f"the clock of {name} is {abs(offset.seconds):.3g} s {side} this machine's"
        remedy = "synchronize both machines by NTP"
        if skew_s > _UNUSABLE_SKEW_S:
            yield failure(f"{text}, so two hosts may compute the same batch", remedy)
        elif skew_s > _MOST_SKEW_S:
            yield warning(text, remedy)
        else:
            yield fine(text)
    if not compared:
        yield fine("no other clock is used")


def _measure_clocks(settings: Settings) -> Iterator[tuple[str, ClockOffset]]:
    """Yields the name and the clock offset of each server that answers. Other checks report unreachable servers."""
    if settings.database:
        try:
            offset = measure_database_clock(settings.database)
        except (StoreUnavailable, ValueError):
            offset = None
        if offset is not None:
            yield "the database", offset
    places = {"the warm tier": settings.redis, "the Redis of quotas": settings.quota_redis}
    if urlsplit(settings.store).scheme in REDIS_SCHEMES:
        places["the store"] = settings.store
    for name, url in places.items():
        try:
            if url:
                yield name, _read_facts(url, name).clock
        except (StoreUnavailable, ValueError):
            continue
