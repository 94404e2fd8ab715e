"""The registry's names in Redis, for several hosts. It must be one that loses nothing (`durable_redis.py`).

All keys begin with `slora:registry:`, and none of what lasts ever expires:

    schema                   version of this layout
    names:<tenant>           sorted set of names, for pages
    name:<tenant>/<name>     hash: revision, named_at, last_number, and alias:<alias> (JSON) of each alias
    versions:<tenant>/<name> hash: number -> version (JSON)
    numbers:<tenant>/<name>  sorted set of the numbers
    weights:<tenant>         hash: digest -> how many versions of the tenant have it
    sizes:<tenant>           hash: digest -> bytes of its tensors
    owners:<digest>          set of the tenants that have it
    reserved:<digest>        sorted set: reservations by when they end
    dropping:<digest>        whoever drops the blob just now; expires
    pins, pins_revision      set of <tenant>/<name>@<alias>; another text whenever something else is pinned
    changes                  stream: the feed

A name is read by one script, at one moment, edited here, and kept by one script, if its revision is still the same;
else all is done again. So nothing is ever seen or left half done, and no update is lost. Scripts find keys by
themselves, which a Redis Cluster does not allow.

A blob is dropped in a store that knows nothing of this Redis. So `collect` leaves a lease on the digest, and brings it
to the disk, before it drops; `reserve` waits for its end, so that no upload of the same weights begins meanwhile. It
ends with a drop that came back. After one that failed or crashed it runs out, after LEASE_S: who knows what the store
is still about to do. A drop takes milliseconds, and minutes if the store does not answer; one that is frozen for longer
than the lease, and goes on then, could take away a blob that was uploaded after it.

The cursor of the feed names the run of the server, too. One that was killed may have lost changes that it had shown
and nobody had acknowledged; who has seen them must look everything up again.

Needs the package redis, so only `registry_url.py` loads this module.
"""

import json
import random
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from slora_adapters.adapter import AdapterExtras
from slora_adapters.adapter_record import AdapterDetails, AdapterRecord, Holdings, Rollout
from slora_adapters.alias import AliasHistory, decode_states, encode_states
from slora_adapters.durable_redis import (
    DURABLE_TIMEOUT_S,
    as_unavailable,
    check_settings,
    connect,
    wait_for_disk,
)
from slora_adapters.errors import StoreUnavailable
from slora_adapters.named_adapter import Alias, NamedAdapter
from slora_adapters.reference import LATEST
from slora_adapters.registry_storage import (
    KEPT_CHANGES,
    RESERVATION_S,
    Change,
    Changes,
    NameKey,
    reservation_lost,
)
from slora_adapters.version import AdapterVersion

__all__ = ["LEASE_S", "RedisStorage", "open_redis_storage"]

T = TypeVar("T")
SCHEMA = 1
# How long nobody may upload weights whose drop did not come back.
LEASE_S = 600
# How long an upload waits for a drop of the same weights, and a change for others of the same name.
_PATIENCE_S = 10.0
_PAUSE_S = 0.01
# For lookups; requests wait for them.
_LOOKUP_TIMEOUT_S = 5.0
# Of the feed in one answer; of names in one script, during which Redis does nothing else.
_MAX_CHANGES = 1000
_BATCH = 200

_PREFIX = "slora:registry:"

# ARGV: this schema, a nonce. Returns the schema that is there.
_OPEN = """
local P = 'slora:registry:'
if redis.call('EXISTS', P..'changes') == 0 then redis.call('XADD', P..'changes', '*', 'nonce', ARGV[2]) end
redis.call('SETNX', P..'schema', ARGV[1])
return redis.call('GET', P..'schema')
"""

# ARGV: questions, JSON: id (tenant/name); optional alias (`*` for all), numbers, newest (how many, -1 for all) below
# a bound, and history: versions that aliases would point at after a rollback are wanted, too. Returns for each
# {named_at, last_number, revision, {alias, its JSON, ...}, {number, version, ...}}, nothing for a name that is not
# there.
_READ = """
local P = 'slora:registry:'
local function read(ask)
  local key, versions = P..'name:'..ask.id, P..'versions:'..ask.id
  local head = redis.call('HMGET', key, 'named_at', 'last_number', 'revision')
  if not head[1] then return {} end
  local aliases, wanted, records = {}, {}, {}
  if ask.alias == '*' then
    local fields = redis.call('HGETALL', key)
    for i = 1, #fields, 2 do
      if string.sub(fields[i], 1, 6) == 'alias:' then
        aliases[#aliases + 1] = string.sub(fields[i], 7)
        aliases[#aliases + 1] = fields[i + 1]
      end
    end
  elseif ask.alias then
    local one = redis.call('HGET', key, 'alias:'..ask.alias)
    if one then aliases = {ask.alias, one} end
  end
  for i = 2, #aliases, 2 do
    local states = cjson.decode(cjson.decode(aliases[i]).states)
    for number in pairs(states[#states][1]) do wanted[number] = true end
    if ask.history and #states > 1 then
      for number in pairs(states[#states - 1][1]) do wanted[number] = true end
    end
  end
  for _, number in ipairs(ask.numbers or {}) do wanted[number] = true end
  if ask.newest then
    local below = ask.below or '+inf'
    local newest = redis.call('ZREVRANGEBYSCORE', P..'numbers:'..ask.id, below, '-inf', 'LIMIT', 0, ask.newest)
    for _, number in ipairs(newest) do wanted[number] = true end
  end
  for number in pairs(wanted) do
    local record = redis.call('HGET', versions, number)
    if record then
      records[#records + 1] = number
      records[#records + 1] = record
    end
  end
  return {head[1], head[2], head[3], aliases, records}
end
local answers = {}
for i, ask in ipairs(cjson.decode(ARGV[1])) do answers[i] = read(ask) end
return answers
"""

# ARGV: what is to be kept, JSON; see `_plan`. Returns {'stale'} if it was made from what is not there any more,
# {'lost'} if the reservation has run out, else {'kept', digests that the tenant has no version of any more ...}.
# All is checked before anything is written. What is taken away goes first: a full Redis lets scripts go on that begin
# so, and refuses the others at their first write.
_SAVE = """
local P = 'slora:registry:'
local plan = cjson.decode(ARGV[1])
local id = plan.tenant..'/'..plan.name
local key, versions, numbers = P..'name:'..id, P..'versions:'..id, P..'numbers:'..id
local names, weights, sizes = P..'names:'..plan.tenant, P..'weights:'..plan.tenant, P..'sizes:'..plan.tenant
if (redis.call('HGET', key, 'revision') or '') ~= plan.revision then return {'stale'} end
if plan.pins_revision and (redis.call('GET', P..'pins_revision') or '') ~= plan.pins_revision then
  return {'stale'}
end
if plan.reservation then
  local reserved = P..'reserved:'..plan.reservation[1]
  local ends_at = redis.call('ZSCORE', reserved, plan.reservation[2])
  if not ends_at or tonumber(ends_at) <= tonumber(plan.now) then return {'lost'} end
  redis.call('ZREM', reserved, plan.reservation[2])
end
if not plan.has_changed then
  -- Something to wait for: what it was compared with may not be on the disk yet.
  redis.call('SET', P..'compared', plan.nonce)
  return {'kept'}
end
local answer = {'kept'}
for _, one in ipairs(plan.removed) do
  local number, digest = one[1], one[2]
  redis.call('HDEL', versions, number)
  redis.call('ZREM', numbers, number)
  if redis.call('HINCRBY', weights, digest, -1) <= 0 then
    redis.call('HDEL', weights, digest)
    redis.call('HDEL', sizes, digest)
    redis.call('SREM', P..'owners:'..digest, plan.tenant)
    answer[#answer + 1] = digest
  end
end
for _, alias in ipairs(plan.dropped) do redis.call('HDEL', key, 'alias:'..alias) end
for _, alias in ipairs(plan.unpinned) do redis.call('SREM', P..'pins', id..'@'..alias) end
if plan.is_gone then
  redis.call('UNLINK', key)
  redis.call('ZREM', names, plan.name)
else
  redis.call('HSET', key, 'revision', plan.nonce, 'named_at', plan.named_at, 'last_number', plan.last_number)
  redis.call('ZADD', names, 0, plan.name)
end
for _, one in ipairs(plan.added) do
  local number, digest, num_bytes, record = one[1], one[2], one[3], one[4]
  redis.call('HSET', versions, number, record)
  redis.call('ZADD', numbers, number, number)
  redis.call('HINCRBY', weights, digest, 1)
  redis.call('SADD', P..'owners:'..digest, plan.tenant)
  if tonumber(num_bytes) > tonumber(redis.call('HGET', sizes, digest) or '-1') then
    redis.call('HSET', sizes, digest, num_bytes)
  end
end
for _, one in ipairs(plan.updated) do redis.call('HSET', versions, one[1], one[2]) end
for _, one in ipairs(plan.aliases) do redis.call('HSET', key, 'alias:'..one[1], one[2]) end
for _, alias in ipairs(plan.pinned) do redis.call('SADD', P..'pins', id..'@'..alias) end
if plan.moved_pin then redis.call('SET', P..'pins_revision', plan.nonce) end
redis.call(
  'XADD', P..'changes', 'MAXLEN', plan.kept_changes, '*', 'nonce', plan.nonce, 'tenant', plan.tenant,
  'name', plan.name, 'orphaned', table.concat(answer, ' ', 2), 'moved_pin', plan.moved_pin and '1' or '0'
)
return answer
"""

# KEYS: dropping, reserved. ARGV: the reservation, when it ends, how long its key is kept (s). Returns 0 while the blob
# is being dropped.
_RESERVE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
"""

# KEYS: dropping, reserved, owners. ARGV: whose lease, the time, seconds of the lease. Returns whether it has it.
_LEASE = """
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[2])
if redis.call('SCARD', KEYS[3]) > 0 or redis.call('ZCARD', KEYS[2]) > 0 then return 0 end
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'EX', ARGV[3]) then return 1 end
return 0
"""

# KEYS: dropping. ARGV: whose lease.
_END_LEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""


def open_redis_storage(url: str) -> "RedisStorage":
    """Raises StoreUnavailable if the Redis at `url` does not answer or was written by a newer release, StoreUnfit if it
    could lose what it is told."""
    storage = RedisStorage(url)
    try:
        storage.prepare()
    except BaseException:
        storage.close()
        raise
    return storage


class RedisStorage:
    """See `registry_storage.RegistryStorage`."""

    def __init__(self, url: str) -> None:
        # Nothing is sent twice: a change could be made twice, and who waits for a lookup has waited long enough.
        self._reader = connect(url, _LOOKUP_TIMEOUT_S, num_retries=0)
        self._writer = connect(url, DURABLE_TIMEOUT_S, num_retries=0)
        self._read_script = self._reader.register_script(_READ)
        self._save_script = self._writer.register_script(_SAVE)
        self._reserve_script = self._writer.register_script(_RESERVE)
        self._lease_script = self._writer.register_script(_LEASE)
        self._end_lease_script = self._writer.register_script(_END_LEASE)

    def prepare(self) -> None:
        """Checks the settings and the layout of what is there; see `open_redis_storage`."""
        check_settings(
            self._writer,
            "this Redis could lose names of adapters; as their registry",
            "Set that (a Redis of its own is best), or leave --registry out where one host is enough",
        )
        with as_unavailable():
            found = int(self._writer.eval(_OPEN, 0, SCHEMA, uuid.uuid4().hex))
        if found > SCHEMA:
            raise StoreUnavailable(
                f"this Redis has version {found} of the registry; this release knows {SCHEMA}: run the newer release"
            )

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

    def holdings(self, tenant: str) -> Holdings:
        with as_unavailable(), self._pipeline() as pipeline:
            counts, sizes = pipeline.hvals(_key("weights", tenant)).hgetall(_key("sizes", tenant)).execute()
        return Holdings(sum(map(int, counts)), {digest.decode(): int(size) for digest, size in sizes.items()})

    def pinned(self) -> Sequence[Rollout]:
        with as_unavailable():
            return self._read_pinned(self._reader.smembers(f"{_PREFIX}pins"))

    def named(self, versions: Collection[AdapterVersion]) -> set[AdapterVersion]:
        with as_unavailable(), self._pipeline() as pipeline:
            for version in versions:
                pipeline.hexists(_key("weights", version.tenant), version.digest)
            return {version for version, has in zip(versions, pipeline.execute(), strict=True) if has}

    def is_referenced(self, digest: str, now: float) -> bool:
        with as_unavailable(), self._pipeline() as pipeline:
            pipeline.scard(_key("owners", digest)).zcount(_key("reserved", digest), f"({now!r}", "+inf")
            return any(pipeline.execute())

    # -- changing ---------------------------------------------------------------------------------------------------

    def change(
        self,
        key: NameKey,
        wanted: Collection[int] | None,
        edit: Callable[[NamedAdapter], T],
        reservation: str | None = None,
        now: float = 0.0,
    ) -> tuple[T, Change]:
        def once() -> tuple[T, Change] | None:
            before, revision = self._load(key, wanted)
            after = before.copy()
            result = edit(after)
            plan = _plan(before, after, revision)
            if reservation is not None:
                plan |= {"reservation": reservation.split("/"), "now": repr(now)}
            return self._save(result, plan, before, after)

        return _until_kept(once, key)

    def change_pins(
        self, key: NameKey, edit: Callable[[NamedAdapter, Sequence[Rollout]], T]
    ) -> tuple[T, Change]:
        def once() -> tuple[T, Change] | None:
            with as_unavailable(), self._pipeline() as pipeline:
                pipeline.get(f"{_PREFIX}pins_revision").smembers(f"{_PREFIX}pins")
                pins_revision, members = pipeline.execute()
                pinned = self._read_pinned(members)
            before, revision = self._load(key, ())
            after = before.copy()
            result = edit(after, pinned)
            plan = _plan(before, after, revision) | {"pins_revision": (pins_revision or b"").decode()}
            return self._save(result, plan, before, after)

        return _until_kept(once, key)

    # -- blobs ------------------------------------------------------------------------------------------------------

    def reserve(self, digest: str, now: float) -> str:
        """One that Redis loses because it dies needs no care: `change` finds it gone."""
        reservation = uuid.uuid4().hex
        deadline = time.monotonic() + _PATIENCE_S
        keys = [_key("dropping", digest), _key("reserved", digest)]
        with as_unavailable():
            while not self._reserve_script(
                keys, [reservation, repr(now + RESERVATION_S), int(2 * RESERVATION_S)]
            ):
                if time.monotonic() > deadline:
                    raise StoreUnavailable(
                        "the same weights are being deleted, or were when a server died; upload again, in "
                        f"{LEASE_S // 60} minutes at the latest"
                    )
                time.sleep(_PAUSE_S)
        return f"{digest}/{reservation}"

    def give_back(self, reservation: str) -> None:
        digest, _, token = reservation.partition("/")
        with as_unavailable():
            self._writer.zrem(_key("reserved", digest), token)

    def collect(self, digest: str, drop: Callable[[str], None], now: float) -> bool:
        lease = uuid.uuid4().hex
        dropping = _key("dropping", digest)
        with as_unavailable(), self._writer.client() as connection:
            keys = [dropping, _key("reserved", digest), _key("owners", digest)]
            if not self._lease_script(keys, [lease, repr(now), LEASE_S], client=connection):
                return False
            wait_for_disk(connection)
        drop(digest)
        with as_unavailable():
            self._end_lease_script([dropping], [lease])
        return True

    # -- the feed ---------------------------------------------------------------------------------------------------

    def changes(self, cursor: str | None) -> Changes:
        run, _, position = (cursor or "").partition("/")
        entry, _, _ = position.partition("/")
        with as_unavailable(), self._pipeline() as pipeline:
            pipeline.info("server").xrevrange(f"{_PREFIX}changes", count=1)
            if cursor is not None:
                pipeline.xrange(f"{_PREFIX}changes", entry, "+", count=_MAX_CHANGES + 1)
            server, last, *ranges = pipeline.execute()
        found = ranges[0] if ranges else []
        if run == server["run_id"] and found and _position(found[0]) == position:
            changes = tuple(_parse_change(fields) for _, fields in found[1:])
            return Changes(f"{run}/{_position(found[-1])}", changes, is_all=len(changes) < _MAX_CHANGES)
        # Somebody may have emptied the Redis; then the feed begins with what comes next.
        position = _position(last[0]) if last else "0-0/"
        return Changes(f"{server['run_id']}/{position}", resync=True)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _pipeline(self) -> Any:
        """Several questions at once. Not MULTI, which a full Redis refuses, whatever is in it."""
        return self._reader.pipeline(transaction=False)

    def _read(self, asks: Sequence[Mapping[str, Any]]) -> list[tuple[NamedAdapter, str]]:
        """Names and their revisions, empty for one that is not there."""
        with as_unavailable():
            answers = self._read_script(args=[json.dumps(asks)])
        return [_parse_name(ask["id"], answer) for ask, answer in zip(asks, answers, strict=True)]

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

    def _walk(self, tenant: str, start: str, alias: str, limit: int | None) -> Iterator[NamedAdapter]:
        """The tenant's names, sorted, with what `alias` points at. start: as ZRANGEBYLEX takes it."""
        # One more than is wanted, because the first may be the one to go on from.
        count = _BATCH if limit is None else min(_BATCH, limit + 1)
        while True:
            with as_unavailable():
                page = self._reader.zrangebylex(_key("names", tenant), start, "+", start=0, num=count)
            names = [name.decode() for name in page]
            for named, _ in self._read([{"id": f"{tenant}/{name}", "alias": alias} for name in names]):
                if named.aliases:  # else it was deleted in between
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
        """None if somebody else was faster."""
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
            raise StoreUnavailable(f"too many change {key[1]!r}, or pins, at once; try again")
        time.sleep(random.uniform(0, _PAUSE_S))
    return done


def _plan(before: NamedAdapter, after: NamedAdapter, revision: str) -> dict[str, Any]:
    """What makes `after` of `before`, for _SAVE. Numbers are texts, because Lua's have 14 digits."""
    pinned, unpinned = after.pins().keys(), before.pins().keys()
    return {
        "tenant": after.tenant,
        "name": after.name,
        "revision": revision,
        "nonce": uuid.uuid4().hex,
        "has_changed": after != before,
        "is_gone": not after.records,
        "named_at": repr(after.named_at),
        "last_number": str(after.last_number),
        "removed": [
            [str(number), record.version.digest]
            for number, record in before.records.items()
            if number not in after.records
        ],
        "added": [
            [str(number), record.version.digest, str(record.details.num_bytes), _encode_record(record)]
            for number, record in after.records.items()
            if number not in before.records
        ],
        "updated": [
            [str(number), _encode_record(record)]
            for number, record in after.records.items()
            if number in before.records and record != before.records[number]
        ],
        "aliases": [
            [alias, _encode_alias(one)]
            for alias, one in after.aliases.items()
            if one != before.aliases.get(alias)
        ],
        "dropped": sorted(before.aliases.keys() - after.aliases.keys()),
        "pinned": sorted(pinned - unpinned),
        "unpinned": sorted(unpinned - pinned),
        "moved_pin": before.pins() != after.pins(),
        "kept_changes": str(KEPT_CHANGES),
    }


def _rollouts(named: NamedAdapter) -> list[Rollout]:
    return [named.rollout(alias) for alias in sorted(named.aliases)]


def _encode_record(record: AdapterRecord) -> str:
    details, extras = record.details, record.details.extras
    return json.dumps(
        {
            "digest": record.version.digest,
            "created_at": record.created_at,
            "rank": details.rank,
            "target_modules": details.target_modules,
            "num_bytes": details.num_bytes,
            "packed_bytes": details.packed_bytes,
            "chat_template": extras.chat_template,
            "generation_config": extras.generation_config,
        }
    )


def _parse_record(key: NameKey, number: int, named_at: float, raw: bytes) -> AdapterRecord:
    tenant, name = key
    fields = json.loads(raw)
    details = AdapterDetails(
        fields["rank"],
        tuple(fields["target_modules"]),
        fields["num_bytes"],
        AdapterExtras(fields["chat_template"], fields["generation_config"]),
        fields["packed_bytes"],
    )
    return AdapterRecord(
        name, number, AdapterVersion(tenant, fields["digest"]), details, fields["created_at"], named_at
    )


def _encode_alias(one: Alias) -> str:
    """states: the last is the present one."""
    states = encode_states([*one.history.before, one.history.state])
    return json.dumps(
        {"states": states, "salt": one.salt, "pinned": one.pinned, "updated_at": one.updated_at}
    )


def _parse_alias(raw: bytes) -> Alias:
    fields = json.loads(raw)
    *before, state = decode_states(fields["states"])
    return Alias(AliasHistory(state, tuple(before)), fields["salt"], fields["pinned"], fields["updated_at"])


def _parse_name(text: str, answer: Sequence[Any]) -> tuple[NamedAdapter, str]:
    tenant, _, name = text.partition("/")
    if not answer:
        return NamedAdapter(tenant, name), ""
    named_at, last_number, revision, aliases, records = answer
    return NamedAdapter(
        tenant,
        name,
        float(named_at),
        int(last_number),
        {
            int(number): _parse_record((tenant, name), int(number), float(named_at), raw)
            for number, raw in zip(records[::2], records[1::2], strict=True)
        },
        {alias.decode(): _parse_alias(raw) for alias, raw in zip(aliases[::2], aliases[1::2], strict=True)},
    ), revision.decode()


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


def _key(kind: str, of: str) -> str:
    return f"{_PREFIX}{kind}:{of}"
