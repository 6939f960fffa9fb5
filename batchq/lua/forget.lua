-- forget: a worker that was stopped past its lease has answered its batch after all; take its requests out of `solo`.
--
-- ARGV  ids, hex
-- Returns how many stood there.
local ids, found = {}, 0
for _, id in ipairs(ARGV) do
  ids[id] = true
end
for i, head in ipairs(redis.call('LRANGE', LISTS.s[2], 0, -1)) do
  if ids[string.match(head, ';%a;%d+;(%x+)') or ''] then
    redis.call('LSET', LISTS.s[1], i - 1, '')
    redis.call('LSET', LISTS.s[2], i - 1, '')
    found = found + 1
  end
end
if found > 0 then
  redis.call('LREM', LISTS.s[1], 0, '')
  redis.call('LREM', LISTS.s[2], 0, '')
end
return found
