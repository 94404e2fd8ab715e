-- The one script of `redis_counters.py`.
--
-- KEYS: leases, reservations, then the accounts. ARGV: operation, Unix milliseconds ('' for the time of Redis), the end
-- of a new lease in milliseconds from now, then what the operation needs:
--   reserve  id, requests, tokens, answers, then five limits of each account ('' for none)
--   settle   id, used tokens, '1' if the request counts
--   seed     tokens today, tokens this month
--   renew    ids
--   carry    age in seconds, requests, tokens; then the next age
--   read     nothing
-- `settle` returns 1, or 0 if there is no such reservation. Others return the obstacles (account, field, wait or -1), the
-- accounts that are not seeded, and eight numbers of each account, as in `Use`.
-- As in `quota_counters.py`.
local BUCKETS = 61
local FIELDS = {'requests_per_minute', 'tokens_per_minute', 'tokens_per_day', 'tokens_per_month', 'concurrent_answers'}
local operation, lease_ms = ARGV[1], tonumber(ARGV[3])
local now_ms
if ARGV[2] == '' then
  local time = redis.call('TIME')
  now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
else
  now_ms = tonumber(ARGV[2])
end
local second = math.floor(now_ms / 1000)
local day = math.floor(second / 86400)

-- The number of the month: year * 12 + month, from the days since 1970 (Hinnant, days_from_civil).
local function month_of(days)
  local z = days + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  return (yoe + era * 400 + (month <= 2 and 1 or 0)) * 12 + month
end
local month = month_of(day)

local function text(number) return string.format('%.0f', number) end

local function add(key, field, number)
  if number ~= 0 then redis.call('HINCRBY', key, field, text(number)) end
end

local function finish(id, used, counts)
  local raw = redis.call('HGET', KEYS[2], id)
  redis.call('HDEL', KEYS[2], id)
  redis.call('ZREM', KEYS[1], id)
  if not raw then return 0 end
  local entry = cjson.decode(raw)
  local unused = entry.tokens - used
  for _, key in ipairs(entry.accounts) do
    local kept = redis.call('HMGET', key, 'day', 'month', 'answers')
    -- An account that has expired or was lost holds nothing to refund.
    if kept[3] then
      if second - entry.second < BUCKETS then
        add(key, 't:' .. text(entry.second), -unused)
        if not counts then add(key, 'r:' .. text(entry.second), -entry.requests) end
      end
      if tonumber(kept[1]) == entry.day then add(key, 'tokens_today', -unused) end
      if tonumber(kept[2]) == entry.month then add(key, 'tokens_this_month', -unused) end
      add(key, 'reserved_tokens', -entry.tokens)
      add(key, 'answers', -entry.answers)
    end
  end
  return 1
end

local function load(key)
  local account = {key = key, r = {}, t = {}, r_sum = 0, t_sum = 0}
  local raw, gone = redis.call('HGETALL', key), {}
  for i = 1, #raw, 2 do
    local field, value = raw[i], tonumber(raw[i + 1])
    local kind = field:sub(1, 2)
    if kind == 'r:' or kind == 't:' then
      local at, window = tonumber(field:sub(3)), field:sub(1, 1)
      if second - at >= BUCKETS then
        gone[#gone + 1] = field
      elseif value ~= 0 then
        account[window][#account[window] + 1] = {at, value}
        account[window .. '_sum'] = account[window .. '_sum'] + value
      end
    else
      account[field] = value
    end
  end
  if #gone > 0 then redis.call('HDEL', key, unpack(gone)) end
  for _, window in ipairs({account.r, account.t}) do
    table.sort(window, function(a, b) return a[1] < b[1] end)
  end
  if account.day ~= day then
    if not account.day or day < account.day then account.is_seeded = 0 end
    account.day, account.tokens_today = day, 0
  end
  if account.month ~= month then account.month, account.tokens_this_month = month, 0 end
  account.reserved_tokens = account.reserved_tokens or 0
  account.answers = account.answers or 0
  return account
end

local function store(account)
  redis.call('HSET', account.key, 'day', text(account.day), 'month', text(account.month),
    'tokens_today', text(account.tokens_today), 'tokens_this_month', text(account.tokens_this_month),
    'is_seeded', account.is_seeded, 'answers', text(account.answers))
  redis.call('EXPIRE', account.key, 86400)
end

-- Adds to what `load` has read, so that it need not be read again.
local function charge(account, window, number)
  if number > 0 then
    account[window][#account[window] + 1] = {second, number}
    account[window .. '_sum'] = account[window .. '_sum'] + number
  end
end

local function wait_ms(window, excess)
  for _, bucket in ipairs(window) do
    excess = excess - bucket[2]
    if excess <= 0 then return (bucket[1] + BUCKETS) * 1000 - now_ms end
  end
  return -1
end

local function reset_ms(window)
  if #window == 0 then return 0 end
  return (window[#window][1] + BUCKETS) * 1000 - now_ms
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms, 'LIMIT', 0, 100)) do
  finish(id, 0, true)
end
if operation == 'settle' then
  return {finish(ARGV[4], tonumber(ARGV[5]), ARGV[6] == '1')}
end
if operation == 'renew' then
  for i = 4, #ARGV do redis.call('ZADD', KEYS[1], 'XX', text(now_ms + lease_ms), ARGV[i]) end
  for i = 1, 2 do redis.call('EXPIRE', KEYS[i], 86400) end
  return {{}, {}, {}}
end

local accounts, obstacles, unseeded, uses = {}, {}, {}, {}
for i = 3, #KEYS do accounts[#accounts + 1] = load(KEYS[i]) end
if operation == 'seed' then
  local account = accounts[1]
  account.tokens_today = math.max(account.tokens_today, tonumber(ARGV[4]))
  account.tokens_this_month = math.max(account.tokens_this_month, tonumber(ARGV[5]))
  account.is_seeded = 1
  store(account)
end
if operation == 'carry' then
  local account = accounts[1]
  for i = 4, #ARGV, 3 do
    local age, requests, tokens = tonumber(ARGV[i]), tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
    local at = second - age
    if age < BUCKETS then
      add(account.key, 'r:' .. text(at), requests)
      add(account.key, 't:' .. text(at), tokens)
    end
    local its_day = math.floor(at / 86400)
    if its_day == day then account.tokens_today = account.tokens_today + tokens end
    if month_of(its_day) == month then account.tokens_this_month = account.tokens_this_month + tokens end
  end
  store(account)
end
if operation == 'reserve' then
  local requests, tokens, answers = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
  for position, account in ipairs(accounts) do
    local first = 8 + (position - 1) * 5
    local used = {account.r_sum, account.t_sum, account.tokens_today, account.tokens_this_month, account.answers}
    local added = {requests, tokens, tokens, tokens, answers}
    if (ARGV[first + 2] ~= '' or ARGV[first + 3] ~= '') and account.is_seeded ~= 1 then
      unseeded[#unseeded + 1] = position
    end
    for field = 1, 5 do
      local limit = tonumber(ARGV[first + field - 1])
      if limit and (added[field] > 0 or field > 2) and used[field] + added[field] > limit then
        local wait = -1
        local excess = used[field] + added[field] - limit
        if field == 1 then wait = wait_ms(account.r, excess) end
        if field == 2 then wait = wait_ms(account.t, excess) end
        obstacles[#obstacles + 1] = {position, FIELDS[field], wait}
      end
    end
  end
  if #unseeded == 0 and #obstacles == 0 then
    local keys = {}
    for position, account in ipairs(accounts) do
      account.tokens_today = account.tokens_today + tokens
      account.tokens_this_month = account.tokens_this_month + tokens
      account.answers = account.answers + answers
      store(account)
      add(account.key, 'r:' .. text(second), requests)
      add(account.key, 't:' .. text(second), tokens)
      add(account.key, 'reserved_tokens', tokens)
      keys[position] = account.key
      account.reserved_tokens = account.reserved_tokens + tokens
      charge(account, 'r', requests)
      charge(account, 't', tokens)
    end
    redis.call('HSET', KEYS[2], ARGV[4], cjson.encode({accounts = keys, second = second, day = day, month = month,
      requests = requests, tokens = tokens, answers = answers}))
    redis.call('ZADD', KEYS[1], text(now_ms + lease_ms), ARGV[4])
    for i = 1, 2 do redis.call('EXPIRE', KEYS[i], 86400) end
  end
end
for position, account in ipairs(accounts) do
  uses[position] = {account.r_sum, reset_ms(account.r), account.t_sum, reset_ms(account.t), account.tokens_today,
    account.tokens_this_month, account.reserved_tokens, account.answers}
end
return {obstacles, unseeded, uses}
