-- The procedures that a transaction of the application calls. They have the rights of their owner
-- (SQL SECURITY DEFINER): the user of the application needs no right on a table, and can neither
-- free nor extend a lock.
--
-- A fencing token is the fence of its grant, and ten bits for the number of the section. The fence
-- is a clock, and can be guessed. The id of the holder has a random part, and cannot.

-- check_fence: keeps the key of this holder for the transaction that calls it. Until the
-- transaction ends, no other acquisition is granted the key, although the lease may have expired.
-- Fails if another one was granted the key, or if the lock was revoked while no transaction kept
-- the key.
--
-- The shared lock waits for a grant, and then reads the row again. Renewals and releases pass it.
-- With REPEATABLE READ, which is the default, a transaction whose snapshot is older than the grant
-- would pass, and then read old rows: the snapshot is compared.
CREATE PROCEDURE {p}_check_fence(
  lock_name VARCHAR(1025) CHARACTER SET utf8mb4, token BIGINT, held_by VARCHAR(255) CHARACTER SET utf8mb4
) SQL SECURITY DEFINER COMMENT '{version}'
BEGIN
  DECLARE k VARBINARY(1025) DEFAULT CAST(lock_name AS BINARY);
  DECLARE h VARBINARY(255);
  DECLARE f, seen BIGINT;
  DECLARE EXIT HANDLER FOR 1305 SIGNAL SQLSTATE '45000'
    SET MESSAGE_TEXT = 'tower-lock: no transaction is open, so that this check keeps nothing: begin one';
  -- Without a lock: a wrong id keeps nothing. (SERIALIZABLE locks also here.)
  SELECT fence, holder INTO seen, h FROM {p}_fences WHERE lock_key = k;
  IF seen < token >> 10 THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT =
      'tower-lock: this transaction is older than its lock: roll back, and begin it under the lock';
  ELSEIF seen = token >> 10 AND h = CAST(held_by AS BINARY) THEN
    SELECT fence INTO f FROM {p}_fences WHERE lock_key = k AND fence = seen AND holder = h LOCK IN SHARE MODE;
  END IF;
  IF f IS NULL THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT =
      'tower-lock: the lock is not held any more: roll back (or it is newer than this transaction, or key, token or id is wrong)';
  END IF;
  -- Without a transaction, each statement is one: the savepoint has ended.
  SAVEPOINT {p}_check;
  RELEASE SAVEPOINT {p}_check;
END;;

-- leave_answer: as check_fence, and leaves an answer as the record of the key. If the transaction
-- commits, every retry gets the answer. It is made last: its comment says that all others are
-- there.
--
-- answer   the length of its head in four bytes, the head, the body
CREATE PROCEDURE {p}_leave_answer(
  lock_name VARCHAR(1025) CHARACTER SET utf8mb4, token BIGINT, held_by VARCHAR(255) CHARACTER SET utf8mb4,
  answer LONGBLOB, keep_ms BIGINT
) SQL SECURITY DEFINER COMMENT '{procedures}'
BEGIN
  DECLARE head_bytes INT DEFAULT CONV(HEX(SUBSTRING(answer, 1, 4)), 16, 10);
  CALL {p}_check_fence(lock_name, token, held_by);
  -- Of `Once`, an answer has less. A longer one would fail each later call of the key.
  IF LENGTH(answer) > 2097152 THEN
    SIGNAL SQLSTATE '22001' SET MESSAGE_TEXT = 'tower-lock: the answer has more than 2 MiB';
  END IF;
  REPLACE INTO {p}_records VALUES (
    CAST(lock_name AS BINARY), CAST(held_by AS BINARY),
    SUBSTRING(answer, 5, head_bytes), SUBSTRING(answer, 5 + head_bytes), {now} + keep_ms * 1000
  );
END;;
