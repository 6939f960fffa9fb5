-- cancel_job: the same for a submitted job, which also gets a reply that says so, unless it has one.
--
-- ARGV  1 id hex   2 the reply
-- Returns 1 if the job was pending, 0 if it was answered before, -1 if there is no such job.
local mark = redis.call('GET', prefix .. 'job:' .. ARGV[1])
if redis.call('EXISTS', prefix .. 'reply:' .. ARGV[1]) == 1 then
  return 0
end
if not mark then
  return -1
end
local deadline, ttl = string.match(mark, '^(%d+);(%d+)')
redis.call('ZREMRANGEBYSCORE', prefix .. 'cancelled', '-inf', int(now))
redis.call('ZADD', prefix .. 'cancelled', deadline, ARGV[1])
redis.call('EXPIRE', prefix .. 'cancelled', 86400)
redis.call('RPUSH', prefix .. 'reply:' .. ARGV[1], ARGV[2])
redis.call('PEXPIRE', prefix .. 'reply:' .. ARGV[1], ttl)
redis.call('PEXPIRE', prefix .. 'job:' .. ARGV[1], ttl)
return 1
