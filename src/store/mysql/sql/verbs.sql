-- The verbs: one procedure for each operation of a store, and another one over a JSON array where
-- callers share a call. Most calls have one key, for which an array costs half as much again.
--
-- Each is one transaction, and its reply is complete when it has committed. The rows of an array
-- are locked in the order of the keys, in which the caller has them: two calls never wait for each
-- other, but for a sweep. After a deadlock (1213) or a wait for a lock that is too long (1205)
-- nothing is executed.

-- acquire: grants a key. A repeated call finds the grant of the first one (I8). Does nothing after
-- `expires_us`, in microseconds of the server's clock.
--
-- reply  one, or zero after that time; the time; granted, busy, pinned (by a transaction of the
--        application), recorded or expired; the fence; the time until the key may be free; zero;
--        and head and body of a record
CREATE PROCEDURE {p}_acquire(
  expires_us BIGINT, unless_recorded BOOL, k VARBINARY(1025), me VARBINARY(255), lease_us BIGINT
) {verb}
BEGIN
  DECLARE what VARCHAR(16);
  DECLARE f, left_us BIGINT;
  DECLARE t BIGINT DEFAULT {now};
  {rollback}
  {begin}
  IF t <= expires_us THEN
    CALL {p}_acquire_one(expires_us, unless_recorded, k, me, lease_us, what, f, left_us);
  END IF;
  {acquired}
  COMMIT;
END;;

-- acquire_many: the same for several keys that are different, without permits and records,
-- `[[key, id, lease_us], ..]`. A statement costs several times as much as one key, so that each has
-- all keys.
CREATE PROCEDURE {p}_acquire_many(
  expires_us BIGINT, unless_recorded BOOL, requests LONGTEXT CHARACTER SET utf8mb4
) {verb}
BEGIN
  DECLARE free, mine, granted TEXT;
  DECLARE t BIGINT DEFAULT {now};
  {rollback}
  {begin}
  IF t <= expires_us THEN
    -- Locks the rows of all keys.
    INSERT INTO {p}_locks SELECT r.k, NULL, 0, 0, 0, NULL FROM ({each}) r
      ON DUPLICATE KEY UPDATE until_us = {p}_locks.until_us;
    IF ROW_COUNT() > 0 THEN
      INSERT IGNORE INTO {p}_fences SELECT r.k, o.fence, NULL FROM ({each}) r JOIN {p}_floor o ORDER BY r.at_;
    END IF;
    SELECT GROUP_CONCAT(IF(l.until_us <= {now}, r.at_, NULL)), GROUP_CONCAT(IF(l.until_us > {now}, r.at_, NULL))
      INTO free, mine FROM ({each}) r STRAIGHT_JOIN {p}_locks l ON l.lock_key = r.k
      WHERE l.until_us <= {now} OR l.holder = r.me FOR UPDATE;
    SELECT GROUP_CONCAT(r.at_) INTO granted FROM ({each}) r STRAIGHT_JOIN {p}_fences f ON f.lock_key = r.k
      WHERE FIND_IN_SET(r.at_, free) FOR UPDATE SKIP LOCKED;
  END IF;
  -- After the waits for the rows.
  SET t = {now};
  IF t > expires_us THEN
    SELECT 0, t;
  ELSE
    -- The rows are there. An UPDATE of several tables takes three times as long.
    INSERT INTO {p}_fences SELECT r.k, t, r.me FROM ({each}) r WHERE FIND_IN_SET(r.at_, granted)
      ON DUPLICATE KEY UPDATE fence = GREATEST({p}_fences.fence + 1, t), holder = r.me;
    INSERT INTO {p}_locks SELECT r.k, r.me, f.fence, t, t + r.us, NULL
      FROM ({each}) r STRAIGHT_JOIN {p}_fences f ON f.lock_key = r.k WHERE FIND_IN_SET(r.at_, granted)
      ON DUPLICATE KEY UPDATE holder = r.me, fence = f.fence, since_us = t, until_us = t + r.us, revoked = NULL;
    IF mine IS NOT NULL THEN
      UPDATE ({each}) r STRAIGHT_JOIN {p}_locks l ON l.lock_key = r.k
        SET l.until_us = GREATEST(l.until_us, t + r.us) WHERE FIND_IN_SET(r.at_, mine);
    END IF;
    SELECT r.at_, t, IF(FIND_IN_SET(r.at_, CONCAT_WS(',', granted, mine)), 'granted', IF(FIND_IN_SET(r.at_, free),
        'pinned', 'busy')), l.fence, l.until_us - t, 0, NULL, NULL
      FROM ({each}) r STRAIGHT_JOIN {p}_locks l ON l.lock_key = r.k;
  END IF;
  COMMIT;
END;;

-- release: ends an acquisition: releases the key that it holds, and leaves a record if there is a
-- head. Changes nothing of others (I1). A blocked key has no holder, so that no delayed copy of a
-- renewal, an acquire or a release matches it (I10).
--
-- reply  one; freed, not holder, or recorded: an answer that the handler has left stands already
CREATE PROCEDURE {p}_release(
  k VARBINARY(1025), me VARBINARY(255), block_us BIGINT, new_head MEDIUMBLOB, new_body MEDIUMBLOB, keep_us BIGINT
) {verb}
BEGIN
  DECLARE h VARBINARY(255);
  DECLARE u, t, record BIGINT;
  DECLARE what VARCHAR(16) DEFAULT 'not holder';
  {rollback}
  {begin}
  SELECT holder, until_us INTO h, u FROM {p}_locks WHERE lock_key = k FOR UPDATE;
  SET t = {now};
  IF new_head IS NOT NULL THEN
    -- Waits for an open transaction that leaves an answer.
    SELECT until_us INTO record FROM {p}_records WHERE lock_key = k AND id = me AND until_us > t LOCK IN SHARE MODE;
  END IF;
  IF h <=> me AND u > t THEN
    IF new_head IS NOT NULL AND record IS NULL THEN
      REPLACE INTO {p}_records VALUES (k, me, new_head, new_body, t + keep_us);
    END IF;
    -- Not `until_us = t`: if the clock is set back, the key would be blocked for as long.
    UPDATE {p}_locks
      SET holder = NULL, since_us = t, until_us = IF(block_us = 0, 0, t + block_us), revoked = NULL WHERE lock_key = k;
    SET what = 'freed';
  ELSEIF record IS NOT NULL THEN
    SET what = 'recorded';
  ELSEIF h IS NULL AND u > t THEN
    DELETE FROM {p}_shares WHERE lock_key = k AND id = me AND until_us > t;
    IF ROW_COUNT() > 0 THEN
      INSERT INTO {p}_shares SELECT k, CONCAT(me, ':end'), t, t + block_us FROM {p}_floor WHERE block_us > 0;
      CALL {p}_end_places(k, t);
      SET what = 'freed';
    END IF;
  END IF;
  SELECT 1, what;
  COMMIT;
END;;

-- release_many: the same for several keys that are different, without permits and records,
-- `[[key, id, block_us], ..]`.
CREATE PROCEDURE {p}_release_many(
  requests LONGTEXT CHARACTER SET utf8mb4, new_head MEDIUMBLOB, new_body MEDIUMBLOB, keep_us BIGINT
) {verb}
BEGIN
  DECLARE t BIGINT;
  DECLARE freed TEXT;
  {rollback}
  {begin}
  SELECT GROUP_CONCAT(r.at_) INTO freed
    FROM ({each}) r STRAIGHT_JOIN {p}_locks l ON l.lock_key = r.k
    WHERE l.holder = r.me AND l.until_us > {now} FOR UPDATE;
  SET t = {now};
  INSERT INTO {p}_locks SELECT r.k, NULL, 0, t, 0, NULL FROM ({each}) r WHERE FIND_IN_SET(r.at_, freed)
    ON DUPLICATE KEY UPDATE holder = NULL, since_us = t, until_us = IF(r.us = 0, 0, t + r.us), revoked = NULL;
  SELECT r.at_, IF(FIND_IN_SET(r.at_, freed), 'freed', 'not holder') FROM ({each}) r;
  COMMIT;
END;;

-- redeem: grants a key to an acquisition in place of its holder, a ticket, unless a transaction of
-- the section before keeps the key. A repeated call finds the grant of the first one (I8).
--
-- reply  as of acquire: granted, busy or expired
CREATE PROCEDURE {p}_redeem(
  expires_us BIGINT, k VARBINARY(1025), me VARBINARY(255), lease_us BIGINT, ticket VARBINARY(255)
) {verb}
BEGIN
  DECLARE h VARBINARY(255);
  DECLARE what VARCHAR(16) DEFAULT 'busy';
  DECLARE f, u, now_us, left_us BIGINT;
  DECLARE t BIGINT DEFAULT {now};
  {rollback}
  {begin}
  IF t <= expires_us THEN
    SELECT holder, fence, until_us INTO h, f, u FROM {p}_locks WHERE lock_key = k FOR UPDATE;
    -- After the wait for the row.
    SET now_us = {now}, left_us = GREATEST(u - now_us, 0);
    IF now_us > expires_us THEN
      SET what = 'expired';
    ELSEIF left_us > 0 AND h <=> me THEN
      UPDATE {p}_locks SET until_us = GREATEST(until_us, now_us + lease_us) WHERE lock_key = k;
      SET what = 'granted';
    ELSEIF left_us > 0 AND h <=> ticket THEN
      CALL {p}_new_fence(k, me, now_us, f);
      IF f IS NOT NULL THEN
        UPDATE {p}_locks SET holder = me, fence = f, since_us = now_us, until_us = now_us + lease_us, revoked = NULL
          WHERE lock_key = k;
        SET what = 'granted';
      END IF;
    END IF;
  END IF;
  {acquired}
  COMMIT;
END;;

-- keep: ends an acquisition, and leaves its key to a ticket, under the same fence. A repeated call
-- finds the ticket. Changes nothing of other acquisitions (I1).
--
-- reply  one; freed or not holder
CREATE PROCEDURE {p}_keep(
  k VARBINARY(1025), me VARBINARY(255), lease_us BIGINT, ticket VARBINARY(255)
) {verb}
BEGIN
  DECLARE h VARBINARY(255);
  DECLARE u, t BIGINT;
  {rollback}
  {begin}
  SELECT holder, until_us INTO h, u FROM {p}_locks WHERE lock_key = k FOR UPDATE;
  SET t = {now};
  IF u > t AND h <=> me THEN
    UPDATE {p}_locks SET holder = ticket, until_us = t + lease_us WHERE lock_key = k;
  END IF;
  SELECT 1, IF(u > t AND h IN (me, ticket), 'freed', 'not holder');
  COMMIT;
END;;

-- renew, renew_many: extends each lease to at least a full one, if the acquisition holds its key. A
-- delayed renewal never shortens the lease that a later call has set.
--
-- reply  the positions of those that are extended; the others are not the holder
CREATE PROCEDURE {p}_renew(k VARBINARY(1025), me VARBINARY(255), lease_us BIGINT) {verb}
BEGIN
  CALL {p}_renew_many(JSON_ARRAY(JSON_ARRAY(CONVERT(k USING utf8mb4), CONVERT(me USING utf8mb4), lease_us)));
END;;

CREATE PROCEDURE {p}_renew_many(requests LONGTEXT CHARACTER SET utf8mb4) {verb}
BEGIN
  DECLARE t, count_ BIGINT;
  {rollback}
  {begin}
  SET t = {now};
  IF INSTR(requests, '/') > 0 THEN
    -- The rows of the keys first, as every verb. An UPDATE changes a row once, also if several
    -- permits of its key are extended.
    SELECT COUNT(*) INTO count_ FROM ({each}) r STRAIGHT_JOIN {p}_locks l ON l.lock_key = r.k FOR UPDATE;
    UPDATE ({each}) r STRAIGHT_JOIN {p}_shares s ON s.lock_key = r.k AND s.id = r.me
      SET s.until_us = GREATEST(s.until_us, t + r.us) WHERE s.until_us > t;
    UPDATE {p}_locks l JOIN (
      SELECT r.k, MAX(s.until_us) us FROM ({each}) r STRAIGHT_JOIN {p}_shares s ON s.lock_key = r.k AND s.id = r.me
        WHERE s.until_us > t GROUP BY r.k
    ) q ON l.lock_key = q.k SET l.until_us = GREATEST(l.until_us, q.us);
  END IF;
  UPDATE ({each}) r STRAIGHT_JOIN {p}_locks l ON l.lock_key = r.k
    SET l.until_us = GREATEST(l.until_us, t + r.us) WHERE l.holder = r.me AND l.until_us > t;
  SELECT r.at_ FROM ({each}) r
    LEFT JOIN {p}_locks l ON l.lock_key = r.k LEFT JOIN {p}_shares s ON s.lock_key = r.k AND s.id = r.me
    WHERE l.holder = r.me AND l.until_us >= t + r.us OR s.until_us >= t + r.us;
  COMMIT;
END;;

-- yield_key: holds the key for another full lease under a new fence, between two sections of one
-- process. A key that a transaction of the section before keeps is freed. If the key is not held
-- any more, acquires it for `next_me`.
--
-- reply  extended, or as acquire
CREATE PROCEDURE {p}_yield_key(
  expires_us BIGINT, unless_recorded BOOL, k VARBINARY(1025), me VARBINARY(255), my_fence BIGINT,
  next_me VARBINARY(255), lease_us BIGINT
) {verb}
BEGIN
  DECLARE h, r VARBINARY(255);
  DECLARE what VARCHAR(16);
  DECLARE f, u, left_us, now_us BIGINT;
  DECLARE t BIGINT DEFAULT {now};
  {rollback}
  {begin}
  IF t <= expires_us THEN
    CALL {p}_lock_row(k, h, f, u, r);
    SET now_us = {now};
    IF now_us <= expires_us AND h <=> me AND u > now_us THEN
      -- A copy of an executed yield finds another fence, under which a section may run.
      SET what = 'extended';
      IF f = my_fence THEN
        CALL {p}_new_fence(k, me, now_us, f);
        UPDATE {p}_locks
          SET holder = IF(f IS NULL, NULL, me), fence = IFNULL(f, fence), since_us = now_us,
            until_us = IF(f IS NULL, 0, now_us + lease_us)
          WHERE lock_key = k;
      END IF;
    END IF;
    IF what IS NULL OR f IS NULL THEN
      CALL {p}_acquire_one(expires_us, unless_recorded, k, next_me, lease_us, what, f, left_us);
    END IF;
  END IF;
  {acquired}
  COMMIT;
END;;

-- force_release: revokes the key from its holders, or from one of them, and blocks its place, so
-- that it can stop. A key that is only blocked becomes free, unless an earlier call blocked it.
--
-- reply  free, revoked or unblocked; the holders; the time that was left
CREATE PROCEDURE {p}_force_release(k VARBINARY(1025), block_us BIGINT, of_holder VARBINARY(255)) {verb}
BEGIN
  DECLARE h, r VARBINARY(255);
  DECLARE f, u, t BIGINT;
  DECLARE ids LONGTEXT CHARACTER SET utf8mb4;
  DECLARE what VARCHAR(16) DEFAULT 'free';
  {rollback}
  {begin}
  CALL {p}_lock_row(k, h, f, u, r);
  SET t = {now}, r = IFNULL(h, r);
  IF u > t AND h IS NULL AND EXISTS (SELECT 1 FROM {p}_shares WHERE lock_key = k AND until_us > t) THEN
    -- A delayed acquire may have repeated one that was revoked before.
    DELETE f FROM {p}_shares f JOIN {p}_shares s ON s.lock_key = k AND f.lock_key = k AND f.id = CONCAT(s.id, ':forced')
      WHERE IFNULL(s.id = of_holder, TRUE);
    UPDATE {p}_shares SET id = CONCAT(id, ':forced'), until_us = t + block_us
      WHERE lock_key = k AND until_us > t AND id NOT LIKE '%:end' AND id NOT LIKE '%:forced'
        AND IFNULL(id = of_holder, TRUE);
    -- Earlier calls may have revoked others.
    SELECT JSON_ARRAYAGG(CONVERT(LEFT(id, LENGTH(id) - 7) USING utf8mb4)) INTO ids FROM {p}_shares
      WHERE lock_key = k AND until_us >= t AND id LIKE '%:forced' AND IFNULL(id = CONCAT(of_holder, ':forced'), TRUE);
    IF ids IS NOT NULL THEN
      SET what = 'revoked';
    ELSEIF of_holder IS NULL THEN
      DELETE FROM {p}_shares WHERE lock_key = k;
      SET what = 'unblocked';
    END IF;
    CALL {p}_end_places(k, t);
  ELSEIF u > t AND (of_holder IS NULL OR r <=> of_holder) THEN
    IF h IS NOT NULL THEN
      -- The former holder may still run: it learns of it with its next renewal. Its later checks of
      -- the fence fail. An open transaction that has made one finishes, and then they fail after
      -- the next grant only.
      CALL {p}_new_fence(k, NULL, t, f);
      UPDATE {p}_locks SET holder = NULL, since_us = t, until_us = IF(block_us = 0, 0, t + block_us), revoked = h
        WHERE lock_key = k;
    ELSEIF r IS NULL THEN
      UPDATE {p}_locks SET since_us = t, until_us = 0 WHERE lock_key = k;
    END IF;
    SET what = IF(r IS NULL, 'unblocked', 'revoked'), ids = JSON_ARRAY(CONVERT(r USING utf8mb4));
  END IF;
  SELECT what AS reply, ids AS holders, GREATEST(u - t, 0) AS left_us;
  COMMIT;
END;;

-- delete_record: deletes the record of a key that has no holder.
--
-- reply  deleted, not found or busy
CREATE PROCEDURE {p}_delete_record(k VARBINARY(1025)) {verb}
BEGIN
  DECLARE is_held BOOL DEFAULT FALSE;
  {rollback}
  {begin}
  SELECT holder IS NOT NULL AND until_us > {now} INTO is_held FROM {p}_locks WHERE lock_key = k FOR UPDATE;
  DELETE FROM {p}_records WHERE lock_key = k AND until_us > {now} AND NOT is_held;
  SELECT IF(is_held, 'busy', IF(ROW_COUNT() > 0, 'deleted', 'not found'));
  COMMIT;
END;;

-- inspect: the status of a key.
--
-- reply  the key; holder, fence and time of its grant; the time until it may be free; zero; the
--        time that is left of its record; ids and times of its permits; and the reason why a key
--        that is free is not granted
CREATE PROCEDURE {p}_inspect(k VARBINARY(1025)) {verb}
BEGIN
  DECLARE t BIGINT DEFAULT {now};
  DECLARE is_idle, is_free BOOL DEFAULT FALSE;
  {rollback}
  {begin}
  -- Under the lock of the row: an acquire would take the lock of the fence for that of such a
  -- transaction.
  SELECT holder IS NULL OR until_us <= t INTO is_idle FROM {p}_locks WHERE lock_key = k FOR UPDATE;
  SELECT TRUE INTO is_free FROM {p}_fences WHERE is_idle AND lock_key = k FOR UPDATE SKIP LOCKED;
  SELECT {status}, IF(is_idle AND NOT is_free, 'an open transaction', NULL) FROM (SELECT k AS lock_key) q {live};
  COMMIT;
END;;

-- list_keys: the status of each key after this one that is held or blocked, up to a limit. Reads at
-- most `max_rows` rows, in the order of the keys. No key has waiters that are known.
--
-- reply  a row for each, as of inspect. Then, unless it was the last page, a row without a number
--        of waiters: the key after which the next page begins
CREATE PROCEDURE {p}_list_keys(after_key VARBINARY(1025), limit_to INT, max_rows INT, contended_only BOOL) {verb}
BEGIN
  DECLARE last_key, full_key VARBINARY(1025);
  DECLARE rows_read, listed, t BIGINT;
  SET t = {now};
  SELECT COUNT(*), MAX(lock_key) INTO rows_read, last_key FROM (
    SELECT lock_key FROM {p}_locks WHERE lock_key > after_key AND NOT contended_only ORDER BY lock_key LIMIT max_rows
  ) page;
  SELECT COUNT(*), MAX(lock_key) INTO listed, full_key FROM (
    SELECT lock_key FROM {p}_locks WHERE lock_key > after_key AND lock_key <= last_key AND until_us > t
      ORDER BY lock_key LIMIT limit_to
  ) live;
  SET last_key = IF(listed = limit_to, full_key, last_key);
  SELECT {status} FROM {p}_locks q {live} WHERE q.lock_key > after_key AND q.lock_key <= last_key AND l.until_us > t
    UNION ALL SELECT last_key, NULL, 0, 0, 0, NULL, NULL, NULL, NULL FROM {p}_floor
      WHERE rows_read = max_rows OR listed = limit_to
    ORDER BY 1, 6 DESC;
END;;

-- sweep: deletes rows that are free for a minute, and expired records. Reads at most `max_rows`
-- rows of each, from this key on, and waits for no row of a key: it skips those that a call has
-- locked, or a transaction of the application. The floor of the fences rises in the same
-- transaction.
--
-- reply  the key after which the next call continues, or NULL; and the number of records
CREATE PROCEDURE {p}_sweep(after_key VARBINARY(1025), max_rows INT) {verb}
BEGIN
  DECLARE last_key VARBINARY(1025);
  DECLARE free LONGTEXT CHARACTER SET utf8mb4;
  DECLARE t, top, rows_read BIGINT;
  {rollback}
  {begin}
  SET t = {now};
  SELECT COUNT(*), MAX(lock_key) INTO rows_read, last_key FROM (
    SELECT lock_key FROM {p}_locks WHERE lock_key > after_key ORDER BY lock_key LIMIT max_rows
  ) page;
  SELECT JSON_ARRAYAGG(CONVERT(l.lock_key USING utf8mb4)), MAX(f.fence) INTO free, top
    FROM {p}_locks l STRAIGHT_JOIN {p}_fences f ON f.lock_key = l.lock_key
    WHERE l.lock_key > after_key AND l.lock_key <= last_key AND GREATEST(l.since_us, l.until_us) < t - 60000000
    FOR UPDATE SKIP LOCKED;
  DELETE l, f, s
    FROM JSON_TABLE(free, '$[*]' COLUMNS (k VARCHAR(1025) CHARACTER SET utf8mb4 PATH '$')) q
    STRAIGHT_JOIN {p}_locks l ON l.lock_key = CAST(q.k AS BINARY) STRAIGHT_JOIN {p}_fences f ON f.lock_key = l.lock_key
    LEFT JOIN {p}_shares s ON s.lock_key = l.lock_key;
  UPDATE {p}_floor SET fence = top WHERE fence < top;
  DELETE r FROM (SELECT lock_key FROM {p}_records WHERE until_us <= t LIMIT max_rows FOR UPDATE SKIP LOCKED) q
    STRAIGHT_JOIN {p}_records r ON r.lock_key = q.lock_key;
  SELECT IF(rows_read < max_rows, NULL, last_key), ROW_COUNT();
  COMMIT;
END;;

-- self_test: writes nothing, with each right that the verbs need, on a server that accepts writes.
--
-- reply  the id of the tables
CREATE PROCEDURE {p}_self_test() {verb}
BEGIN
  {rollback}
  {begin}
  INSERT INTO {p}_locks SELECT * FROM {p}_locks WHERE FALSE;
  INSERT INTO {p}_fences SELECT * FROM {p}_fences WHERE FALSE;
  INSERT INTO {p}_shares SELECT * FROM {p}_shares WHERE FALSE;
  REPLACE INTO {p}_records SELECT * FROM {p}_records WHERE FALSE;
  UPDATE {p}_locks, {p}_fences, {p}_shares, {p}_floor
    SET {p}_locks.fence = 0, {p}_fences.fence = 0, {p}_shares.until_us = 0, {p}_floor.fence = 0 WHERE FALSE;
  DELETE l, f, s, r FROM {p}_locks l JOIN {p}_fences f JOIN {p}_shares s JOIN {p}_records r WHERE FALSE;
  COMMIT;
  SELECT id FROM {p}_floor;
END;;
