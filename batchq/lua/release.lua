-- release: hand a batch back that was not begun, to the head of the places that it came from, in the old order.
--
-- ARGV  1 batch   then, to regroup it instead: 2 'front' or 'back' of the new places   3 … the place[@cost] of each request, '' for one that
--       take has dropped already
-- Returns how many requests went back.
local source, source_heads = prefix .. 'batch:' .. ARGV[1], prefix .. 'batch:' .. ARGV[1] .. ':heads'
redis.call('DEL', prefix .. 'want') -- the first write has to be one that Redis allows at maxmemory
local most, budget, padded = batch_limits()
local heads = redis.call('LRANGE', source_heads, 0, -1)
local n = math.min(#heads, redis.call('LLEN', source))
local back = ARGV[2] == 'back'
local groups, gone = {}, {}
for step = 1, n do
  local i = back and step or n + 1 - step
  local head = heads[i]
  local before, field, after = string.match(head, '^(%d+;%d+;%d+;%d+;)([hnl][^;]*)(;%d+;%x+)$')
  local place = 's' -- what has a worker behind it was recovered, and runs alone
  if ARGV[i + 2] == '' then
    place = nil
    redis.call(back and 'LPOP' or 'RPOP', source)
    gone[#gone + 1] = head
  elseif before then
    field = ARGV[i + 2] or field
    head = before .. field .. after
    place = string.match(field, '^[^@]+')
    local group = string.sub(place, 3)
    if group ~= '' then
      announce(place, string.match(before, '^%d+'))
      groups[group] = math.max(groups[group] or 0, cost_of(head))
    end
    if group ~= '' or budget then
      add_cost(group, {head}, 1)
    end
    add_grouped(place, 1)
  end
  if place then
    local lists = lists_of(place)
    redis.call('LMOVE', source, lists[1], back and 'LEFT' or 'RIGHT', back and 'RIGHT' or 'LEFT')
    redis.call(back and 'RPUSH' or 'LPUSH', lists[2], head)
    redis.call('EXPIRE', lists[1], 604800)
    redis.call('EXPIRE', lists[2], 604800)
  end
end
for group, longest in pairs(groups) do
  reindex(group, most, budget, padded, longest)
end
redis.call('UNLINK', source, source_heads)
redis.call('ZREM', prefix .. 'leases', ARGV[1]) -- last: see take
if n > 0 then
  local still = pending()
  add_pending_bytes(bytes_of(heads) - bytes_of(gone), still)
  redis.call('HINCRBY', prefix .. 'counters', ARGV[2] and 'regrouped' or 'released', n)
  if ARGV[2] then -- it was no batch, and nothing of it has left the queue
    redis.call('HINCRBY', prefix .. 'counters', 'taken', #gone - n)
    redis.call('HINCRBY', prefix .. 'counters', 'batches', -1)
  end
  leave_token()
end
return n
