-- Shared by the scripts: it stands in front of each of them.
--
-- KEYS[1] is the queue's key prefix, `batchq:{<queue>}:`; it is no key itself, but hashes to the queue's slot. batchq/keys.py lists all keys.
--
-- A head is what scripts see of a request:
--   <enqueued us>;<timeout us>;<size>;<attempts>;<lane>;<ttl ms>;<id hex>[;<worker>;<recovered us>]
-- `lane` is h, n or l; `ttl` is 0 unless the request is a submitted job; the last two are there once a worker has died with it.
-- Times are integer microseconds of Redis' own clock.

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

local function int(number)
  return string.format('%.0f', number)
end

-- At maxmemory Redis refuses a script's first write unless it can free memory; a script that has written may go on.
local function begin_writing()
  redis.call('DEL', prefix .. 'due')
end

-- How many requests are pending, over all lanes.
local function pending()
  local n = 0
  for _, lists in pairs(LISTS) do
    n = n + redis.call('LLEN', lists[2])
  end
  return n
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

-- Make a lane's two lists one length again. They differ only where a server lost half of a write or somebody else wrote to them.
-- `extra` requests stand at the end of the list without heads, rightly so: a push that is being admitted.
local function repair(lane, extra)
  local requests, heads = LISTS[lane][1], LISTS[lane][2]
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
    add_pending_bytes(-bytes_of(lost), pending())
  end
  redis.call('HINCRBY', prefix .. 'counters', 'repaired', math.abs(surplus))
end
