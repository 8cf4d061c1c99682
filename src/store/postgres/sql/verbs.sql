-- The verbs: one function for each operation of a store, over arrays where callers share a call.
--
-- The rows of a call are locked in the order of the keys: two calls never wait for each other.
--
-- Of the settings, `lock_timeout` is a net: without it, a transaction that locks a row for longer
-- would stop all calls of a connection. A plan that was made while a table was small must not read
-- all of it later: `enable_seqscan`. Each statement reads a few rows: to compile it (`jit`) takes
-- longer, and to plan it for the values of each call (`plan_cache_mode`) takes several times as
-- long. A user with functions in `public` must not replace those that a verb calls: `search_path`.
--
-- Verbs that write need READ COMMITTED. With another isolation level they would read an older
-- snapshot, without the record or the waiter of the transaction that they have waited for. A
-- session of a pooler has the settings of the clients that used it before.

-- acquire: grants keys, or enqueues. A repeated call finds the grants or the queue entries of the
-- first one (I8). Does nothing after `expires_us`, in microseconds of the server's clock.
--
-- The keys of a call are different, and a call `unless_recorded` has one key. Most keys are free,
-- without waiters: they are granted together, because a statement costs several times as much as
-- one key. What is left has the steps of acquire_one, and its rows are locked by then: those steps
-- never wait out of the order of the keys. Each step is a statement of its own, so that it sees the
-- commits before the locks of the step before it.
--
-- reply  a row for each request, with its position from 1, and the time: as of acquire_one.
--        One row with position 0, and the time: the call has expired.
CREATE OR REPLACE FUNCTION {schema}.acquire(
  expires_us bigint, offer_ms bigint, entry_ms bigint, capacity bigint, unless_recorded boolean,
  keys text[], ids text[], leases_ms bigint[], may_wait boolean[], traces text[]
) RETURNS TABLE (
  n bigint, now_us bigint,
  what text, fence bigint, left_us bigint, waiting bigint, head bytea, body bytea, trace text
)
LANGUAGE plpgsql {settings} AS $$
DECLARE
  request record;
  t timestamptz;
  free_keys text[];
  replied bigint[] := ARRAY[]::bigint[];
  granted bigint;
BEGIN
  {read_committed}
  n := 0;
  now_us := {schema}.us(clock_timestamp());
  IF now_us > expires_us THEN
    RETURN NEXT;
    RETURN;
  END IF;
  IF unless_recorded
    AND EXISTS (SELECT FROM {schema}.records r WHERE r.key = keys[1] AND r.until > clock_timestamp())
  THEN
    -- A retry of a request that has left its record writes nothing.
    NULL;
  ELSIF cardinality(keys) > 1 THEN
    IF false = ANY (may_wait) THEN
      -- They write nothing, and wait for no other call.
      what := 'busy';
      FOR n, left_us, trace IN
        SELECT r.at, {schema}.us(l.until) - now_us, CASE WHEN l.holder IS NOT NULL THEN l.trace END
          FROM unnest(keys, ids, may_wait) WITH ORDINALITY AS r (key, id, waits, at)
          JOIN {schema}.locks l ON l.key = r.key
          WHERE NOT r.waits AND l.until > clock_timestamp() AND l.holder IS DISTINCT FROM r.id
            AND right(r.id, 2) <> '/1'
      LOOP
        replied := replied || n;
        RETURN NEXT;
      END LOOP;
    END IF;
    -- Of a row that exists, the update is refused, and its lock remains: as of lock_row.
    INSERT INTO {schema}.locks AS l (key, fence, until)
      SELECT r.key, 0, 'epoch' FROM unnest(keys) WITH ORDINALITY AS r (key, at)
        WHERE r.at <> ALL (replied)
        ORDER BY r.key COLLATE "C"
      ON CONFLICT (key) DO UPDATE SET until = l.until WHERE false;
    -- As of is_pinned.
    SELECT array_agg(free.key) INTO free_keys FROM (
      SELECT l.key FROM {schema}.locks l
        WHERE l.key = ANY (keys) AND l.until <= clock_timestamp() FOR UPDATE SKIP LOCKED
    ) free;
    t := clock_timestamp();
    IF {schema}.us(t) <= expires_us THEN
      -- As of grant_key.
      RETURN QUERY
        UPDATE {schema}.locks l SET
            holder = r.id, since = t, until = {schema}.after(t, r.lease_ms), revoked = NULL,
            fence = {next_fence}, trace = r.trace
          FROM unnest(keys, ids, leases_ms, traces) WITH ORDINALITY AS r (key, id, lease_ms, trace, at)
          WHERE l.key = r.key AND r.key = ANY (free_keys) AND r.at <> ALL (replied)
            AND NOT EXISTS (SELECT FROM {schema}.waiters w WHERE w.key = r.key)
          RETURNING r.at, now_us, 'granted', l.fence, NULL::bigint, NULL::bigint, NULL::bytea, NULL::bytea, NULL;
      GET DIAGNOSTICS granted = ROW_COUNT;
      IF granted = cardinality(keys) THEN
        RETURN;
      ELSIF granted > 0 THEN
        SELECT replied || array_agg(r.at) INTO replied
          FROM unnest(keys, ids) WITH ORDINALITY AS r (key, id, at)
          JOIN {schema}.locks l ON l.key = r.key AND l.holder = r.id AND l.since = t;
      END IF;
    END IF;
  ELSIF {schema}.limit_of(ids[1]) = 1 THEN
    -- The same for one key, in cheaper statements.
    PERFORM FROM {schema}.locks l WHERE l.key = keys[1] AND l.until <= clock_timestamp() FOR UPDATE SKIP LOCKED;
    IF NOT FOUND AND NOT EXISTS (SELECT FROM {schema}.locks l WHERE l.key = keys[1]) THEN
      -- Of a row that exists, it would wait for a call that changes the row.
      INSERT INTO {schema}.locks (key, fence, until) VALUES (keys[1], 0, 'epoch') ON CONFLICT DO NOTHING;
    END IF;
    IF FOUND THEN
      t := clock_timestamp();
      UPDATE {schema}.locks l SET
          holder = ids[1], since = t, until = {schema}.after(t, leases_ms[1]), revoked = NULL,
          fence = {next_fence}, trace = traces[1]
        WHERE l.key = keys[1] AND {schema}.us(t) <= expires_us
          AND NOT EXISTS (SELECT FROM {schema}.waiters w WHERE w.key = keys[1])
          AND NOT (unless_recorded AND EXISTS (
            SELECT FROM {schema}.records r WHERE r.key = keys[1] AND r.until > t
          ))
        RETURNING 1, 'granted', l.fence INTO n, what, fence;
    ELSIF NOT unless_recorded AND may_wait[1] AND right(ids[1], 2) <> '/1' THEN
      -- An accepted offer, as of acquire_one.
      SELECT l.trace INTO trace FROM {schema}.locks l
        WHERE l.key = keys[1] AND l.holder = ids[1] FOR NO KEY UPDATE;
      IF FOUND THEN
        t := clock_timestamp();
        UPDATE {schema}.locks l SET until = greatest(l.until, {schema}.after(t, leases_ms[1])), trace = traces[1]
          WHERE l.key = keys[1] AND l.holder = ids[1] AND l.until > t AND {schema}.us(t) <= expires_us
          RETURNING 1, 'granted', l.fence INTO n, what, fence;
      END IF;
    END IF;
    IF what IS NOT NULL THEN
      RETURN NEXT;
      RETURN;
    END IF;
  END IF;
  IF cardinality(replied) < cardinality(keys) THEN
    FOR request IN
      SELECT * FROM unnest(keys, ids, leases_ms, may_wait, traces)
          WITH ORDINALITY AS r (key, id, lease_ms, waits, trace, at)
        WHERE r.at <> ALL (replied)
        ORDER BY r.key COLLATE "C"
    LOOP
      SELECT one.* INTO what, fence, left_us, waiting, head, body, trace FROM {schema}.acquire_one(
        request.key, request.id, request.lease_ms, request.waits, unless_recorded,
        offer_ms, entry_ms, capacity, expires_us, request.trace
      ) one;
      n := request.at;
      granted := coalesce(granted, 0) + (what = 'granted')::int;
      RETURN NEXT;
    END LOOP;
  END IF;
  -- A queue entry that a crash of the server loses is written again by the next poll of its waiter:
  -- the commit need not wait for the disk.
  IF granted = 0 THEN
    PERFORM set_config('synchronous_commit', 'off', true);
  END IF;
END
$$;

-- release: ends acquisitions: releases the key that each holds, or removes its queue entry. Changes
-- nothing of other acquisitions (I1). A blocked key has no holder, so that no delayed copy of a
-- renewal, an acquire or a release matches it (I10). The keys of a call are different. Most have no
-- waiters, and are freed together.
--
-- reply  a row for each request, with its position from 1: freed, offered, not holder, or recorded
--        (the record stands already)
CREATE OR REPLACE FUNCTION {schema}.release(
  offer_ms bigint, keys text[], ids text[], blocks_ms bigint[], traces text[],
  record_head bytea, record_body bytea, keep_ms bigint
) RETURNS TABLE (n bigint, what text)
LANGUAGE plpgsql {settings} AS $$
DECLARE
  request record;
  lock {schema}.locks;
  t timestamptz;
  replied bigint[] := ARRAY[]::bigint[];
  freed bigint;
BEGIN
  {read_committed}
  -- A release that a crash of the server loses leaves the key locked until its lease expires. It is
  -- never free twice, so that its commit need not wait for the disk. A record and a block are
  -- promises.
  IF record_head IS NULL AND 0 = ALL (blocks_ms) THEN
    PERFORM set_config('synchronous_commit', 'off', true);
    IF cardinality(keys) > 1 THEN
      -- As of acquire.
      INSERT INTO {schema}.locks AS l (key, fence, until)
        SELECT r.key, 0, 'epoch' FROM unnest(keys) AS r (key) ORDER BY r.key COLLATE "C"
        ON CONFLICT (key) DO UPDATE SET until = l.until WHERE false;
      t := clock_timestamp();
      -- As of end_hold.
      RETURN QUERY
        UPDATE {schema}.locks l SET holder = NULL, since = t, until = 'epoch', revoked = NULL
          FROM unnest(keys, ids) WITH ORDINALITY AS r (key, id, at)
          WHERE l.key = r.key AND l.holder = r.id AND l.until > t
            AND NOT EXISTS (SELECT FROM {schema}.waiters w WHERE w.key = r.key)
          RETURNING r.at, 'freed';
      GET DIAGNOSTICS freed = ROW_COUNT;
      IF freed = cardinality(keys) THEN
        RETURN;
      ELSIF freed > 0 THEN
        SELECT array_agg(r.at) INTO replied
          FROM unnest(keys) WITH ORDINALITY AS r (key, at)
          JOIN {schema}.locks l ON l.key = r.key AND l.since = t AND l.until = 'epoch'
            AND l.xmin = pg_current_xact_id()::xid;
      END IF;
    ELSE
      -- A tenth of the time of the same for several.
      PERFORM FROM {schema}.locks l WHERE l.key = keys[1] AND l.holder = ids[1] FOR NO KEY UPDATE;
      t := clock_timestamp();
      UPDATE {schema}.locks l SET holder = NULL, since = t, until = 'epoch', revoked = NULL
        WHERE l.key = keys[1] AND l.holder = ids[1] AND l.until > t
          AND NOT EXISTS (SELECT FROM {schema}.waiters w WHERE w.key = keys[1])
        RETURNING 1, 'freed' INTO n, what;
      IF FOUND THEN
        RETURN NEXT;
        RETURN;
      END IF;
    END IF;
  END IF;
  FOR request IN
    SELECT * FROM unnest(keys, ids, blocks_ms, traces) WITH ORDINALITY AS r (key, id, block_ms, trace, at)
    WHERE r.at <> ALL (replied)
    ORDER BY r.key COLLATE "C"
  LOOP
    lock := {schema}.lock_row(request.key);
    t := clock_timestamp();
    n := request.at;
    IF {schema}.limit_of(request.id) > 1 THEN
      what := {schema}.end_share(request.key, request.id, t, request.block_ms, offer_ms);
    ELSIF lock.holder IS DISTINCT FROM request.id OR lock.until <= t THEN
      DELETE FROM {schema}.waiters w WHERE w.key = request.key AND w.id = request.id;
      -- Others may fit beside the holders of a shared key.
      IF lock.holder IS NULL AND lock.until > t AND EXISTS (
        SELECT FROM {schema}.waiters w WHERE w.key = request.key AND w.since IS NOT NULL AND w.until > t
      ) THEN
        PERFORM {schema}.serve_shares(request.key, t, offer_ms);
      END IF;
      what := 'not holder';
      IF record_head IS NOT NULL AND EXISTS (
        SELECT FROM {schema}.records r WHERE r.key = request.key AND r.id = request.id AND r.until > t
      ) THEN
        what := 'recorded';
      END IF;
    ELSE
      IF record_head IS NOT NULL THEN
        INSERT INTO {schema}.records AS r (key, id, head, body, until)
          VALUES (request.key, request.id, record_head, record_body, {schema}.after(t, keep_ms))
          -- An answer that the handler has left in its transaction stays.
          ON CONFLICT (key) DO UPDATE
            SET id = excluded.id, head = excluded.head, body = excluded.body, until = excluded.until
            WHERE r.id <> excluded.id OR r.until <= t;
      END IF;
      what := 'freed';
      IF request.block_ms > 0 THEN
        UPDATE {schema}.locks l SET holder = NULL, until = {schema}.after(t, request.block_ms), revoked = NULL
          WHERE l.key = request.key;
      ELSIF {schema}.end_hold(request.key, t, offer_ms, request.trace) THEN
        what := 'offered';
      END IF;
    END IF;
    RETURN NEXT;
  END LOOP;
END
$$;

-- redeem: grants a key to an acquisition in place of its holder, a ticket, unless a transaction of
-- the section before pins the key. A repeated call finds the grant of the first one (I8). No call
-- enqueues, or makes a row.
--
-- reply  as of acquire: granted, busy or expired
CREATE OR REPLACE FUNCTION {schema}.redeem(
  expires_us bigint, of_key text, me text, lease_ms bigint, ticket text, my_trace text
) RETURNS TABLE (
  n bigint, now_us bigint,
  what text, fence bigint, left_us bigint, waiting bigint, head bytea, body bytea, trace text
)
LANGUAGE plpgsql {settings} AS $$
DECLARE
  lock {schema}.locks;
  t timestamptz;
BEGIN
  {read_committed}
  n := 0;
  now_us := {schema}.us(clock_timestamp());
  IF now_us > expires_us THEN
    RETURN NEXT;
    RETURN;
  END IF;
  n := 1;
  SELECT * INTO lock FROM {schema}.locks l WHERE l.key = of_key FOR NO KEY UPDATE;
  t := clock_timestamp();
  what := 'busy';
  left_us := greatest(0, {schema}.us(lock.until) - {schema}.us(t));
  IF {schema}.us(t) > expires_us THEN
    what := 'expired';
  ELSIF lock.until > t AND lock.holder = me THEN
    UPDATE {schema}.locks l SET until = greatest(l.until, {schema}.after(t, lease_ms)) WHERE l.key = of_key;
    what := 'granted';
    fence := lock.fence;
  ELSIF lock.until > t AND lock.holder = ticket AND NOT {schema}.is_pinned(of_key) THEN
    what := 'granted';
    fence := {schema}.grant_key(of_key, me, t, lease_ms, my_trace);
  END IF;
  RETURN NEXT;
END
$$;

-- keep: ends an acquisition, and leaves its key to a ticket, under the same fence. A repeated call
-- finds the ticket. Changes nothing of other acquisitions (I1).
--
-- reply  as of release: freed or not holder
CREATE OR REPLACE FUNCTION {schema}.keep(of_key text, me text, lease_ms bigint, ticket text)
RETURNS TABLE (n bigint, what text)
LANGUAGE plpgsql {settings} AS $$
DECLARE
  lock {schema}.locks;
  t timestamptz;
BEGIN
  {read_committed}
  SELECT * INTO lock FROM {schema}.locks l WHERE l.key = of_key FOR NO KEY UPDATE;
  t := clock_timestamp();
  n := 1;
  what := CASE WHEN lock.until > t AND lock.holder IN (me, ticket) THEN 'freed' ELSE 'not holder' END;
  IF lock.until > t AND lock.holder = me THEN
    UPDATE {schema}.locks l SET holder = ticket, until = {schema}.after(t, lease_ms) WHERE l.key = of_key;
  ELSE
    DELETE FROM {schema}.waiters w WHERE w.key = of_key AND w.id = me;
  END IF;
  RETURN NEXT;
END
$$;

-- renew: extends each lease to at least a full one, if the acquisition holds its key. A delayed
-- renewal never shortens the lease that a later call has set.
--
-- reply  the positions, from 1, of those that are extended, negative if a newer acquisition waits;
--        the others are not the holder
CREATE OR REPLACE FUNCTION {schema}.renew(keys text[], ids text[], leases_ms bigint[]) RETURNS SETOF bigint
LANGUAGE plpgsql {settings} AS $$
DECLARE
  t timestamptz;
BEGIN
  PERFORM FROM {schema}.locks l WHERE l.key = ANY (keys) ORDER BY l.key FOR NO KEY UPDATE;
  t := clock_timestamp();
  RETURN QUERY
    WITH requests AS (
      SELECT * FROM unnest(keys, ids, leases_ms) WITH ORDINALITY AS r (key, id, lease_ms, at)
    ), extended AS (
      UPDATE {schema}.locks l SET until = greatest(l.until, {schema}.after(t, r.lease_ms))
        -- A row is updated once, although two requests may name it.
        FROM (SELECT key, id, max(lease_ms) AS lease_ms FROM requests GROUP BY key, id) r
        WHERE l.key = r.key AND l.holder = r.id AND l.until > t
        RETURNING l.key, l.holder
    )
    SELECT CASE WHEN right(r.id, 2) = '/1' AND {schema}.is_superseded(r.key, r.id, t, true) THEN -r.at ELSE r.at END
      FROM requests r JOIN extended e ON e.key = r.key AND e.holder = r.id;
  IF EXISTS (SELECT FROM unnest(ids) AS r (id) WHERE {schema}.limit_of(r.id) > 1) THEN
    RETURN QUERY
      WITH requests AS (
        SELECT * FROM unnest(keys, ids, leases_ms) WITH ORDINALITY AS r (key, id, lease_ms, at)
      ), extended AS (
        UPDATE {schema}.waiters w SET until = greatest(w.until, {schema}.after(t, r.lease_ms))
          FROM (SELECT key, id, max(lease_ms) AS lease_ms FROM requests GROUP BY key, id) r
          WHERE w.key = r.key AND w.id = r.id AND w.since IS NOT NULL AND w.until > t
          RETURNING w.key, w.id, w.until
      ), lock_ends AS (
        UPDATE {schema}.locks l SET until = greatest(l.until, e.until)
          FROM (SELECT x.key, max(x.until) AS until FROM extended x GROUP BY x.key) e
          WHERE l.key = e.key
      )
      SELECT r.at FROM requests r JOIN extended e ON e.key = r.key AND e.id = r.id;
  END IF;
END
$$;

-- yield_key: passes the key to the first live waiter, between two sections of one process, and
-- enqueues the next id of the process. Without waiters the acquisition holds the key for another
-- full lease under a new fence. A key that was lost is acquired under the next id.
--
-- reply  one row, with the time: extended, with the fence; or as of acquire_one, for the next id:
--        the old id holds nothing any more
CREATE OR REPLACE FUNCTION {schema}.yield_key(
  expires_us bigint, offer_ms bigint, entry_ms bigint, capacity bigint, unless_recorded boolean,
  of_key text, me text, my_fence bigint, next_id text, lease_ms bigint, ended text, my_trace text
) RETURNS TABLE (
  n bigint, now_us bigint,
  what text, fence bigint, left_us bigint, waiting bigint, head bytea, body bytea, trace text
)
LANGUAGE plpgsql {settings} AS $$
#variable_conflict use_column
DECLARE
  lock {schema}.locks;
  t timestamptz;
BEGIN
  {read_committed}
  n := 0;
  now_us := {schema}.us(clock_timestamp());
  what := 'expired';
  IF now_us > expires_us THEN
    RETURN NEXT;
    RETURN;
  END IF;
  n := 1;
  lock := {schema}.lock_row(of_key);
  t := clock_timestamp();
  IF {schema}.us(t) > expires_us THEN
    RETURN NEXT;
    RETURN;
  END IF;
  IF lock.holder = me AND lock.until > t THEN
    what := 'extended';
    -- A copy of an executed yield: a section may run under the new fence, and must not lose the
    -- key. The update changes nothing: its commit waits for the disk.
    IF lock.fence <> my_fence THEN
      fence := lock.fence;
      UPDATE {schema}.locks SET until = until WHERE key = of_key;
    -- Also without waiters: a new fence is a grant to every transaction of the application, and an
    -- older snapshot must not pass with the fence before it.
    ELSIF {schema}.is_pinned(of_key) OR {schema}.offer_next(of_key, t, 0, offer_ms, NULL, ended) IS NULL THEN
      fence := {schema}.grant_key(of_key, me, t, lease_ms, my_trace);
    END IF;
  END IF;
  IF fence IS NULL THEN
    -- An offer may be for the next id, which was enqueued already because this yield got no reply:
    -- it gets the key or a queue entry, and not both.
    SELECT one.* INTO what, fence, left_us, waiting, head, body, trace FROM {schema}.acquire_one(
      of_key, next_id, lease_ms, true, unless_recorded, offer_ms, entry_ms, capacity, expires_us, my_trace
    ) one;
  END IF;
  RETURN NEXT;
END
$$;

-- force_release: revokes the key from its holders, or from one of them, notifies each, and blocks
-- its place, so that it can stop. A key that is only blocked becomes free, unless an earlier call
-- blocked it. The place of a share that was revoked is `<id>:forced`.
--
-- reply  one row: free; revoked, with the ids; or unblocked, with the time that was left
CREATE OR REPLACE FUNCTION {schema}.force_release(
  of_key text, block_ms bigint, offer_ms bigint, of_holder text DEFAULT NULL
)
RETURNS TABLE (what text, revoked_ids text[], left_us bigint)
LANGUAGE plpgsql {settings} AS $$
DECLARE
  lock {schema}.locks;
  t timestamptz;
  revoked_id text;
BEGIN
  {read_committed}
  lock := {schema}.lock_row(of_key);
  t := clock_timestamp();
  left_us := greatest(0, {schema}.us(lock.until) - {schema}.us(t));
  IF lock.holder IS NULL AND EXISTS (
    SELECT FROM {schema}.waiters w WHERE w.key = of_key AND w.since IS NOT NULL AND w.until > t
  ) THEN
    SELECT array_agg(regexp_replace(w.id, ':forced$', '')) INTO revoked_ids FROM {schema}.waiters w
      WHERE w.key = of_key AND w.since IS NOT NULL AND w.until > t AND w.id !~ ':end$'
        AND (of_holder IS NULL OR of_holder = regexp_replace(w.id, ':forced$', ''));
    PERFORM {schema}.send('revoked', r.id, of_key) FROM unnest(revoked_ids) r (id);
    IF block_ms > 0 THEN
      UPDATE {schema}.waiters w SET id = w.id || ':forced', until = {schema}.after(t, block_ms)
        WHERE w.key = of_key AND w.since IS NOT NULL AND w.id = ANY (revoked_ids);
    ELSE
      DELETE FROM {schema}.waiters w WHERE w.key = of_key AND w.since IS NOT NULL AND w.id = ANY (revoked_ids);
    END IF;
    what := CASE WHEN revoked_ids IS NOT NULL THEN 'revoked' WHEN of_holder IS NOT NULL THEN 'free' ELSE 'unblocked' END;
    IF what = 'unblocked' THEN
      DELETE FROM {schema}.waiters w WHERE w.key = of_key AND w.since IS NOT NULL;
    END IF;
    PERFORM {schema}.serve_shares(of_key, t, offer_ms);
    RETURN NEXT;
    RETURN;
  END IF;
  -- The former holder may still run: the message of the earlier call may be lost.
  revoked_id := CASE WHEN left_us > 0 THEN coalesce(lock.holder, lock.revoked) END;
  IF left_us > 0 AND of_holder IS NOT NULL AND of_holder IS DISTINCT FROM revoked_id THEN
    what := 'free';
    RETURN NEXT;
    RETURN;
  END IF;
  revoked_ids := ARRAY[revoked_id];
  IF revoked_id IS NULL THEN
    what := CASE WHEN left_us > 0 THEN 'unblocked' ELSE 'free' END;
    PERFORM {schema}.end_hold(of_key, t, offer_ms);
  ELSE
    what := 'revoked';
    PERFORM {schema}.send('revoked', revoked_id, of_key);
    IF lock.holder IS NULL THEN
      -- Its block lasts.
      NULL;
    ELSIF block_ms > 0 THEN
      UPDATE {schema}.locks l SET holder = NULL, until = {schema}.after(t, block_ms), revoked = revoked_id
        WHERE l.key = of_key;
    ELSE
      PERFORM {schema}.end_hold(of_key, t, offer_ms);
    END IF;
  END IF;
  RETURN NEXT;
END
$$;

-- delete_record: deletes the record of a key that has no holder.
--
-- reply  deleted, not found, or busy
CREATE OR REPLACE FUNCTION {schema}.delete_record(of_key text) RETURNS text
LANGUAGE plpgsql {settings} AS $$
DECLARE
  lock {schema}.locks;
  is_current boolean;
BEGIN
  lock := {schema}.lock_row(of_key);
  IF lock.holder IS NOT NULL AND lock.until > clock_timestamp() THEN
    RETURN 'busy';
  END IF;
  DELETE FROM {schema}.records r WHERE r.key = of_key RETURNING r.until > clock_timestamp() INTO is_current;
  RETURN CASE WHEN is_current THEN 'deleted' ELSE 'not found' END;
END
$$;

-- inspect: the holder of a key, the remaining lease, the number of waiters, the record, and the
-- open transaction that has checked its fence. Changes nothing.
CREATE OR REPLACE FUNCTION {schema}.inspect(of_key text) RETURNS TABLE (
  key text, holder text, fence bigint, since_us bigint, left_us bigint, waiting bigint, record_left_us bigint,
  share_ids text[], shares_since_us bigint[], kept_by text
)
LANGUAGE plpgsql {settings} AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock_timestamp();
  locker xid;
  members xid[];
  next_id bigint;
  keeper text;
BEGIN
  -- Of a key without a holder: the transaction that has locked its row last, or the number of a
  -- group of them.
  SELECT l.xmax INTO locker FROM {schema}.locks l
    WHERE l.key = of_key AND l.xmax <> '0' AND (l.holder IS NULL OR l.until <= t);
  IF FOUND THEN
    BEGIN
      members := ARRAY(SELECT m.xid FROM pg_get_multixact_members(locker) m);
    EXCEPTION WHEN OTHERS THEN
      -- There is no group with this number.
      NULL;
    END;
    next_id := txid_snapshot_xmax(txid_current_snapshot());
    -- A group with this number is meant, if one of it is in progress. The part of a transaction
    -- under a savepoint has an id of its own, and no lock.
    SELECT CASE WHEN x.transactionid IS NULL THEN 'an open transaction'
        ELSE coalesce('the transaction of backend ' || x.pid, 'a prepared transaction') END INTO keeper
      FROM unnest(members || locker) WITH ORDINALITY one (id, n)
      LEFT JOIN pg_locks x ON x.locktype = 'transactionid' AND x.granted AND x.transactionid = one.id
      WHERE txid_status(next_id - ((next_id - one.id::text::bigint) & 4294967295)) = 'in progress'
      ORDER BY one.n LIMIT 1;
  END IF;
  RETURN QUERY
    SELECT of_key, l.holder, l.fence, {schema}.us(l.since), coalesce({schema}.us(l.until) - {schema}.us(t), 0),
      (SELECT count(*) FROM {schema}.waiters w WHERE w.key = of_key AND w.until > t AND w.since IS NULL),
      (SELECT {schema}.us(r.until) - {schema}.us(t) FROM {schema}.records r WHERE r.key = of_key AND r.until > t),
      shares.ids, shares.since_us, keeper
    FROM {schema}.shares_of(of_key, t) shares LEFT JOIN {schema}.locks l ON l.key = of_key AND l.until > t;
END
$$;

-- list_keys: the status of each key after this one that is held, blocked or waited for, up to a
-- limit. Reads at most `max_rows` rows, in the order of the keys.
--
-- reply  a row for each, as of inspect. Then, unless it was the last page, a row without a number
--        of waiters: the key after which the next page begins.
CREATE OR REPLACE FUNCTION {schema}.list_keys(
  after_key text, limit_to bigint, max_rows bigint, contended_only boolean
) RETURNS TABLE (
  key text, holder text, fence bigint, since_us bigint, left_us bigint, waiting bigint, record_left_us bigint,
  share_ids text[], shares_since_us bigint[]
)
LANGUAGE plpgsql {settings} AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock_timestamp();
  rows_read bigint;
  last_read text;
  listed bigint := 0;
BEGIN
  SELECT count(*), max(page.key) INTO rows_read, last_read FROM (
    SELECT l.key FROM {schema}.locks l WHERE l.key > after_key ORDER BY l.key LIMIT max_rows
  ) page;
  -- One statement: a call of inspect for each row, of which most are free, takes long.
  FOR key, holder, fence, since_us, left_us, waiting, record_left_us, share_ids, shares_since_us IN
    SELECT l.key, live.holder, live.fence, {schema}.us(live.since),
      coalesce({schema}.us(live.until) - {schema}.us(t), 0), queue.waiting,
      (SELECT {schema}.us(r.until) - {schema}.us(t) FROM {schema}.records r WHERE r.key = l.key AND r.until > t),
      shares.ids, shares.since_us
    FROM {schema}.locks l
    LEFT JOIN LATERAL (SELECT l.holder, l.fence, l.since, l.until WHERE l.until > t) live ON true
    CROSS JOIN LATERAL (
      SELECT count(*) AS waiting FROM {schema}.waiters w WHERE w.key = l.key AND w.until > t AND w.since IS NULL
    ) queue
    CROSS JOIN LATERAL {schema}.shares_of(l.key, t) shares
    WHERE l.key > after_key AND l.key <= last_read
      AND (queue.waiting > 0 OR l.until > t AND NOT contended_only)
    ORDER BY l.key LIMIT limit_to
  LOOP
    listed := listed + 1;
    RETURN NEXT;
  END LOOP;
  IF listed = limit_to OR rows_read = max_rows THEN
    -- Of the last row, `key` is its key.
    key := CASE WHEN listed = limit_to THEN key ELSE last_read END;
    waiting := NULL;
    RETURN NEXT;
  END IF;
END
$$;

-- sweep: deletes rows that are free for a minute, and expired records. Reads at most `max_rows`
-- rows of each, from this key on, and waits for no row. The floor of the fences rises in the same
-- transaction: a key that is used again gets a larger fence than its deleted row had.
--
-- reply  the key after which the next call continues, or nothing if it was the last row; and the
--        number of records that were deleted
CREATE OR REPLACE FUNCTION {schema}.sweep(after_key text, max_rows bigint)
RETURNS TABLE (next_key text, records_deleted bigint)
LANGUAGE plpgsql {settings} AS $$
DECLARE
  free_keys text[];
  rows_read bigint;
  max_fence bigint;
  -- A variable: a condition with `clock_timestamp()` uses no index, and reads all records.
  t timestamptz := clock_timestamp();
BEGIN
  -- A sweep that a crash loses is repeated: its deletes and the floor are lost together.
  PERFORM set_config('synchronous_commit', 'off', true);
  SELECT count(*), max(page.key) INTO rows_read, next_key FROM (
    SELECT l.key FROM {schema}.locks l WHERE l.key > after_key ORDER BY l.key LIMIT max_rows
  ) page;
  -- The lock is that of a delete: a row that a transaction of the application has read for its
  -- fence is skipped, and so is one that a call has locked.
  SELECT array_agg(page.key) INTO free_keys FROM (
    SELECT l.key FROM {schema}.locks l
      WHERE l.key > after_key AND l.key <= next_key
        AND coalesce(nullif(l.until, 'epoch'), l.since, 'epoch') < t - interval '1 minute'
      ORDER BY l.key FOR UPDATE SKIP LOCKED
  ) page;
  -- A statement of its own: it sees the waiters that came before the lock.
  WITH deleted AS (
    DELETE FROM {schema}.locks l
      WHERE l.key = ANY (free_keys)
        AND NOT EXISTS (SELECT FROM {schema}.waiters w WHERE w.key = l.key AND w.until > clock_timestamp())
      RETURNING l.key, l.fence
  ), left_behind AS (
    DELETE FROM {schema}.waiters w USING deleted d WHERE w.key = d.key
  )
  SELECT max(d.fence) INTO max_fence FROM deleted d;
  IF max_fence > 0 THEN
    UPDATE {schema}.floor f SET fence = greatest(f.fence, max_fence) WHERE f.one;
  END IF;
  IF rows_read < max_rows THEN
    next_key := NULL;
  END IF;
  WITH deleted AS (
    DELETE FROM {schema}.records r WHERE r.key IN (
      SELECT old.key FROM {schema}.records old WHERE old.until <= t
        ORDER BY old.until LIMIT max_rows FOR UPDATE SKIP LOCKED
    ) RETURNING 1
  )
  SELECT count(*) INTO records_deleted FROM deleted;
  RETURN NEXT;
END
$$;
