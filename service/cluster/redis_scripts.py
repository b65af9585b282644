"""Lua scripts of the Redis registry; each runs atomically.

Expiry is decided by the Redis server's clock. Entries that cannot be parsed are ignored. Every key
is declared in KEYS, and all have the key prefix as their hash tag, so that Redis Cluster stores
them on one node.
"""

HEARTBEAT = """
-- KEYS: replicas, deadlines, manifests, order; ARGV: id, entry, milliseconds
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
end
local known = redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) == 0
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
return {known and 1 or 0, redis.call('HVALS', KEYS[1]), redis.call('HVALS', KEYS[3]),
        redis.call('GET', KEYS[4])}
"""

LEAVE = """
-- KEYS: replicas, deadlines; ARGV: id
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
"""

CLAIM = """
-- KEYS: place, deadlines; ARGV: id, milliseconds, whether what is gone may be taken over
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local deadline = redis.call('ZSCORE', KEYS[2], holder)
  local gone = not deadline or tonumber(deadline) <= now
  if not (gone and ARGV[3] == '1') then return holder end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
"""

RELEASE = """
-- KEYS: place; ARGV: id
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""

PUBLISH = """
-- KEYS: manifests; ARGV: version, entry, sequence. Answers what stands in the way, if it does.
for _, known in ipairs(redis.call('HVALS', KEYS[1])) do
  local read, entry = pcall(cjson.decode, known)
  if read and type(entry) == 'table' and known ~= ARGV[2] and
      (entry.version == ARGV[1] or entry.sequence == tonumber(ARGV[3])) then return known end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return false
"""

TARGET = """
-- KEYS: order; ARGV: epoch, entry
local standing = redis.call('GET', KEYS[1])
local read, order = pcall(cjson.decode, standing or '')
if read and type(order) == 'table' and type(order.epoch) == 'number' and
    order.epoch >= tonumber(ARGV[1]) then return standing end
redis.call('SET', KEYS[1], ARGV[2])
return ARGV[2]
"""
