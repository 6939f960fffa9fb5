-- Shared by the scripts: it stands in front of each of them.
--
-- KEYS[1] is the queue's key prefix, `batchq:{<queue>}:`; it is no key itself, but hashes to the queue's slot. batchq/keys.py lists all keys.
--
-- A head is what scripts see of a request:
--   <enqueued us>;<timeout us>;<size>;<attempts>;<place>[@<cost>];<ttl ms>;<id hex>[;<worker>;<recovered us>]
-- `place` is a lane, h, n or l, or the lane of a group, `n:<group>`; without a cost a request counts 1; `ttl` is 0 unless the request is a
-- submitted job; the last two are there once a worker has died with it. Times are integer microseconds of Redis' own clock.

local prefix = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local LISTS = {
  h = {prefix .. 'requests:high', prefix .. 'heads:high'},
  n = {prefix .. 'requests', prefix .. 'heads'},
  l = {prefix .. 'requests:low', prefix .. 'heads:low'},
  s = {prefix .. 'solo', prefix .. 'heads:solo'},
}
local LANES = {'h', 'n', 'l'}
local INDEX = {h = prefix .. 'groups:high', n = prefix .. 'groups', l = prefix .. 'groups:low'}

local function int(number)
  return string.format('%.0f', number)
end

-- At maxmemory Redis refuses a script's first write unless it can free memory; a script that has written may go on.
local function begin_writing()
  redis.call('DEL', prefix .. 'due')
end

-- The two lists of a place.
local function lists_of(place)
  local lists = LISTS[place]
  if not lists then
    local lane, group = string.match(place, '^(%a):(.+)$')
    lists = {LISTS[lane][1] .. '@' .. group, LISTS[lane][2] .. '@' .. group}
    LISTS[place] = lists
  end
  return lists
end

-- How many requests are pending, over all lanes and groups; their bytes; and how many of them are in groups.
local function pending()
  local n = redis.call('LLEN', LISTS.s[2])
  for _, lane in ipairs(LANES) do
    n = n + redis.call('LLEN', LISTS[lane][2])
  end
  local counters = redis.call('HMGET', prefix .. 'counters', 'pending_bytes', 'grouped_h', 'grouped_n', 'grouped_l')
  local grouped = (counters[2] or 0) + (counters[3] or 0) + (counters[4] or 0)
  return n + grouped, tonumber(counters[1] or 0), grouped
end

-- What a request counts, at most 1e9: sums of more might not be finite, and a script that ends half-way harms everybody.
local function cost_of(head)
  local cost = tonumber(string.match(head, '^%d+;%d+;%d+;%d+;[^;@]*@([^;]+);') or 1) or 1
  if cost >= 0 and cost <= 1000000000 then
    return cost
  end
  return cost > 0 and 1000000000 or 1
end

-- Note that heads have come to a group (sign 1) or left it (-1). `costs` keeps by how much the pending ones cost more than 1 each.
local function add_cost(group, heads, sign)
  local more = 0
  for _, head in ipairs(heads) do
    more = more + cost_of(head) - 1
  end
  if more ~= 0 then
    redis.call('HINCRBYFLOAT', prefix .. 'costs', group, string.format('%.17g', sign * more))
  end
end

-- Have a place's group in the index before anything stands in it: a server that comes up with half of a script's writes must not have
-- requests there that nobody looks for. An entry too much is removed when somebody does.
local function announce(place, enqueued)
  if #place > 1 then
    redis.call('ZADD', INDEX[string.sub(place, 1, 1)], 'NX', enqueued, string.sub(place, 3))
  end
end

local function add_grouped(place, n)
  if #place > 1 and n ~= 0 then
    redis.call('HINCRBY', prefix .. 'counters', 'grouped_' .. string.sub(place, 1, 1), n)
  end
end

-- Bring the indexes up to date after a group's lists have changed: for each lane the groups that have requests in it, by the enqueue time
-- of the first; and the groups that are `full`, as far as that can be told here: take looks closer. `longest` is the largest cost that has
-- just come; the largest since the group was last empty is kept with the sums, as `<group>^`.
-- Returns how many requests the group has, and whether it is full.
local function reindex(group, most, budget, padded, longest)
  local n, oldest, top = 0, nil, nil
  for rank, lane in ipairs(LANES) do
    local heads = lists_of(lane .. ':' .. group)[2]
    local head = redis.call('LINDEX', heads, 0)
    if head then
      top = top or rank
      local enqueued = string.match(head, '^%d+') or '0'
      redis.call('ZADD', INDEX[lane], enqueued, group)
      n = n + redis.call('LLEN', heads)
      oldest = math.min(oldest or math.huge, tonumber(enqueued))
    elseif redis.call('ZREM', INDEX[lane], group) == 1 and redis.call('EXISTS', INDEX[lane]) == 0 then
      redis.call('HDEL', prefix .. 'counters', 'grouped_' .. lane) -- whatever was lost on the way
    end
  end
  if n == 0 then
    redis.call('HDEL', prefix .. 'costs', group, group .. '^')
  end
  local full = n >= most
  if n > 0 and budget then
    local costs = redis.call('HMGET', prefix .. 'costs', group, group .. '^')
    if padded and (longest or 0) > tonumber(costs[2] or 0) then
      redis.call('HSET', prefix .. 'costs', group .. '^', string.format('%.17g', longest))
    end
    full = full or n + (costs[1] or 0) >= budget or (padded and math.max(longest or 0, costs[2] or 0) * n >= budget)
  end
  if full and n > 0 then
    -- by the highest lane, then by the oldest: 2.5e15 us are the year 2049, and up to 9e15 whole numbers are exact
    redis.call('ZADD', prefix .. 'full', int(oldest + (top - 1) * 2500000000000000), group)
  else
    redis.call('ZREM', prefix .. 'full', group)
  end
  for _, name in ipairs({'groups:high', 'groups', 'groups:low', 'full', 'costs'}) do
    redis.call('EXPIRE', prefix .. name, 604800)
  end
  return n, full
end

-- What the queue's batches may hold: size, cost (nil: no budget), and whether they are padded. Nothing is known without a worker.
local function batch_limits()
  local config = redis.call('HMGET', prefix .. 'config', 'max_batch_size', 'max_batch_cost', 'padded')
  local budget = tonumber(config[2] or 0)
  return tonumber(config[1] or math.huge), budget > 0 and budget or nil, config[3] == '1'
end

-- Leave a token, unless one lies there already.
local function leave_token()
  if redis.call('EXISTS', prefix .. 'wake') == 0 then
    redis.call('RPUSH', prefix .. 'wake', '1')
  end
end

-- RPUSH or LPUSH many values: Lua's unpack fails over about 8,000.
local function push(command, key, values)
  for from = 1, #values, 1000 do
    redis.call(command, key, unpack(values, from, math.min(from + 999, #values)))
  end
end

-- The sum of the sizes in some heads.
local function bytes_of(heads)
  local bytes = 0
  for _, head in ipairs(heads) do
    bytes = bytes + tonumber(string.match(head, '^%d+;%d+;(%d+)') or 0)
  end
  return bytes
end

-- Add to the bytes that are pending; an empty queue has none, whatever was lost on the way.
local function add_pending_bytes(bytes, left)
  if left == 0 then
    redis.call('HSET', prefix .. 'counters', 'pending_bytes', 0)
  else
    redis.call('HINCRBY', prefix .. 'counters', 'pending_bytes', int(bytes))
  end
end

-- Make a place's two lists one length again. They differ only where a server lost half of a write or somebody else wrote to them.
-- `extra` requests stand at the end of the list without heads, rightly so: a push that is being admitted.
local function repair(place, extra)
  local lists = lists_of(place)
  local requests, heads = lists[1], lists[2]
  local surplus = redis.call('LLEN', requests) - extra - redis.call('LLEN', heads)
  if surplus == 0 then
    return
  end
  if surplus > 0 then
    -- nobody can tell when the orphans came: they go, from in front of `extra`
    local aside = prefix .. 'due:aside'
    for _ = 1, extra do
      redis.call('LMOVE', requests, aside, 'RIGHT', 'LEFT')
    end
    redis.call('LTRIM', requests, 0, -surplus - 1)
    for _ = 1, extra do
      redis.call('LMOVE', aside, requests, 'LEFT', 'RIGHT')
    end
  else
    -- a take was torn between its two moves: the requests of the first heads are in its batch
    local lost = redis.call('LRANGE', heads, 0, -surplus - 1)
    redis.call('LTRIM', heads, -surplus, -1)
    add_cost(string.match(place, ':(.+)$') or '', lost, -1)
    add_grouped(place, surplus)
    add_pending_bytes(-bytes_of(lost), (pending()))
  end
  redis.call('HINCRBY', prefix .. 'counters', 'repaired', math.abs(surplus))
end
