-- finish, for when Redis is at maxmemory and refuses the MULTI: the same, beginning with what frees memory.
--
-- ARGV  1 batch   2 requests that were answered, 3 of them with an error   4 ttl ms of a client's stream
--       5 number of streams k, then k times: client, bytes of replies; then to the end: id hex, ttl ms, reply
-- Returns 1 if the batch was still leased, else 0.
local held = redis.call('ZREM', prefix .. 'leases', ARGV[1])
redis.call('UNLINK', prefix .. 'batch:' .. ARGV[1], prefix .. 'batch:' .. ARGV[1] .. ':heads')
local at = 6
for _ = 1, tonumber(ARGV[5]) do
  redis.call('XADD', prefix .. 'replies:' .. ARGV[at], '*', 'r', ARGV[at + 1])
  redis.call('PEXPIRE', prefix .. 'replies:' .. ARGV[at], ARGV[4])
  at = at + 2
end
while at <= #ARGV do
  redis.call('RPUSH', prefix .. 'reply:' .. ARGV[at], ARGV[at + 2])
  redis.call('PEXPIRE', prefix .. 'reply:' .. ARGV[at], ARGV[at + 1])
  redis.call('PEXPIRE', prefix .. 'job:' .. ARGV[at], ARGV[at + 1])
  at = at + 3
end
redis.call('HINCRBY', prefix .. 'counters', 'completed', ARGV[2])
redis.call('HINCRBY', prefix .. 'counters', 'failed', ARGV[3])
return held
