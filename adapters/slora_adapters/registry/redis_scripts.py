"""The layout of the registry in Redis, and the atomic scripts that read and change it.

All keys begin with `slora:registry:`. Keys of names, versions and blobs never expire; only `reserved` and `dropping`
keys do:

    schema, id               schema version of this layout; the registry's id
    names:<tenant>           sorted set of names, for listing in pages
    name:<tenant>/<name>     hash: revision, named_at, last_number, and alias:<alias> (JSON) for each alias
    versions:<tenant>/<name> hash: number -> version (JSON; in schema 1 it includes the texts of its extras)
    extras:<tenant>/<name>   hash: number -> digest and texts of its extras (JSON), if it has extras
    numbers:<tenant>/<name>  sorted set of version numbers
    weights:<tenant>         hash: digest -> number of versions of the tenant with this digest
    sizes:<tenant>           hash: digest -> bytes of the blob
    extras_bytes:<tenant>    bytes of all extras of the tenant
    held:<tenant>            token that changes whenever a version of the tenant is added
    owners:<digest>          set of tenants that have a version with this digest
    reserved:<digest>        sorted set: reservations by expiry time
    dropping:<digest>        <server>/<lease> of the server that is dropping the blob; expires
    drops:<server>           set of digests on which the server may hold leases
    pins, pins_revision      set of <tenant>/<name>@<alias>; token that changes whenever the pinned versions change
    changes                  stream: the feed

The scripts compute key names themselves, which Redis Cluster does not allow.
"""

__all__ = [
    "END_LEASE",
    "END_LEASES",
    "LEASE",
    "OPEN",
    "PREFIX",
    "READ",
    "RESERVE",
    "SAVE",
    "SCHEMA",
    "name_key",
]

SCHEMA = 2
PREFIX = "slora:registry:"


def name_key(kind: str, of: str) -> str:
    return f"{PREFIX}{kind}:{of}"


# ARGV: the schema version of this release, a nonce. Returns the schema version that is stored.
OPEN = """
local P = 'slora:registry:'
if redis.call('EXISTS', P..'changes') == 0 then redis.call('XADD', P..'changes', '*', 'nonce', ARGV[2]) end
redis.call('SETNX', P..'schema', ARGV[1])
redis.call('SETNX', P..'id', ARGV[2])
-- Schema 2 reads what schema 1 wrote.
if tonumber(redis.call('GET', P..'schema')) < tonumber(ARGV[1]) then redis.call('SET', P..'schema', ARGV[1]) end
return redis.call('GET', P..'schema')
"""

# ARGV: a JSON list of queries. Each query has `id` (tenant/name) and optional fields:
#
# alias: the alias to read, or `*` for all aliases.
# numbers: version numbers to read.
# newest: how many of the newest versions to read (-1 for all). below: upper bound of their numbers.
# history: whether to also read the versions that aliases would point at after a rollback.
#
# Returns {named_at, last_number, revision, {alias, its JSON, ...}, {number, version, ...}} for each query. The entry is
# empty if the name does not exist.
READ = """
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

# ARGV: the change to write, as JSON; see `plan_change`. Returns one of:
#
#   {'stale'}: another process has changed the data that the change is based on.
#   {'lost'}: the reservation has expired.
#   {'kept', digests ...}: the change is written. The tenant has no version with these digests any more.
#
# Every check runs before the first write. Deletions run before additions: a full Redis lets a script continue if its
# first write is a deletion. It refuses any other script at its first write.
SAVE = """
local P = 'slora:registry:'
local plan = cjson.decode(ARGV[1])
local id = plan.tenant..'/'..plan.name
local key, versions, numbers = P..'name:'..id, P..'versions:'..id, P..'numbers:'..id
local extras = P..'extras:'..id
local names, weights, sizes = P..'names:'..plan.tenant, P..'weights:'..plan.tenant, P..'sizes:'..plan.tenant
local extras_bytes, held = P..'extras_bytes:'..plan.tenant, P..'held:'..plan.tenant
if (redis.call('HGET', key, 'revision') or '') ~= plan.revision then return {'stale'} end
if plan.pins_revision and (redis.call('GET', P..'pins_revision') or '') ~= plan.pins_revision then
  return {'stale'}
end
if plan.held and (redis.call('GET', held) or '') ~= plan.held then return {'stale'} end
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
  if redis.call('HDEL', extras, number) == 1 then redis.call('DECRBY', extras_bytes, one[3]) end
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
  redis.call('SET', held, plan.nonce)
  if one[6] ~= '' then
    redis.call('HSET', extras, number, one[6])
    redis.call('INCRBY', extras_bytes, one[5])
  end
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

# KEYS: dropping, reserved. ARGV: the reservation, its expiry time, the TTL of its key (s). Returns 0 while the blob is
# being dropped.
RESERVE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
"""

# KEYS: dropping, reserved, owners, drops. ARGV: the lease, the current time, the TTL of the lease (s), the digest.
# Returns 1 if the lease was acquired, else 0.
LEASE = """
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[2])
if redis.call('SCARD', KEYS[3]) > 0 or redis.call('ZCARD', KEYS[2]) > 0 then return 0 end
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'EX', ARGV[3]) then return 0 end
redis.call('SADD', KEYS[4], ARGV[4])
return 1
"""

# Releases a lease. KEYS: dropping, drops. ARGV: the lease, the digest.
END_LEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('SREM', KEYS[2], ARGV[2])
end
return 1
"""

# Ends all leases of a server. KEYS: drops. ARGV: the server's id and a slash.
END_LEASES = """
for _, digest in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local dropping = 'slora:registry:dropping:'..digest
  local lease = redis.call('GET', dropping)
  if lease and string.sub(lease, 1, #ARGV[1]) == ARGV[1] then redis.call('DEL', dropping) end
end
redis.call('DEL', KEYS[1])
return 1
"""
