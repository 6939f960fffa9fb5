-- admit: the second half of push. RPUSH has just appended n requests to each place of the push; this decides how many may stay.
--
-- ARGV  1 producer ('' = none: a push that is sent again runs again)   2 token of its last push ('' = none)   3 token of this push   4 '1' if nothing of it is outstanding
--       5 flags: 'w' whole (all or nothing), 'f' force (whatever the capacity), 'j' jobs, 'c' some have a cost, or ''
--       6 the client's capacity ('' = the queue's)   7 default capacity   8 default capacity_bytes
--       9 microseconds within which a worker must have reported ('' = any)
--       10 number of places k, then k times: place, n, bytes; then, place by place, one head a request from its second field on
-- Returns {'ok', now, admitted per place …, pending, drain rate a second}
--         {'dup', now, admitted per place …}     this push ran already
--         {'gap', now, stored token or ''}       pushes before this one are lost; nothing was changed
--         {'no_worker', now}                     no worker has reported within ARGV[9]; nothing was changed
local producer = prefix .. 'producer:' .. ARGV[1]
local flags = ARGV[5]
local whole = string.find(flags, 'w', 1, true)
local force = string.find(flags, 'f', 1, true)
local jobs = string.find(flags, 'j', 1, true)
local costs = string.find(flags, 'c', 1, true)
local pushes, at = {}, 11
for i = 1, tonumber(ARGV[10]) do
  pushes[i] = {place = ARGV[at], lane = string.sub(ARGV[at], 1, 1), group = string.sub(ARGV[at], 3), n = tonumber(ARGV[at + 1]), bytes = tonumber(ARGV[at + 2])}
  at = at + 3
end

local function trim(place, n)
  if n > 0 then
    redis.call('LTRIM', lists_of(place)[1], 0, -n - 1)
  end
end
local function undo()
  for _, p in ipairs(pushes) do
    trim(p.place, p.n)
  end
end

local guarded = ARGV[1] ~= ''
local record = guarded and redis.call('GET', producer)
local stored, counts = '', ''
if record then
  stored, counts = string.match(record, '^(%S+) (.*)$')
end
if guarded and stored == ARGV[3] then
  undo()
  local answer = {'dup', now}
  for count in string.gmatch(counts, '%d+') do
    answer[#answer + 1] = tonumber(count)
  end
  return answer
end
if guarded and not (stored == ARGV[2] or (stored == '' and ARGV[4] == '1')) then
  undo()
  return {'gap', now, stored}
end
if ARGV[9] ~= '' then
  local reported = tonumber(redis.call('HGET', prefix .. 'counters', 'reported_us') or 0)
  if now - reported > tonumber(ARGV[9]) then
    undo()
    return {'no_worker', now}
  end
end

for _, p in ipairs(pushes) do
  repair(p.place, p.n)
end
local config = redis.call('HMGET', prefix .. 'config', 'capacity', 'capacity_bytes')
local capacity = tonumber(config[1] or ARGV[7])
if ARGV[6] ~= '' then
  capacity = math.min(capacity, tonumber(ARGV[6]))
end
local count, bytes, grouped = pending()
local room = capacity - count
local room_bytes = tonumber(config[2] or ARGV[8]) - bytes
local stamp = int(now) .. ';'
local accepted, rejected, added, first, low, full = 0, 0, 0, at, nil, false
local want = tonumber(redis.call('GET', prefix .. 'want') or 1)
local most_a_batch, budget, padded
local answer, kept = {'ok', now}, {}

for _, p in ipairs(pushes) do
  local n, size = p.n, p.bytes
  if not force then
    local most = room
    if p.lane == 'l' then
      low = low or redis.call('LLEN', LISTS.l[2]) + (redis.call('HGET', prefix .. 'counters', 'grouped_l') or 0)
      most = math.min(most, math.max(1, math.floor(capacity / 2)) - low)
    end
    n = math.max(0, math.min(n, most))
    if n < p.n or size > room_bytes then
      size = 0
      local fits = 0
      for i = first, first + n - 1 do
        local one = tonumber(string.match(ARGV[i], '^%d+;(%d+)'))
        -- alone in an empty queue a request always fits: max_payload bounds it
        if size + one > room_bytes and count + fits > 0 then
          break
        end
        size, fits = size + one, fits + 1
      end
      n = fits
    end
    if whole and n < p.n then
      n, size = 0, 0
    end
  end
  trim(p.place, p.n - n)
  local heads = {}
  for i = 1, n do
    local head = ARGV[first + i - 1]
    if jobs then
      local timeout, ttl, id = string.match(head, '^(%d+);%d+;%d+;%a[^;]*;(%d+);(%x+)')
      local mark = prefix .. 'job:' .. id
      if redis.call('EXISTS', mark) == 1 then
        head = '0' .. string.match(head, '^%d+(.*)$') -- submitted before: this one has no time left, and take drops it
        head = string.gsub(head, ';%d+;%x+$', ';0;' .. id)
      else
        redis.call('SET', mark, int(now + timeout) .. ';' .. ttl, 'PX', int(timeout / 1000 + ttl))
      end
    end
    heads[i] = stamp .. head
  end
  if n > 0 then
    local lists = lists_of(p.place)
    announce(p.place, int(now))
    push('RPUSH', lists[2], heads)
    redis.call('EXPIRE', lists[1], 604800)
    redis.call('EXPIRE', lists[2], 604800)
    low = low and p.lane == 'l' and low + n or low
    -- only who sends groups or costs has a batch filled by anything but the number of requests
    if costs or p.group ~= '' then
      if not most_a_batch then
        most_a_batch, budget, padded = batch_limits()
      end
      local longest = 0
      for _, head in ipairs(heads) do
        longest = math.max(longest, cost_of(head))
      end
      if p.group ~= '' then
        add_cost(p.group, heads, 1)
        add_grouped(p.place, n)
        grouped = grouped + n
        local waiting, is_full = reindex(p.group, most_a_batch, budget, padded, longest)
        full = full or is_full or waiting >= want
      elseif budget then
        add_cost('', heads, 1)
        local waiting = count + n - grouped
        full = full or waiting + (redis.call('HGET', prefix .. 'costs', '') or 0) >= budget or (padded and longest * waiting >= budget)
      end
    end
  end
  first = first + p.n
  room, room_bytes, count = room - n, room_bytes - size, count + n
  accepted, rejected, added = accepted + n, rejected + p.n - n, added + size
  answer[#answer + 1] = n
  kept[#kept + 1] = n
end

if guarded then
  redis.call('SET', producer, ARGV[3] .. ' ' .. table.concat(kept, ','), 'EX', 3600)
end
if accepted > 0 then
  redis.call('HINCRBY', prefix .. 'counters', 'accepted', accepted)
  redis.call('HINCRBY', prefix .. 'counters', 'pending_bytes', int(added))
  redis.call('EXPIRE', prefix .. 'counters', 604800)
  if full or count - grouped >= want or want == 1 then
    leave_token()
  end
end
local rate = '0'
if rejected > 0 then
  redis.call('HINCRBY', prefix .. 'counters', 'rejected', rejected)
  local drain = redis.call('HMGET', prefix .. 'counters', 'drain_rate', 'reported_us')
  if now - tonumber(drain[2] or 0) < 10000000 then
    rate = drain[1] or '0'
  end
end
answer[#answer + 1] = count
answer[#answer + 1] = rate
return answer
