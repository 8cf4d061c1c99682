-- The rules of one key, which the verbs share. Each is executed while its transaction has locked
-- the row of the key, unless it says otherwise.
--
-- Each statement sees the commits before it (READ COMMITTED), and has its own time.

-- lock_row: waits until no other call changes the key, and returns its row. A key without a row
-- gets one.
CREATE PROCEDURE {p}_lock_row(
  k VARBINARY(1025), OUT h VARBINARY(255), OUT f BIGINT, OUT u BIGINT, OUT r VARBINARY(255)
) {verb}
BEGIN
  SET f = NULL;
  SELECT holder, fence, until_us, revoked INTO h, f, u, r FROM {p}_locks WHERE lock_key = k FOR UPDATE;
  IF f IS NULL THEN
    -- `ON DUPLICATE KEY` locks the row of another call, once that has committed. `IGNORE` would
    -- share the lock, and two calls that share it wait for each other.
    INSERT INTO {p}_locks VALUES (k, NULL, 0, 0, 0, NULL) ON DUPLICATE KEY UPDATE lock_key = k;
    INSERT IGNORE INTO {p}_fences SELECT k, fence, NULL FROM {p}_floor;
    SELECT holder, fence, until_us, revoked INTO h, f, u, r FROM {p}_locks WHERE lock_key = k FOR UPDATE;
  END IF;
END;;

-- new_fence: the fence of the next grant of a free key, for this holder. NULL: a transaction of the
-- application keeps the key. Otherwise the row of the fence is locked, also for such transactions.
-- Never waits.
--
-- The fence is larger than the last one of the key, and at least the clock.
CREATE PROCEDURE {p}_new_fence(k VARBINARY(1025), me VARBINARY(255), t BIGINT, OUT f BIGINT) {verb}
BEGIN
  SET f = NULL;
  SELECT GREATEST(fence + 1, t) INTO f FROM {p}_fences WHERE lock_key = k FOR UPDATE SKIP LOCKED;
  UPDATE {p}_fences SET fence = f, holder = me WHERE lock_key = k AND f IS NOT NULL;
END;;

-- acquire_one: grants a key, or says why not, and the time until it may be free. Not under the lock
-- of the row: it takes it, but for a key that is busy.
CREATE PROCEDURE {p}_acquire_one(
  expires_us BIGINT, unless_recorded BOOL, k VARBINARY(1025), me VARBINARY(255), lease_us BIGINT,
  OUT what VARCHAR(16), OUT f BIGINT, OUT left_us BIGINT
) {verb}
one: BEGIN
  DECLARE h, r VARBINARY(255);
  DECLARE u, t, mine, places, first_us, record BIGINT;
  -- How many may hold the key together with this acquisition, itself included.
  DECLARE max_holders INT DEFAULT
    IF(INSTR(me, '/') > 0 AND CONVERT(me USING utf8mb4) REGEXP '/[0-9]+$', SUBSTRING_INDEX(me, '/', -1), 1);
  SET t = {now}, f = NULL, left_us = NULL;
  IF unless_recorded THEN
    -- Not `EXISTS`, which waits for an open transaction that leaves an answer.
    SELECT until_us INTO record FROM {p}_records WHERE lock_key = k AND until_us > t;
  END IF;
  IF record > t THEN
    -- A repeated call may hold the key.
    UPDATE {p}_locks SET holder = NULL, since_us = t, until_us = 0 WHERE lock_key = k AND holder = me AND until_us > t;
    SET what = 'recorded';
    LEAVE one;
  END IF;
  -- Most calls that find the key busy write nothing, and wait for no other call.
  SELECT holder, until_us INTO h, u FROM {p}_locks WHERE lock_key = k;
  IF u > t AND NOT h <=> me THEN
    SELECT COUNT(*), MIN(until_us), SUM(id = me) INTO places, first_us, mine
      FROM {p}_shares WHERE lock_key = k AND until_us > t;
    IF places >= max_holders AND mine = 0 OR places = 0 THEN
      -- The end of the last place, for the whole key.
      SET what = 'busy', left_us = IF(max_holders = 1, u, IFNULL(first_us, u)) - t;
      LEAVE one;
    END IF;
  END IF;
  CALL {p}_lock_row(k, h, f, u, r);
  -- After the wait for the row: a lease that counts from before is too short.
  SET t = {now};
  IF t > expires_us THEN
    SET what = 'expired';
  ELSEIF u > t AND h <=> me THEN
    -- A repeated call. A delayed copy never shortens the lease.
    UPDATE {p}_locks SET until_us = GREATEST(until_us, t + lease_us) WHERE lock_key = k;
    SET what = 'granted';
  ELSEIF u > t AND (max_holders = 1 OR h IS NOT NULL) THEN
    SET what = 'busy', left_us = u - t;
  ELSEIF u <= t THEN
    CALL {p}_new_fence(k, IF(max_holders = 1, me, NULL), t, f);
    IF f IS NULL THEN
      SET what = 'pinned';
    ELSEIF unless_recorded AND EXISTS (SELECT 1 FROM {p}_records WHERE lock_key = k AND until_us > t) THEN
      -- Left by a transaction of the application that had pinned the key until now, or by a release
      -- that this call has waited for.
      SET what = 'recorded';
    ELSE
      UPDATE {p}_locks
        SET holder = IF(max_holders = 1, me, NULL), fence = f, since_us = t, until_us = t + lease_us, revoked = NULL
        WHERE lock_key = k;
      IF max_holders > 1 THEN
        -- Places that have ended may be left.
        DELETE FROM {p}_shares WHERE lock_key = k;
        INSERT INTO {p}_shares VALUES (k, me, t, t + lease_us);
      END IF;
      SET what = 'granted';
    END IF;
  ELSE
    DELETE FROM {p}_shares WHERE lock_key = k AND until_us <= t;
    SELECT COUNT(*), MIN(until_us), SUM(id = me) INTO places, first_us, mine FROM {p}_shares WHERE lock_key = k;
    -- Without a place and before its end, the key is blocked as a whole.
    IF mine > 0 OR places > 0 AND places < max_holders THEN
      INSERT INTO {p}_shares VALUES (k, me, t, t + lease_us)
        ON DUPLICATE KEY UPDATE until_us = GREATEST(until_us, t + lease_us);
      UPDATE {p}_locks SET until_us = GREATEST(until_us, t + lease_us) WHERE lock_key = k;
      SET what = 'granted';
    ELSE
      SET what = 'busy', left_us = IFNULL(first_us, u) - t;
    END IF;
  END IF;
END;;

-- end_places: the key ends with the last of its places, and is free without one.
CREATE PROCEDURE {p}_end_places(k VARBINARY(1025), t BIGINT) {verb}
BEGIN
  DECLARE u BIGINT;
  SELECT MAX(until_us) INTO u FROM {p}_shares WHERE lock_key = k AND until_us > t;
  UPDATE {p}_locks SET since_us = t, until_us = IFNULL(u, 0) WHERE lock_key = k;
END;;
