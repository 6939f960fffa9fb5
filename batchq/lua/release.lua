-- release: hand a batch back that was not begun, to the head of the lanes that it came from, in the old order.
--
-- ARGV  1 batch
-- Returns how many requests went back.
local source, source_heads = prefix .. 'batch:' .. ARGV[1], prefix .. 'batch:' .. ARGV[1] .. ':heads'
redis.call('DEL', prefix .. 'want') -- the first write has to be one that Redis allows at maxmemory
local heads = redis.call('LRANGE', source_heads, 0, -1)
local n = math.min(#heads, redis.call('LLEN', source))
for i = n, 1, -1 do
  local recovered = string.find(heads[i], '^%d+;%d+;%d+;%d+;%a;%d+;%x+;')
  local lane = recovered and 's' or string.match(heads[i], '^%d+;%d+;%d+;%d+;([hnl]);') or 'n'
  redis.call('LMOVE', source, LISTS[lane][1], 'RIGHT', 'LEFT')
  redis.call('LPUSH', LISTS[lane][2], heads[i])
end
redis.call('UNLINK', source, source_heads)
redis.call('ZREM', prefix .. 'leases', ARGV[1]) -- last: see take
if n > 0 then
  local still = pending()
  add_pending_bytes(bytes_of(heads), still)
  redis.call('HINCRBY', prefix .. 'counters', 'released', n)
  leave_token()
end
return n
