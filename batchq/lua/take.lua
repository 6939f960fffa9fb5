-- take: move the requests of a due batch into `batch:<b>`, and lease it.
--
-- ARGV  1 batch   2 max_batch_size   3 this worker's own limit, at most that   4 max_delay us   5 lease us
--       6 microseconds that a batch is expected to run: what cannot be answered within them is dropped
--       7 form: 'light'   payloads are moved here, or the list renamed; over 64 KiB to be moved: 'bulk', and nothing is
--               'force'   the same whatever the size: for when Redis is at maxmemory and refuses the native form
--               'native'  the caller goes on with LMOVE due -> batch:<b>, ARGV[3] times, and settle, all in one MULTI
--       8 'solo' or 'batch': which goes first where both are due   9 '1' = prefetch: only a full batch that no idle worker waits for
--       10 worker   11, 12 what stands before and behind the id in the reply to a job whose deadline has passed
--       13 max_batch_cost, 0 = none   14 '1' = padded: a batch costs its longest x its size, not the sum
--       15 '' or, for a worker whose model gives its requests their group or cost, which then regroups what stands in no group: 'first' before
--          any group has its turn, 'full' behind a group that is full, 'last' behind each that is due
--       16 microseconds that this may take: what stands in no group needs them as well
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
local budget, padded, regroups = tonumber(ARGV[13]), ARGV[14] == '1', ARGV[15]
if budget == 0 then
  budget = nil
end
local target, target_heads = prefix .. 'batch:' .. batch, prefix .. 'batch:' .. batch .. ':heads'
local horizon = now + tonumber(ARGV[6])
local LIGHT_BYTES, AGED = 65536, 1000000
local VISITS = 100 -- groups that one take looks at: a thousand that have expired together must not hold Redis up

local again = redis.call('LRANGE', target_heads, 0, -1)
if #again > 0 then
  begin_writing()
  redis.call('ZADD', prefix .. 'leases', int(now + ARGV[5]), batch)
  local answer = {'batch', now, 'again', (pending())}
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
  if cancelled and redis.call('ZSCORE', prefix .. 'cancelled', string.match(head, ';%a[^;]*;%d+;(%x+)') or '') then
    return 'cancelled', enqueued, size
  end
  return nil, enqueued, size
end

local gone = {}
-- Count a request that is not run; a job gets its answer.
local function drop(head, why)
  gone[why] = (gone[why] or 0) + 1
  if why == 'cancelled' then
    redis.call('ZREM', prefix .. 'cancelled', string.match(head, ';%a[^;]*;%d+;(%x+)'))
  end
  local ttl, id = string.match(head, ';%a[^;]*;(%d+);(%x+)')
  if why == 'expired' and ttl and tonumber(ttl) > 0 then
    local raw = string.gsub(id, '%x%x', function(pair) return string.char(tonumber(pair, 16)) end)
    redis.call('RPUSH', prefix .. 'reply:' .. id, ARGV[11] .. raw .. ARGV[12])
    redis.call('PEXPIRE', prefix .. 'reply:' .. id, ttl)
    redis.call('PEXPIRE', prefix .. 'job:' .. id, ttl)
  end
end

-- Look at the front of a place: leading requests that are not run, then up to `limit` live ones with what stands among them.
local function scan(place)
  local heads = lists_of(place)[2]
  local by = #place == 1 and horizon + tonumber(ARGV[16]) or horizon
  local found = {place = place, front = {}, why = {}, heads = {}, fates = {}, sizes = {}, live = 0, bytes = 0}
  local from, n = 0, 0
  while true do
    local page = redis.call('LRANGE', heads, from, from + limit - 1)
    for _, head in ipairs(page) do
      local why, enqueued, size = fate(head, by)
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
local dropped_bytes = 0
local function drop_front(found)
  local n = #found.front
  if n > 0 then
    redis.call('LTRIM', lists_of(found.place)[1], n, -1)
    redis.call('LTRIM', lists_of(found.place)[2], n, -1)
    for i, head in ipairs(found.front) do
      drop(head, found.why[i])
    end
    dropped_bytes = dropped_bytes + found.bytes
    add_grouped(found.place, -n)
    if budget or found.group ~= '' then
      add_cost(found.group, found.front, -1)
    end
    found.front = {}
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
      local attempts, by, since = string.match(head, '^%d+;%d+;%d+;(%d+);%a[^;]*;%d+;%x+;([^;]*);(%d+)')
      if attempts and tonumber(attempts) > 0 and by == ARGV[10] and now - since < 10000000 then
        for _, report in ipairs(redis.call('HVALS', prefix .. 'workers')) do
          local reported, other = string.match(report, '^(%d+);([^;]*)')
          if reported and other ~= by and now - reported < 10000000 then
            return nil
          end
        end
      end
      return {place = 's', group = '', front = {}, heads = {head}, fates = {''}, sizes = {size}, live = 1, elements = 1}
    end
    redis.call('DEL', prefix .. 'want')
    redis.call('LTRIM', LISTS.s[1], 1, -1)
    redis.call('LTRIM', LISTS.s[2], 1, -1)
    drop(head, why)
    add_pending_bytes(-size, (pending()))
  end
end

local alone = nil
if not prefetch and redis.call('EXISTS', LISTS.s[2]) == 1 then
  alone = solo()
end

-- Look at a group's lanes ('' for what is in none), and at what a batch of it would hold now.
local function examine(group)
  local seen = {group = group, lanes = {}, total = 0, live = 0, front = 0}
  for rank, lane in ipairs(LANES) do
    local place = group == '' and lane or lane .. ':' .. group
    local lists = lists_of(place)
    if redis.call('EXISTS', lists[1], lists[2]) > 0 then
      repair(place, 0)
      local found = scan(place)
      found.group = group
      seen.lanes[#seen.lanes + 1] = found
      seen.front = seen.front + #found.front
      seen.total = seen.total + redis.call('LLEN', lists[2]) - #found.front
      seen.live = seen.live + found.live
      if found.oldest then
        seen.rank = seen.rank or rank
        seen.oldest = math.min(seen.oldest or found.oldest, found.oldest)
      end
    end
  end
  local native, slots, n, cost, longest = form == 'native', 0, 0, 0, 0
  local whole = group == '' and regroups ~= '' -- what is to be regrouped is no batch yet
  local priced = budget and not whole
  -- Give a request its place, unless the batch would cost too much with it.
  local function add(head)
    if priced then
      local one = cost_of(head)
      local most_of, sum = math.max(longest, one), cost + one
      if n > 0 and (padded and most_of * (n + 1) or sum) > budget then
        return false
      end
      cost, longest = sum, most_of
    end
    slots, n = slots + 1, n + 1
    return true
  end

  -- The oldest of a lane is granted a place once it has waited for a second; the rest goes to high, normal, low.
  local aged = {}
  for _, found in ipairs(seen.lanes) do
    found.elements = 0
    if found.oldest and now - found.oldest > AGED then
      aged[#aged + 1] = found
    end
  end
  table.sort(aged, function(a, b) return a.oldest < b.oldest end)
  for _, found in ipairs(aged) do
    if slots < limit and add(found.heads[1]) then
      found.elements = 1
    end
  end
  local over = false
  for _, found in ipairs(seen.lanes) do
    for i = found.elements + 1, #found.heads do
      if found.fates[i] == '' then
        if over or slots >= limit then
          break
        elseif not priced then
          slots, n = slots + 1, n + 1
        elseif not add(found.heads[i]) then
          over = true
          break
        end
      elseif native then -- each element costs one of the caller's LMOVEs
        if over or slots >= limit then
          break
        end
        slots = slots + 1
      end
      found.elements = i
    end
  end
  local filled = priced and (over or (padded and longest * n or cost) >= budget)
  seen.full = filled or seen.total >= most
  seen.ripe = filled or (seen.total >= most and seen.live >= limit) or whole
  return seen
end

-- Microseconds until a group is due; nil where nothing of it is to be run.
local function due_in(seen)
  if not seen.oldest then
    return nil
  end
  -- a stamp in the future by more than max_delay comes from a clock that has stepped back since
  if seen.full or seen.oldest > now + max_delay then
    return 0
  end
  return math.max(0, math.min(max_delay, max_delay - (now - seen.oldest)))
end

-- Choose the group that the batch is made of. Each fourth batch goes to the one that has waited longest, if for over a second: the others
-- to the highest lane, and among equals to the oldest.
local chosen, left, cut, fourth = nil, nil, false, false
local function consider(seen)
  local wait = due_in(seen)
  if wait ~= 0 then
    left = wait and math.min(left or wait, wait) or left
    return false
  end
  local better = not chosen
  if chosen and fourth and now - math.min(chosen.oldest, seen.oldest) > AGED then
    better = seen.oldest < chosen.oldest
  elseif chosen then
    better = seen.rank < chosen.rank or (seen.rank == chosen.rank and seen.oldest < chosen.oldest)
  end
  if better then
    chosen = seen
  end
  return true
end

-- Drop what a group has in front that is not run.
local function clean(seen)
  redis.call('DEL', prefix .. 'want')
  for _, found in ipairs(seen.lanes) do
    drop_front(found)
  end
  reindex(seen.group, most, budget, padded)
end

local plain = nil
if not (alone and ARGV[8] == 'solo') then
  plain = examine('')
  if redis.call('EXISTS', INDEX.n, INDEX.h, INDEX.l) > 0 then
    fourth = (redis.call('HGET', prefix .. 'counters', 'batches') or 0) % 4 == 3
    local visited, visits = {}, 0
    -- One group of an index, looked at once; whether another of the same index is worth a look.
    local function visit(index, at)
      local first = redis.call('ZRANGE', index, at, at, 'WITHSCORES')
      local group = first[1]
      if not group or visited[group] or visits >= VISITS then
        cut = cut or visits >= VISITS
        return false
      end
      local stamp = tonumber(first[2])
      local wait = max_delay - (now - stamp)
      if index ~= prefix .. 'full' and wait > 0 and wait <= max_delay * 2 then
        left = math.min(left or max_delay, wait, max_delay)
        return false
      end
      visits = visits + 1
      local seen = examine(group)
      if consider(seen) then
        visited[group] = true
        return false
      elseif prefetch then
        return false
      end
      clean(seen) -- it has moved on in the index: the next one may be due
      if redis.call('ZSCORE', index, group) == first[2] then
        visited[group] = true
        if index == prefix .. 'full' then
          redis.call('ZREM', index, group)
          return true
        end
      end
      return true
    end
    for _, lane in ipairs(LANES) do
      while visit(INDEX[lane], 0) do end
      visit(INDEX[lane], -1) -- a stamp far in the future would come last
    end
    while visit(prefix .. 'full', 0) do end
  end
  if regroups == '' then
    consider(plain)
  elseif plain.oldest and (not chosen or regroups == 'first' or (regroups == 'full' and not chosen.full)) then
    chosen = plain
  end
end
if prefetch and not (chosen and chosen.ripe) then
  -- where there are many groups few of them are full; more than a batch of work waits all the same
  local count, _, grouped = pending()
  if not chosen or grouped == 0 or count < most then
    return {'no', now}
  end
end

redis.call('DEL', prefix .. 'want')
if plain then
  for _, found in ipairs(plain.lanes) do
    drop_front(found)
  end
end
if chosen then
  for _, found in ipairs(chosen.lanes) do
    drop_front(found)
  end
elseif not alone then
  count_gone()
  if dropped_bytes > 0 then
    add_pending_bytes(-dropped_bytes, (pending()))
  end
  if cut then
    leave_token()
  end
  if left then
    redis.call('SET', prefix .. 'want', budget and math.min(most, budget) or most, 'PX', int(math.ceil(left / 1000) + 50))
    return {'wait', now, gone.expired or 0, math.ceil(left)}
  end
  return {'idle', now, gone.expired or 0}
end

-- The chosen group has changed.
local function note_change()
  if chosen and chosen.group ~= '' then
    reindex(chosen.group, most, budget, padded)
  elseif chosen and budget and redis.call('EXISTS', LISTS.h[2], LISTS.n[2], LISTS.l[2]) == 0 then
    redis.call('HDEL', prefix .. 'costs', '')
  end
end

local due = chosen ~= nil
local parts = {alone}
if due then
  parts = {}
  for _, found in ipairs(chosen.lanes) do
    if found.elements > 0 then
      parts[#parts + 1] = found
    end
  end
end
local bytes, n = 0, 0
for _, found in ipairs(parts) do
  local elements = found.elements
  n = n + elements
  for i = elements + 1, #found.heads do
    found.heads[i] = nil
  end
  found.size = 0
  for i = 1, elements do
    found.size = found.size + found.sizes[i]
  end
  found.whole = elements == redis.call('LLEN', lists_of(found.place)[2])
  bytes = bytes + found.size
end

if form == 'light' and due and bytes > LIGHT_BYTES and not (#parts == 1 and parts[1].whole) then
  count_gone()
  if dropped_bytes > 0 then
    add_pending_bytes(-dropped_bytes, (pending()))
  end
  note_change()
  leave_token() -- should this worker die before it comes again
  return {'bulk', now, n}
end

-- In the native form the largest part is renamed to `due` and stays where it is: the others, few, are put in front of it. The caller's
-- LMOVEs then take them all, and no more: `n` is ARGV[3], or the lanes are empty, or what does not fit the budget is moved back by settle.
-- A request to be run alone is moved here, whatever the form: LMOVEs would take its neighbours too.
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
  redis.call('RENAME', lists_of(order[#order].place)[1], prefix .. 'due')
  redis.call('SET', prefix .. 'due:home', order[#order].place)
  for i = #order - 1, 1, -1 do
    local requests, aside = lists_of(order[i].place)[1], prefix .. 'due:aside'
    for _ = 1, order[i].elements do
      redis.call('LMOVE', requests, aside, 'LEFT', 'RIGHT')
    end
    for _ = 1, order[i].elements do
      redis.call('LMOVE', aside, prefix .. 'due', 'RIGHT', 'LEFT')
    end
  end
else
  for _, found in ipairs(parts) do
    local requests = lists_of(found.place)[1]
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
  redis.call('LTRIM', lists_of(found.place)[2], found.elements, -1)
  add_grouped(found.place, -found.elements)
  if due and (budget or found.group ~= '') then
    add_cost(found.group, found.heads, -1)
  end
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
note_change()
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
