-- settle: the end of a native take. What is left of `due` goes back to the lane it was renamed from: the one lane that has heads and no
-- requests. Only take, this script and the LMOVEs between them, in one MULTI, ever see `due`.
if redis.call('EXISTS', prefix .. 'due') == 0 then
  return 0
end
for _, lists in pairs(LISTS) do
  if redis.call('EXISTS', lists[1]) == 0 and redis.call('EXISTS', lists[2]) == 1 then
    redis.call('RENAME', prefix .. 'due', lists[1])
    redis.call('EXPIRE', lists[1], 604800)
    return 1
  end
end
return 0
