-- nudge: whoever waits for more requests may be gone, or a token went to a worker that cannot use it: start the waiting anew.
--
-- Returns how many requests are pending; if any, a token lies in `wake`.
redis.call('DEL', prefix .. 'want')
local count = pending()
if count > 0 then
  leave_token()
end
return count
