-- take: move the requests of a due batch into `batch:<b>`, and lease it.
--
-- ARGV  1 batch   2 max_batch_size   3 this worker's own limit, at most that   4 max_delay us   5 lease us
--       6 microseconds that a batch is expected to run: what cannot be answered within them is dropped
--       7 form: 'light'   payloads are moved here, or the list renamed; over 64 KiB to be moved: 'bulk', and nothing is
--               'force'   the same whatever the size: for when Redis is at maxmemory and refuses the native form
--               'native'  the caller goes on with LMOVE due -> batch:<b>, ARGV[3] times, and settle, all in one MULTI
--       8 'solo' or 'batch': which goes first where both are due   9 '1' = prefetch: only a full batch that no idle worker waits for
--       10 worker   11, 12 what stands before and behind the id in the reply to a job whose deadline has passed
-- Returns {'idle', now, dropped}                       nothing is pending, or no more
--         {'wait', now, dropped, left us}              not due; `want` is set
--         {'no', now}                                  nothing to prefetch; nothing was written
--         {'bulk', now, n}                             take again, in the native form
--         {'batch', now, kind, still pending, head …}  kind: 'batch', 'solo', or 'again' if this batch was taken before (of the last two
--                                                      LMOVE sees nothing: LRANGE them); '' for a request that is not to be run
--
-- The first write is DEL, which Redis allows at maxmemory; a script that has written may go on.
local batch, most, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_delay, form, prefetch = tonumber(ARGV[4]), ARGV[7], ARGV[9] == '1'
local target, target_heads = prefix .. 'batch:' .. batch, prefix .. 'batch:' .. batch .. ':heads'
local horizon = now + tonumber(ARGV[6])
local LIGHT_BYTES, AGED = 65536, 1000000

local again = redis.call('LRANGE', target_heads, 0, -1)
if #again > 0 then
  begin_writing()
  redis.call('ZADD', prefix .. 'leases', int(now + ARGV[5]), batch)
  local answer = {'batch', now, 'again', pending()}
  for i, head in ipairs(again) do -- not unpack: it fails over about 8,000
    answer[i + 4] = head
  end
  return answer
end
if prefetch and redis.call('EXISTS', prefix .. 'wake') == 0 then
  return {'no', now}
end

local cancelled = redis.call('EXISTS', prefix .. 'cancelled') == 1

-- Whether a request is not to be run: 'expired', 'cancelled' or nil. Also its enqueue time and size.
local function fate(head, by)
  local enqueued, timeout, size = string.match(head, '^(%d+);(%d+);(%d+)')
  if not enqueued then
    return 'expired', now, 0
  end
  enqueued, size = tonumber(enqueued), tonumber(size)
  if enqueued + timeout < by then
    return 'expired', enqueued, size
  end
  if cancelled and redis.call('ZSCORE', prefix .. 'cancelled', string.match(head, ';%a;%d+;(%x+)') or '') then
    return 'cancelled', enqueued, size
  end
  return nil, enqueued, size
end

local gone = {}
-- Count a request that is not run; a job gets its answer.
local function drop(head, why)
  gone[why] = (gone[why] or 0) + 1
  if why == 'cancelled' then
    redis.call('ZREM', prefix .. 'cancelled', string.match(head, ';%a;%d+;(%x+)'))
  end
  local ttl, id = string.match(head, ';%a;(%d+);(%x+)')
  if why == 'expired' and ttl and tonumber(ttl) > 0 then
    local raw = string.gsub(id, '%x%x', function(pair) return string.char(tonumber(pair, 16)) end)
    redis.call('RPUSH', prefix .. 'reply:' .. id, ARGV[11] .. raw .. ARGV[12])
    redis.call('PEXPIRE', prefix .. 'reply:' .. id, ttl)
    redis.call('PEXPIRE', prefix .. 'job:' .. id, ttl)
  end
end

-- Look at the front of a lane: leading requests that are not run, then up to `limit` live ones with what stands among them.
local function scan(lane)
  local found = {lane = lane, front = {}, why = {}, heads = {}, fates = {}, sizes = {}, live = 0, bytes = 0}
  local from, n = 0, 0
  while true do
    local page = redis.call('LRANGE', LISTS[lane][2], from, from + limit - 1)
    for _, head in ipairs(page) do
      local why, enqueued, size = fate(head, horizon)
      if why and n == 0 then
        found.front[#found.front + 1], found.why[#found.why + 1] = head, why
        found.bytes = found.bytes + size
      else
        n = n + 1
        found.heads[n], found.fates[n], found.sizes[n] = head, why or '', size
        if not why then
          found.oldest = found.oldest or enqueued
        end
        if not why or form == 'native' then -- there each element costs one of the caller's LMOVEs
          found.live = found.live + 1
        end
        if found.live == limit or n == limit * 4 then
          return found
        end
      end
    end
    if #page < limit then
      return found
    end
    from = from + limit
  end
end

-- Drop the leading requests that are not run.
local function drop_front(found)
  local n = #found.front
  if n > 0 then
    redis.call('LTRIM', LISTS[found.lane][1], n, -1)
    redis.call('LTRIM', LISTS[found.lane][2], n, -1)
    for i, head in ipairs(found.front) do
      drop(head, found.why[i])
    end
  end
end

local function count_gone()
  for why, n in pairs(gone) do
    redis.call('HINCRBY', prefix .. 'counters', why, n)
  end
end

-- A request whose worker has died is run alone; a second time by another worker, if one is alive and comes for it within 10 s.
local function solo()
  repair('s', 0)
  while true do
    local head = redis.call('LINDEX', LISTS.s[2], 0)
    if not head then
      return nil
    end
    local why, _, size = fate(head, now)
    if not why then
      local attempts, by, since = string.match(head, '^%d+;%d+;%d+;(%d+);%a;%d+;%x+;([^;]*);(%d+)')
      if attempts and tonumber(attempts) > 0 and by == ARGV[10] and now - since < 10000000 then
        for _, report in ipairs(redis.call('HVALS', prefix .. 'workers')) do
          local reported, other = string.match(report, '^(%d+);([^;]*)')
          if reported and other ~= by and now - reported < 10000000 then
            return nil
          end
        end
      end
      return {lane = 's', front = {}, why = {}, heads = {head}, fates = {''}, sizes = {size}, live = 1, bytes = 0, take = 1}
    end
    redis.call('DEL', prefix .. 'want')
    redis.call('LTRIM', LISTS.s[1], 1, -1)
    redis.call('LTRIM', LISTS.s[2], 1, -1)
    drop(head, why)
    add_pending_bytes(-size, pending())
  end
end

local alone = nil
if not prefetch and redis.call('EXISTS', LISTS.s[2]) == 1 then
  alone = solo()
end

local lanes, live, total, oldest = {}, 0, 0, nil
if not (alone and ARGV[8] == 'solo') then
  for _, lane in ipairs(LANES) do
    local length = redis.call('LLEN', LISTS[lane][2])
    if length > 0 or redis.call('EXISTS', LISTS[lane][1]) == 1 then
      repair(lane, 0)
      local found = scan(lane)
      lanes[#lanes + 1] = found
      live = live + found.live
      total = total + redis.call('LLEN', LISTS[lane][2]) - #found.front
      if found.oldest then
        oldest = math.min(oldest or found.oldest, found.oldest)
      end
    end
  end
end

local left = nil
if oldest then
  -- a stamp in the future by more than max_delay comes from a clock that has stepped back since
  if total >= most or oldest > now + max_delay then
    left = 0
  else
    left = math.max(0, math.min(max_delay, max_delay - (now - oldest)))
  end
end
if prefetch and not (live >= limit and total >= most) then
  return {'no', now}
end

redis.call('DEL', prefix .. 'want')
local dropped_bytes = 0
for _, found in ipairs(lanes) do
  drop_front(found)
  dropped_bytes = dropped_bytes + found.bytes
end
local due = left == 0
if not due and not alone then
  count_gone()
  if dropped_bytes > 0 then
    add_pending_bytes(-dropped_bytes, pending())
  end
  if left then
    redis.call('SET', prefix .. 'want', most, 'PX', int(math.ceil(left / 1000) + 50))
    return {'wait', now, gone.expired or 0, math.ceil(left)}
  end
  return {'idle', now, gone.expired or 0}
end

local parts = {}
if due then
  -- The oldest of a lane is granted a place once it has waited for a second; the rest goes to high, normal, low.
  local places = limit
  for _, found in ipairs(lanes) do
    found.take = 0
  end
  local aged = {}
  for _, found in ipairs(lanes) do
    if found.oldest and now - found.oldest > AGED then
      aged[#aged + 1] = found
    end
  end
  table.sort(aged, function(a, b) return a.oldest < b.oldest end)
  for _, found in ipairs(aged) do
    if places > 0 then
      found.take, places = 1, places - 1
    end
  end
  for _, found in ipairs(lanes) do
    local more = math.min(places, found.live - found.take)
    found.take, places = found.take + more, places - more
    if found.take > 0 then
      parts[#parts + 1] = found
    end
  end
else
  parts = {alone}
end

-- From how many live ones are wanted to how many elements that is, with those among them that are not run.
local bytes, n = 0, 0
for _, found in ipairs(parts) do
  local elements, wanted = 0, found.take
  for i = 1, #found.heads do
    local counts = found.fates[i] == '' or form == 'native'
    if wanted == 0 and counts then
      break
    end
    if counts then
      wanted = wanted - 1
    end
    elements = i
  end
  found.elements = elements
  n = n + elements
  for i = elements + 1, #found.heads do
    found.heads[i] = nil
  end
  found.size = 0
  for i = 1, elements do
    found.size = found.size + found.sizes[i]
  end
  found.whole = elements == redis.call('LLEN', LISTS[found.lane][2])
  bytes = bytes + found.size
end

if form == 'light' and due and bytes > LIGHT_BYTES and not (#parts == 1 and parts[1].whole) then
  count_gone()
  if dropped_bytes > 0 then
    add_pending_bytes(-dropped_bytes, pending())
  end
  leave_token() -- should this worker die before it comes again
  return {'bulk', now, n}
end

-- In the native form the largest part is renamed to `due` and stays where it is: the others, few, are put in front of it. The caller's
-- LMOVEs then take them all, and no more: `n` is ARGV[3], or the lanes are empty. A request to be run alone is moved here, whatever the
-- form: LMOVEs would take its neighbours too.
local native = form == 'native' and due
local order = parts
if native then
  local base = parts[1]
  for _, found in ipairs(parts) do
    if found.elements > base.elements then
      base = found
    end
  end
  order = {}
  for _, found in ipairs(parts) do
    if found ~= base then
      order[#order + 1] = found
    end
  end
  order[#order + 1] = base
end

-- The lease first, then the batch's heads, the payloads, and only then the lanes' heads: a server that reads a torn append-only file may
-- come up with the first few writes of this script alone, and whichever they are, recover finds what it needs.
redis.call('ZADD', prefix .. 'leases', int(now + ARGV[5]), batch)
for _, found in ipairs(order) do
  push('RPUSH', target_heads, found.heads)
end
if native then
  redis.call('DEL', prefix .. 'due')
  redis.call('RENAME', LISTS[order[#order].lane][1], prefix .. 'due')
  for i = #order - 1, 1, -1 do
    local requests, aside = LISTS[order[i].lane][1], prefix .. 'due:aside'
    for _ = 1, order[i].elements do
      redis.call('LMOVE', requests, aside, 'LEFT', 'RIGHT')
    end
    for _ = 1, order[i].elements do
      redis.call('LMOVE', aside, prefix .. 'due', 'RIGHT', 'LEFT')
    end
  end
else
  for _, found in ipairs(parts) do
    local requests = LISTS[found.lane][1]
    if found.whole and #parts == 1 then
      redis.call('RENAME', requests, target)
    else
      push('RPUSH', target, redis.call('LRANGE', requests, 0, found.elements - 1))
      redis.call('LTRIM', requests, found.elements, -1)
    end
  end
end
local answer = {'batch', now, due and 'batch' or 'solo', 0}
local dead = 0
for _, found in ipairs(order) do
  redis.call('LTRIM', LISTS[found.lane][2], found.elements, -1)
  for i, head in ipairs(found.heads) do
    if found.fates[i] == '' then
      answer[#answer + 1] = head
    else
      drop(head, found.fates[i])
      answer[#answer + 1] = ''
      dead = dead + 1
    end
  end
end
count_gone()
local still = pending()
add_pending_bytes(-bytes - dropped_bytes, still)
redis.call('HINCRBY', prefix .. 'counters', 'taken', n - dead)
redis.call('HINCRBY', prefix .. 'counters', 'batches', 1)
if still > 0 then
  leave_token()
end
answer[4] = still
return answer
