-- recover: a worker has died, or vanished, with this batch: its requests go to the head of `solo`, to be run one at a time.
--
-- ARGV  1 batch   2 the lease's end as it was seen expired twice ('' = its worker is known to be dead)   3 the dead worker
--       4 lease us for the recoverer   5 deaths alone that make a request a dead letter
-- Returns {'none'}            no such batch, or its lease was renewed
--         {'moved', n}        n requests went to `solo`
--         {'dead', head}      its one request has now killed its last worker: the batch is leased anew to the caller, who buries it
local batch = ARGV[1]
local source, source_heads = prefix .. 'batch:' .. batch, prefix .. 'batch:' .. batch .. ':heads'
local lease = redis.call('ZSCORE', prefix .. 'leases', batch)
if ARGV[2] ~= '' and (not lease or tonumber(lease) ~= tonumber(ARGV[2])) then
  return {'none'}
end
local heads = redis.call('LRANGE', source_heads, 0, -1)
local n = math.min(#heads, redis.call('LLEN', source))
redis.call('DEL', prefix .. 'want') -- the first write has to be one that Redis allows at maxmemory
if n == 0 then
  redis.call('UNLINK', source, source_heads)
  redis.call('ZREM', prefix .. 'leases', batch)
  return {'none'}
end
local suffix = ';' .. ARGV[3] .. ';' .. int(now)
for i = 1, n do
  local before, attempts, after = string.match(heads[i], '^(%d+;%d+;%d+;)(%d+)(;%a[^;]*;%d+;%x+)')
  if before then
    attempts = tonumber(attempts)
    if n == 1 then -- it ran alone: nobody else can be to blame
      attempts = attempts + 1
    end
    heads[i] = before .. attempts .. after .. suffix
    if attempts >= tonumber(ARGV[5]) then
      redis.call('ZADD', prefix .. 'leases', int(now + ARGV[4]), batch)
      redis.call('LSET', source_heads, 0, heads[i])
      return {'dead', heads[i]}
    end
  end
end
if redis.call('EXISTS', LISTS.s[1]) == 0 and #heads == n then
  redis.call('RENAME', source, LISTS.s[1])
else
  for _ = 1, n do
    redis.call('LMOVE', source, LISTS.s[1], 'RIGHT', 'LEFT')
  end
end
for i = n, 1, -1 do
  redis.call('LPUSH', LISTS.s[2], heads[i])
end
redis.call('UNLINK', source, source_heads)
redis.call('ZREM', prefix .. 'leases', batch) -- last: see take
redis.call('EXPIRE', LISTS.s[1], 604800)
redis.call('EXPIRE', LISTS.s[2], 604800)
add_pending_bytes(bytes_of(heads), n)
redis.call('HINCRBY', prefix .. 'counters', 'recovered', n)
leave_token()
return {'moved', n}
