-- settle: the end of a native take. What is left of `due` goes back to the place it was renamed from, in front of it what the LMOVEs took
-- and the take did not mean: they are as many as a batch may hold, and a budget may have let fewer through. Only take, this script and the
-- LMOVEs between them, in one MULTI, ever see `due`.
--
-- ARGV  1 batch
local home = redis.call('GETDEL', prefix .. 'due:home')
if not home then
  return 0
end
local due, batch = prefix .. 'due', prefix .. 'batch:' .. ARGV[1]
for _ = 1, redis.call('LLEN', batch) - redis.call('LLEN', batch .. ':heads') do
  redis.call('LMOVE', batch, due, 'RIGHT', 'LEFT')
end
if redis.call('EXISTS', due) == 1 then
  local requests = lists_of(home)[1]
  redis.call('RENAME', due, requests)
  redis.call('EXPIRE', requests, 604800)
end
return 1
