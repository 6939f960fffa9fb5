-- report: a worker is alive; once a second.
--
-- ARGV  1 worker   2 its report, JSON; '' = the worker ends
--       then, with the first report only, what it wants the queue's config to be: field, value, …
-- Returns {now, 'kept' or 'set', config field, value, …, '', worker, report, …}: the other workers that are alive.
--
-- The first live worker's options hold; a later one gets them back.
begin_writing()
local others, alive = {}, 0
local reports = redis.call('HGETALL', prefix .. 'workers')
for i = 1, #reports, 2 do
  local age = now - tonumber(string.match(reports[i + 1], '^(%d+)') or 0)
  if age > 60000000 then
    redis.call('HDEL', prefix .. 'workers', reports[i])
  elseif age < 10000000 and reports[i] ~= ARGV[1] then
    alive = alive + 1
    others[#others + 1] = reports[i]
    others[#others + 1] = reports[i + 1]
  end
end
if ARGV[2] == '' then
  redis.call('HDEL', prefix .. 'workers', ARGV[1])
  if alive == 0 then
    redis.call('HDEL', prefix .. 'counters', 'reported_us')
  end
  return {now, 'kept', '', unpack(others)}
end
local outcome = 'kept'
if #ARGV > 2 and (alive == 0 or redis.call('EXISTS', prefix .. 'config') == 0) then
  outcome = 'set'
  redis.call('DEL', prefix .. 'config')
  redis.call('HSET', prefix .. 'config', unpack(ARGV, 3))
end
redis.call('HSET', prefix .. 'workers', ARGV[1], int(now) .. ';' .. ARGV[1] .. ';' .. ARGV[2])

-- The rate at which the workers drain the queue: for QueueFullError.retry_after.
local counters = redis.call('HMGET', prefix .. 'counters', 'taken', 'drain_taken', 'drain_us', 'drain_rate')
local taken, since = tonumber(counters[1] or 0), tonumber(counters[3] or 0)
if now - since >= 1000000 then
  local rate = math.max(0, taken - tonumber(counters[2] or taken)) * 1000000 / (now - since)
  if now - since < 10000000 then
    rate = (rate + tonumber(counters[4] or rate)) / 2
  end
  redis.call('HSET', prefix .. 'counters', 'drain_taken', taken, 'drain_us', int(now), 'drain_rate', string.format('%.3f', rate))
end
redis.call('HSET', prefix .. 'counters', 'reported_us', int(now))
for _, key in ipairs({'config', 'workers', 'counters'}) do
  redis.call('EXPIRE', prefix .. key, 604800)
end
local answer = {now, outcome}
for _, item in ipairs(redis.call('HGETALL', prefix .. 'config')) do
  answer[#answer + 1] = item
end
answer[#answer + 1] = ''
for _, item in ipairs(others) do
  answer[#answer + 1] = item
end
return answer
