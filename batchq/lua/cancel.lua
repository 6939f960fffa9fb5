-- cancel: requests whose callers no longer want an answer; take drops them where they still wait.
--
-- ARGV  1 milliseconds after which to forget it   then id hex …
-- Returns 1.
redis.call('ZREMRANGEBYSCORE', prefix .. 'cancelled', '-inf', int(now))
for i = 2, #ARGV do
  redis.call('ZADD', prefix .. 'cancelled', int(now + ARGV[1] * 1000), ARGV[i])
end
redis.call('EXPIRE', prefix .. 'cancelled', 86400)
return 1
