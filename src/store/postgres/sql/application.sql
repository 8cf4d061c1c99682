-- The functions that a transaction of the application calls. They have the rights of their owner
-- (SECURITY DEFINER): the user of the application needs no right on a table, and can neither free
-- nor extend a lock.
--
-- A fencing token is the fence of its grant, and ten bits for the number of the section. The fence
-- is a clock, and can be guessed. The id of the holder has a random part, and cannot.

-- pin: keeps the key of this holder for the transaction that calls it. Until the transaction ends,
-- no other acquisition is granted the key, although the lease may have expired. Fails if another
-- one was granted the key, or if the lock was released or revoked.
--
-- `FOR KEY SHARE` waits for a grant, and then reads the row again. Renewals and releases pass it.
-- With an isolation level above READ COMMITTED the call also fails if the row has changed since the
-- snapshot of the transaction (40001): a retry of the transaction has a new snapshot.
CREATE OR REPLACE FUNCTION {schema}.pin(lock_key text, token bigint, held_by text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM {schema}.locks
    WHERE key = lock_key AND fence = token >> 10 AND holder = held_by FOR KEY SHARE;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'the lock with this fencing token is not held any more'
      USING ERRCODE = 'TL001', DETAIL = format('Key %s, fencing token %s.', quote_literal(lock_key), token),
        HINT = 'Roll back: another holder may have written meanwhile. If each call fails: the lock is one of another '
          'store or schema, or key, token or acquisition id are not those of the lock.';
  END IF;
END
$$;

-- check_fence: as pin. Returns true: some drivers have no type for a function without a value.
CREATE OR REPLACE FUNCTION {schema}.check_fence(lock_key text, token bigint, held_by text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM {schema}.pin(lock_key, token, held_by);
  RETURN true;
END
$$;

-- leave_answer: as pin, and leaves an answer as the record of the key. If the transaction commits,
-- every retry gets the answer. Returns true.
--
-- answer   the length of its head in four bytes, the head, the body
CREATE OR REPLACE FUNCTION {schema}.leave_answer(
  lock_key text, token bigint, held_by text, answer bytea, keep_ms bigint
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  head_bytes int := ('x' || encode(substring(answer FROM 1 FOR 4), 'hex'))::bit(32)::int;
BEGIN
  PERFORM {schema}.pin(lock_key, token, held_by);
  -- Of `Once`, an answer has less. A longer one would fail each later call of the key.
  IF octet_length(answer) > 2097152 THEN
    RAISE EXCEPTION 'the answer has % bytes, more than 2 MiB', octet_length(answer) USING ERRCODE = '22001';
  END IF;
  INSERT INTO {schema}.records (key, id, head, body, until)
    VALUES (
      lock_key, held_by, substring(answer FROM 5 FOR head_bytes), substring(answer FROM 5 + head_bytes),
      {schema}.after(clock_timestamp(), keep_ms)
    )
    ON CONFLICT (key) DO UPDATE
      SET id = excluded.id, head = excluded.head, body = excluded.body, until = excluded.until;
  RETURN true;
END
$$;

-- Every user may execute a new function. One who may read the tables, and no more, must not leave
-- an answer for a lock of another.
FOR own IN
  SELECT f.oid::pg_catalog.regprocedure FROM pg_catalog.pg_proc f
    WHERE f.pronamespace = pg_catalog.to_regnamespace('{schema}') AND f.proname IN ({names})
LOOP
  EXECUTE pg_catalog.format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', own);
END LOOP;
