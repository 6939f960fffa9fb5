-- forget: a worker that was stopped past its lease has answered its batch after all; take its requests out of `solo`.
--
-- ARGV  ids, hex
-- Returns how many stood there.
begin_writing()
local ids, found, gone = {}, 0, {}
for _, id in ipairs(ARGV) do
  ids[id] = true
end
for i, head in ipairs(redis.call('LRANGE', LISTS.s[2], 0, -1)) do
  if ids[string.match(head, ';%a[^;]*;%d+;(%x+)') or ''] then
    redis.call('LSET', LISTS.s[1], i - 1, '')
    redis.call('LSET', LISTS.s[2], i - 1, '')
    found = found + 1
    gone[found] = head
  end
end
if found > 0 then
  redis.call('LREM', LISTS.s[1], 0, '')
  redis.call('LREM', LISTS.s[2], 0, '')
  add_pending_bytes(-bytes_of(gone), (pending()))
end
return found
