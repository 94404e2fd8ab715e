"""The registry's storage in Redis, for several hosts. The Redis must be durable (see `durable_redis.py`).

A change reads a name with one atomic script and edits it in this process. A second atomic script writes the result if
the revision of the name is unchanged. Otherwise the whole change is repeated. So no reader sees a partial change, no
partial change is written, and no update is lost. `redis_scripts.py` has the scripts and documents the keys.

A blob is dropped in a store that is independent of this Redis. So `collect` writes a lease on the digest, and waits
until the lease is on disk, before it drops the blob. `reserve` waits until the lease ends, so that no upload of the
same weights begins during the drop. A lease ends as follows:

- It ends when the drop returns.
- It expires after LEASE_S if the drop failed or the server crashed. Until then the store might still execute the drop.
- It ends earlier if the crashed server restarts. By then the store has executed the drop, or never will, or the drop
  affects only the copy that the crashed process saw.

A drop takes milliseconds, or minutes if the store does not answer. One race remains. A process may freeze during a drop
for longer than LEASE_S and then resume. It could then delete a blob that was uploaded after the lease expired.

The feed's cursor includes the run id of the Redis server. A Redis that was killed may have lost changes that readers
had seen but that were not yet acknowledged to the writer. Those readers must look everything up again.

The module needs the package redis, so only `registry_url.py` imports it.
"""

import json
import random
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from slora_adapters.errors import StoreUnavailable, TryAgain
from slora_adapters.peft.adapter import AdapterExtras
from slora_adapters.registry.adapter_record import AdapterRecord, Rollout, StorageUsage
from slora_adapters.registry.named_adapter import NamedAdapter
from slora_adapters.registry.redis_names import parse_extras, parse_name, plan_change
from slora_adapters.registry.redis_scripts import (
    END_LEASE,
    END_LEASES,
    LEASE,
    OPEN,
    PREFIX,
    READ,
    RESERVE,
    SAVE,
    SCHEMA,
    name_key,
)
from slora_adapters.registry.reference import LATEST
from slora_adapters.registry.registry_storage import (
    RESERVATION_S,
    Change,
    Changes,
    NameKey,
    reservation_lost,
)
from slora_adapters.store.durable_redis import (
    DURABLE_TIMEOUT_S,
    as_unavailable,
    check_settings,
    connect,
    wait_for_disk,
)
from slora_adapters.version import AdapterVersion

__all__ = ["LEASE_S", "RedisStorage", "open_redis_storage"]

T = TypeVar("T")
# TTL of a lease. If a drop does not return, the same weights cannot be uploaded for this long.
LEASE_S = 600
# How long an upload waits for a drop of the same weights. A change waits as long for concurrent changes of its name.
_PATIENCE_S = 10.0
_PAUSE_S = 0.01
# Timeout of lookups, because requests wait for them.
_LOOKUP_TIMEOUT_S = 5.0
# _MAX_CHANGES: most entries of the feed in one answer. _BATCH: most names that one script reads. More would block Redis
# for too long.
_MAX_CHANGES = 1000
_BATCH = 200


def open_redis_storage(url: str, server: str | None = None) -> "RedisStorage":
    """Connects to the Redis at `url` and prepares it as a registry.

    server: an id that only one running process has. Leases of earlier processes with the same id are ended. None uses a
    new random id.

    Raises StoreUnavailable if the Redis does not answer or was written by a newer release. Raises StoreUnfit if the
    settings of the Redis allow data loss.
    """
    storage = RedisStorage(url, server or uuid.uuid4().hex)
    try:
        storage.prepare()
    except BaseException:
        storage.close()
        raise
    return storage


class RedisStorage:
    """Implements `registry_storage.RegistryStorage` with Redis."""

    def __init__(self, url: str, server: str) -> None:
        self._server = server
        # No command is retried. A retried change could be applied twice. A retried lookup could make a request wait for
        # a second timeout.
        self._reader = connect(url, _LOOKUP_TIMEOUT_S, num_retries=0)
        self._writer = connect(url, DURABLE_TIMEOUT_S, num_retries=0)
        self._read_script = self._reader.register_script(READ)
        self._save_script = self._writer.register_script(SAVE)
        self._reserve_script = self._writer.register_script(RESERVE)
        self._lease_script = self._writer.register_script(LEASE)
        self._end_lease_script = self._writer.register_script(END_LEASE)

    def prepare(self) -> None:
        """Checks the settings of the Redis and the schema version of its data; see `open_redis_storage`."""
        check_settings(
            self._writer,
            "the settings of this Redis allow the loss of adapter names; as a registry",
            "Change the settings (preferably of a dedicated Redis), or omit --registry if one host is enough",
        )
        with as_unavailable(), self._writer.client() as connection:
            schema = connection.eval(OPEN, 0, SCHEMA, uuid.uuid4().hex)
            if int(schema) > SCHEMA:
                raise StoreUnavailable(
                    f"this Redis has version {int(schema)} of the registry schema, but this release "
                    f"supports at most {SCHEMA}: run the newer release"
                )
            connection.eval(END_LEASES, 1, name_key("drops", self._server), f"{self._server}/")
            wait_for_disk(connection)  # the id must be durable before a store is claimed with it

    @property
    def registry(self) -> str:
        """Also raises StoreUnavailable if the Redis was emptied after `prepare`."""
        with as_unavailable():
            found = self._reader.get(f"{PREFIX}id")
        if found is None:
            raise StoreUnavailable("this Redis no longer has the registry; restart the servers")
        return bytes(found).decode()

    # -- looking up -------------------------------------------------------------------------------------------------

    def find_version(self, key: NameKey, number: int) -> AdapterRecord | None:
        return self._read_one(key, numbers=[str(number)]).records.get(number)

    def find_rollout(self, key: NameKey, alias: str) -> Rollout | None:
        named = self._read_one(key, alias=alias)
        return named.rollout(alias) if alias in named.aliases else None

    def newest(self, key: NameKey) -> AdapterRecord | None:
        return self._read_one(key, newest=1).newest

    def aliases(self, key: NameKey) -> Sequence[Rollout]:
        return _rollouts(self._read_one(key, alias="*"))

    def rollouts(self, tenant: str, limit: int | None, after: tuple[str, str] | None) -> Sequence[Rollout]:
        found: list[Rollout] = []
        for named in self._walk(tenant, "-" if after is None else f"[{after[0]}", "*", limit):
            own = _rollouts(named)
            found += [one for one in own if after is None or (named.name, one.alias) > after]
            if limit is not None and len(found) >= limit:
                break
        return found[:limit]

    def names(self, tenant: str, limit: int | None, after: str | None) -> Sequence[Rollout]:
        found: list[Rollout] = []
        for named in self._walk(tenant, "-" if after is None else f"({after}", LATEST, limit):
            if limit is not None and len(found) >= limit:
                break
            found.append(named.rollout(LATEST))
        return found

    def versions(self, key: NameKey, limit: int | None, after: int | None) -> Sequence[AdapterRecord]:
        bound = "+inf" if after is None else f"({after}"
        named = self._read_one(key, newest=-1 if limit is None else limit, below=bound)
        return [named.records[number] for number in sorted(named.records, reverse=True)]

    def find_extras(self, key: NameKey, record: AdapterRecord) -> AdapterExtras | None:
        name, number = "/".join(key), str(record.number)
        with as_unavailable(), self._pipeline() as pipeline:
            pipeline.hget(name_key("extras", name), number).hget(name_key("versions", name), number)
            return parse_extras(record, *pipeline.execute())

    def storage_usage(self, tenant: str, digest: str) -> StorageUsage:
        return self._read_storage_usage(tenant, digest)[0]

    def pinned(self) -> Sequence[Rollout]:
        with as_unavailable():
            return self._read_pinned(self._reader.smembers(f"{PREFIX}pins"))

    def named(self, versions: Collection[AdapterVersion]) -> set[AdapterVersion]:
        with as_unavailable(), self._pipeline() as pipeline:
            for version in versions:
                pipeline.hexists(name_key("weights", version.tenant), version.digest)
            return {version for version, has in zip(versions, pipeline.execute(), strict=True) if has}

    def is_referenced(self, digest: str, now: float) -> bool:
        with as_unavailable(), self._pipeline() as pipeline:
            pipeline.scard(name_key("owners", digest)).zcount(
                name_key("reserved", digest), f"({now!r}", "+inf"
            )
            return any(pipeline.execute())

    # -- changing ---------------------------------------------------------------------------------------------------

    def change(
        self,
        key: NameKey,
        wanted: Collection[int] | None,
        edit: Callable[[NamedAdapter], T],
        *,
        frees_room: bool = False,
    ) -> tuple[T, Change]:
        def once() -> tuple[T, Change] | None:
            before, revision = self._load(key, wanted)
            after = before.copy()
            result = edit(after)
            return self._save(result, plan_change(before, after, revision), before, after)

        return _until_kept(once, key)

    def push(
        self,
        key: NameKey,
        digest: str,
        edit: Callable[[NamedAdapter, StorageUsage], T],
        reservation: str | None = None,
        now: float = 0.0,
    ) -> tuple[T, Change]:
        def once() -> tuple[T, Change] | None:
            usage, held = self._read_storage_usage(key[0], digest)
            before, revision = self._load(key, ())
            after = before.copy()
            result = edit(after, usage)
            plan = plan_change(before, after, revision) | {"held": held}
            if reservation is not None:
                plan |= {"reservation": reservation.split("/"), "now": repr(now)}
            return self._save(result, plan, before, after)

        return _until_kept(once, key)

    def change_pins(
        self, key: NameKey, edit: Callable[[NamedAdapter, Sequence[Rollout]], T]
    ) -> tuple[T, Change]:
        def once() -> tuple[T, Change] | None:
            with as_unavailable(), self._pipeline() as pipeline:
                pipeline.get(f"{PREFIX}pins_revision").smembers(f"{PREFIX}pins")
                pins_revision, members = pipeline.execute()
                pinned = self._read_pinned(members)
            before, revision = self._load(key, ())
            after = before.copy()
            result = edit(after, pinned)
            plan = plan_change(before, after, revision) | {"pins_revision": (pins_revision or b"").decode()}
            return self._save(result, plan, before, after)

        return _until_kept(once, key)

    # -- blobs ------------------------------------------------------------------------------------------------------

    def reserve(self, digest: str, now: float) -> str:
        """If a crash of Redis loses the reservation, `push` detects that and fails."""
        reservation = uuid.uuid4().hex
        deadline = time.monotonic() + _PATIENCE_S
        keys = [name_key("dropping", digest), name_key("reserved", digest)]
        with as_unavailable():
            while not self._reserve_script(
                keys, [reservation, repr(now + RESERVATION_S), int(2 * RESERVATION_S)]
            ):
                if time.monotonic() > deadline:
                    raise TryAgain(
                        "another server is deleting the same weights, or died while it deleted them; "
                        f"upload again when that server is back, or in {LEASE_S // 60} minutes"
                    )
                time.sleep(_PAUSE_S)
        return f"{digest}/{reservation}"

    def release(self, reservation: str) -> None:
        digest, _, token = reservation.partition("/")
        with as_unavailable():
            self._writer.zrem(name_key("reserved", digest), token)

    def collect(self, digest: str, drop: Callable[[str], None], now: float) -> bool:
        lease = f"{self._server}/{uuid.uuid4().hex}"
        dropping, drops = name_key("dropping", digest), name_key("drops", self._server)
        with as_unavailable(), self._writer.client() as connection:
            keys = [dropping, name_key("reserved", digest), name_key("owners", digest), drops]
            if not self._lease_script(keys, [lease, repr(now), LEASE_S, digest], client=connection):
                return False
            wait_for_disk(connection)
        drop(digest)
        with as_unavailable():
            self._end_lease_script([dropping, drops], [lease, digest])
        return True

    # -- the feed ---------------------------------------------------------------------------------------------------

    def changes(self, cursor: str | None) -> Changes:
        run, _, position = (cursor or "").partition("/")
        entry, _, _ = position.partition("/")
        with as_unavailable(), self._pipeline() as pipeline:
            pipeline.info("server").xrevrange(f"{PREFIX}changes", count=1)
            if cursor is not None:
                pipeline.xrange(f"{PREFIX}changes", entry, "+", count=_MAX_CHANGES + 1)
            server, last, *ranges = pipeline.execute()
        found = ranges[0] if ranges else []
        if run == server["run_id"] and found and _position(found[0]) == position:
            changes = tuple(_parse_change(fields) for _, fields in found[1:])
            return Changes(f"{run}/{_position(found[-1])}", changes, is_all=len(changes) < _MAX_CHANGES)
        # The Redis may have been emptied, so that the stream has no entry. The feed then begins with the next entry.
        position = _position(last[0]) if last else "0-0/"
        return Changes(f"{server['run_id']}/{position}", resync=True)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _pipeline(self) -> Any:
        """Sends several commands in one round trip. Not MULTI, because a full Redis refuses every MULTI."""
        return self._reader.pipeline(transaction=False)

    def _read(self, asks: Sequence[Mapping[str, Any]]) -> list[tuple[NamedAdapter, str]]:
        """Returns each name with its revision. A name that does not exist has no records and an empty revision."""
        with as_unavailable():
            answers = self._read_script(args=[json.dumps(asks)])
        return [parse_name(ask["id"], answer) for ask, answer in zip(asks, answers, strict=True)]

    def _read_one(self, key: NameKey, **ask: Any) -> NamedAdapter:
        return self._read([{"id": "/".join(key), **ask}])[0][0]

    def _load(self, key: NameKey, wanted: Collection[int] | None) -> tuple[NamedAdapter, str]:
        ask = {
            "id": "/".join(key),
            "alias": "*",
            "history": True,
            "newest": -1 if wanted is None else 2,
            "numbers": [str(number) for number in wanted or ()],
        }
        return self._read([ask])[0]

    def _read_storage_usage(self, tenant: str, digest: str) -> tuple[StorageUsage, str]:
        """Returns the usage, and the token by which `SAVE` detects that the usage has grown in the meantime."""
        with as_unavailable(), self._pipeline() as pipeline:
            # Read the token first, so that growth during the other reads is detected.
            pipeline.get(name_key("held", tenant)).hvals(name_key("weights", tenant))
            pipeline.hvals(name_key("sizes", tenant)).get(name_key("extras_bytes", tenant))
            pipeline.hget(name_key("sizes", tenant), digest)
            held, counts, sizes, extras_bytes, own = pipeline.execute()
        num_bytes = sum(map(int, sizes)) + int(extras_bytes or 0)
        weights_bytes = None if own is None else int(own)
        return StorageUsage(sum(map(int, counts)), num_bytes, weights_bytes), (held or b"").decode()

    def _walk(self, tenant: str, start: str, alias: str, limit: int | None) -> Iterator[NamedAdapter]:
        """Yields the tenant's names, sorted, with the targets of `alias`. start: lower bound in ZRANGEBYLEX syntax."""
        # One more than the limit, because the first name may be the last one of the previous page.
        count = _BATCH if limit is None else min(_BATCH, limit + 1)
        while True:
            with as_unavailable():
                page = self._reader.zrangebylex(name_key("names", tenant), start, "+", start=0, num=count)
            names = [name.decode() for name in page]
            for named, _ in self._read([{"id": f"{tenant}/{name}", "alias": alias} for name in names]):
                if named.aliases:  # otherwise the name was deleted between the two reads
                    yield named
            if len(names) < count:
                return
            start = f"({names[-1]}"

    def _read_pinned(self, members: Collection[bytes]) -> Sequence[Rollout]:
        pins = sorted(tuple(member.decode().replace("@", "/").split("/")) for member in members)
        found = self._read([{"id": f"{tenant}/{name}", "alias": alias} for tenant, name, alias in pins])
        return [
            named.rollout(alias)
            for (named, _), (_, _, alias) in zip(found, pins, strict=True)
            if alias in named.aliases
        ]

    def _save(
        self, result: T, plan: Mapping[str, Any], before: NamedAdapter, after: NamedAdapter
    ) -> tuple[T, Change] | None:
        """Returns None if another process changed the name first."""
        with as_unavailable(), self._writer.client() as connection:
            outcome, *digests = self._save_script(args=[json.dumps(plan)], client=connection)
            if outcome == b"stale":
                return None
            if outcome == b"lost":
                raise reservation_lost()
            wait_for_disk(connection)
        orphaned = tuple(AdapterVersion(after.tenant, digest.decode()) for digest in digests)
        return result, Change(after.tenant, after.name, orphaned, before.pins() != after.pins())


def _until_kept(once: Callable[[], tuple[T, Change] | None], key: NameKey) -> tuple[T, Change]:
    deadline = time.monotonic() + _PATIENCE_S
    while (done := once()) is None:
        if time.monotonic() > deadline:
            raise TryAgain(f"too many clients change {key[1]!r} or pins at the same time; try again")
        time.sleep(random.uniform(0, _PAUSE_S))
    return done


def _rollouts(named: NamedAdapter) -> list[Rollout]:
    return [named.rollout(alias) for alias in sorted(named.aliases)]


def _position(entry: tuple[bytes, Mapping[bytes, bytes]]) -> str:
    entry_id, fields = entry
    return f"{entry_id.decode()}/{fields[b'nonce'].decode()}"


def _parse_change(fields: Mapping[bytes, bytes]) -> Change:
    tenant = fields[b"tenant"].decode()
    digests = fields[b"orphaned"].decode().split()
    return Change(
        tenant,
        fields[b"name"].decode(),
        tuple(AdapterVersion(tenant, digest) for digest in digests),
        fields[b"moved_pin"] == b"1",
    )
