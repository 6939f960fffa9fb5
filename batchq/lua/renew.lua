-- renew: lengthen the leases of batches that live workers hold, and look for expired ones.
--
-- ARGV  1 lease us, then batches: those that are finished meanwhile stay so
-- Returns {now, batch, lease end, …}: the leases that have expired.
begin_writing()
for i = 2, #ARGV do
  redis.call('ZADD', prefix .. 'leases', 'XX', int(now + ARGV[1]), ARGV[i])
end
return {now, unpack(redis.call('ZRANGEBYSCORE', prefix .. 'leases', '-inf', int(now), 'WITHSCORES', 'LIMIT', 0, 100))}
