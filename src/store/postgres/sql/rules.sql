-- The rules of one key, which the verbs share. Each is executed while its transaction has locked
-- the row of the key, unless it says otherwise.
--
-- Each statement of these functions sees the commits before it (READ COMMITTED): a read after a
-- wait for a lock is current. One statement with all reads in it would see the queue of its start,
-- and leave a waiter behind that came meanwhile.

-- us: a time in microseconds.
CREATE OR REPLACE FUNCTION {schema}.us(t timestamptz) RETURNS bigint
LANGUAGE sql STABLE AS $$ SELECT (extract(epoch FROM t) * 1000000)::bigint $$;

-- after: the time this many milliseconds later.
CREATE OR REPLACE FUNCTION {schema}.after(t timestamptz, ms bigint) RETURNS timestamptz
LANGUAGE sql STABLE AS $$ SELECT t + ms * interval '1 millisecond' $$;

-- lock_row: waits until no other call changes the key, and returns its row. A key without a row
-- gets one. Otherwise a release would not see the row of an acquire that is not committed yet, and
-- would leave a grant behind (I8).
--
-- The lock passes `FOR KEY SHARE`: a transaction of the application that has checked the fence
-- delays no renewal, no release and no waiter.
CREATE OR REPLACE FUNCTION {schema}.lock_row(of_key text) RETURNS {schema}.locks
LANGUAGE plpgsql AS $$
DECLARE
  found_row {schema}.locks;
BEGIN
  LOOP
    SELECT * INTO found_row FROM {schema}.locks WHERE key = of_key FOR NO KEY UPDATE;
    IF FOUND THEN
      RETURN found_row;
    END IF;
    -- Waits for a call that inserts or deletes the row. The next turn reads its result.
    INSERT INTO {schema}.locks (key, fence, until) VALUES (of_key, 0, 'epoch') ON CONFLICT DO NOTHING;
  END LOOP;
END
$$;

-- is_pinned: whether a transaction of the application has read the row `FOR KEY SHARE`. The key
-- then has a writer, although its lease may have expired, and must not be granted. Otherwise the
-- row is locked for a grant: such a transaction waits for the end of this call, and then finds
-- another fence. Never waits.
CREATE OR REPLACE FUNCTION {schema}.is_pinned(of_key text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM {schema}.locks WHERE key = of_key FOR UPDATE SKIP LOCKED;
  RETURN NOT FOUND;
END
$$;

-- grant_key: makes this acquisition the holder. To be called only for a key that is not pinned, or
-- for its holder.
--
-- The fence is larger than the last one of the key, and at least the clock. A row without a grant
-- is new: the fences of a row before it are at most the floor.
CREATE OR REPLACE FUNCTION {schema}.grant_key(
  of_key text, to_id text, t timestamptz, lease_ms bigint, with_trace text DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  new_fence bigint;
BEGIN
  UPDATE {schema}.locks l
    SET holder = to_id, since = t, until = {schema}.after(t, lease_ms), revoked = NULL,
      fence = {next_fence}, trace = with_trace
    WHERE l.key = of_key RETURNING l.fence INTO STRICT new_fence;
  RETURN new_fence;
END
$$;

-- send: a message to the process of an acquisition. A commit with a message holds a lock of the
-- whole server, so that only a waiter, or a holder that has lost its key, causes one. The name of a
-- channel has at most 63 bytes: a longer one is not of this crate, and would fail the call. A full
-- queue would, too: a session of any user that listens, in a transaction that stays open, keeps the
-- messages of the whole server there. Without a message the waiter polls.
CREATE OR REPLACE FUNCTION {schema}.send(kind text, to_id text, of_key text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  channel text := 'tower-lock:' || regexp_replace(to_id, ':[0-9/]+$', '');
BEGIN
  IF octet_length(channel) < 64 AND pg_notification_queue_usage() < 0.9 THEN
    PERFORM pg_notify(channel, kind || ' ' || to_id || ' ' || of_key);
  END IF;
END
$$;

-- limit_of: how many may hold a key together with this acquisition, itself included.
CREATE OR REPLACE FUNCTION {schema}.limit_of(id text) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN strpos(id, '/') = 0 THEN 1 ELSE coalesce(substring(id FROM '/([0-9]+)$')::bigint, 1) END
$$;

-- is_superseded: whether a newer acquisition replaces this one, which is replaceable, and waits for
-- the key or holds it.
CREATE OR REPLACE FUNCTION {schema}.is_superseded(of_key text, me text, t timestamptz, is_holder boolean)
RETURNS boolean
LANGUAGE sql STABLE AS $$
  SELECT EXISTS (
    SELECT FROM {schema}.waiters w
      WHERE w.key = of_key AND w.since IS NULL AND w.until > t AND right(w.id, 2) = '/1'
        AND (is_holder OR w.position > (SELECT position FROM {schema}.waiters WHERE key = of_key AND id = me))
  )
$$;

-- shares: the places of a key, without those that have ended, which are deleted; the time until
-- the first one ends, and the end of the last one.
CREATE OR REPLACE FUNCTION {schema}.shares(
  of_key text, t timestamptz, OUT places bigint, OUT first_until timestamptz, OUT last_until timestamptz
)
LANGUAGE plpgsql AS $$
BEGIN
  DELETE FROM {schema}.waiters WHERE key = of_key AND since IS NOT NULL AND until <= t;
  SELECT count(*), min(until), max(until) INTO places, first_until, last_until
    FROM {schema}.waiters WHERE key = of_key AND since IS NOT NULL;
END
$$;

-- shares_of: the shares that hold a key, with the times of their grants, in this order.
CREATE OR REPLACE FUNCTION {schema}.shares_of(
  of_key text, t timestamptz, OUT ids text[], OUT since_us bigint[]
)
LANGUAGE sql STABLE AS $$
  SELECT array_agg(w.id ORDER BY w.since, w.position), array_agg({schema}.us(w.since) ORDER BY w.since, w.position)
    FROM {schema}.waiters w
    WHERE w.key = of_key AND w.since IS NOT NULL AND w.until > t AND w.id !~ ':(end|forced)$'
$$;

-- add_share: gives a place beside `places` others to a share, in place of its queue entry.
CREATE OR REPLACE FUNCTION {schema}.add_share(
  of_key text, to_id text, t timestamptz, lease_ms bigint, places bigint
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  ends timestamptz := {schema}.after(t, lease_ms);
BEGIN
  UPDATE {schema}.waiters SET since = t, until = ends WHERE key = of_key AND id = to_id;
  IF NOT FOUND THEN
    INSERT INTO {schema}.waiters (key, position, id, until, since)
      SELECT of_key, coalesce(max(w.position), 0) + 1, to_id, ends, t FROM {schema}.waiters w WHERE w.key = of_key;
  END IF;
  -- The end of the key is that of its last place.
  UPDATE {schema}.locks l
    SET holder = NULL, since = t, until = CASE WHEN places = 0 THEN ends ELSE greatest(l.until, ends) END,
      revoked = NULL
    WHERE l.key = of_key;
END
$$;

-- offer_next: offers a key to its first live waiters, as long as they fit beside `places` others:
-- none, if it is free; then it is not pinned. The first one that does not fit keeps those behind it
-- waiting. Returns the requester if it is next and fits: its entry is removed, and the caller
-- grants it the key. Otherwise the last waiter that got an offer. `ended` is the trace of the
-- section that the call ends.
CREATE OR REPLACE FUNCTION {schema}.offer_next(
  of_key text, t timestamptz, places bigint, offer_ms bigint, requester text, ended text DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  first_id text;
  first_position bigint;
  first_limit bigint;
  offered_id text;
BEGIN
  LOOP
    SELECT id, position INTO first_id, first_position FROM {schema}.waiters
      WHERE key = of_key AND since IS NULL AND until > t ORDER BY position LIMIT 1;
    IF places > 0 AND places >= {schema}.limit_of(coalesce(first_id, requester)) THEN
      RETURN offered_id;
    END IF;
    first_limit := {schema}.limit_of(first_id);
    -- With those before it, which do not poll any more. Without a live waiter: all of them. Of a
    -- free key, the shares have ended.
    DELETE FROM {schema}.waiters
      WHERE key = of_key AND (since IS NOT NULL AND places = 0 OR since IS NULL AND (
        first_position IS NULL OR position < first_position
        OR position = first_position AND (first_limit = 1 OR id = requester)
      ));
    IF first_id IS NULL THEN
      RETURN coalesce(requester, offered_id);
    ELSIF first_id = requester THEN
      RETURN first_id;
    END IF;
    PERFORM {schema}.send('offered', first_id, of_key);
    IF first_limit = 1 THEN
      PERFORM {schema}.grant_key(of_key, first_id, t, offer_ms, '<' || ended);
      RETURN first_id;
    END IF;
    PERFORM {schema}.add_share(of_key, first_id, t, offer_ms, places);
    places := places + 1;
    offered_id := first_id;
  END LOOP;
END
$$;

-- serve_shares: offers what is free of a shared key. Returns whether something was offered.
CREATE OR REPLACE FUNCTION {schema}.serve_shares(of_key text, t timestamptz, offer_ms bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
  others record;
BEGIN
  SELECT * INTO others FROM {schema}.shares(of_key, t);
  UPDATE {schema}.locks l SET holder = NULL, since = t, until = coalesce(others.last_until, 'epoch'), revoked = NULL
    WHERE l.key = of_key;
  RETURN NOT (others.places = 0 AND {schema}.is_pinned(of_key))
    AND {schema}.offer_next(of_key, t, others.places, offer_ms, NULL) IS NOT NULL;
END
$$;

-- end_share: ends a share, or removes its queue entry. Returns as of release.
CREATE OR REPLACE FUNCTION {schema}.end_share(
  of_key text, me text, t timestamptz, block_ms bigint, offer_ms bigint
) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  mine {schema}.waiters;
BEGIN
  DELETE FROM {schema}.waiters WHERE key = of_key AND id = me RETURNING * INTO mine;
  IF mine.since IS NULL OR mine.until <= t THEN
    -- A waiter has left, or a place has ended: others may fit beside the holders.
    IF EXISTS (
      SELECT FROM {schema}.waiters WHERE key = of_key AND since IS NOT NULL AND until > t
    ) THEN
      PERFORM {schema}.serve_shares(of_key, t, offer_ms);
    END IF;
    RETURN 'not holder';
  END IF;
  IF block_ms > 0 THEN
    INSERT INTO {schema}.waiters (key, position, id, until, since)
      VALUES (of_key, mine.position, me || ':end', {schema}.after(t, block_ms), t);
  END IF;
  RETURN CASE WHEN {schema}.serve_shares(of_key, t, offer_ms) THEN 'offered' ELSE 'freed' END;
END
$$;

-- end_hold: leaves the key without a holder. Returns whether it was offered to a waiter. A key that
-- is pinned stays free: its waiters poll.
CREATE OR REPLACE FUNCTION {schema}.end_hold(
  of_key text, t timestamptz, offer_ms bigint, ended text DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM {schema}.waiters WHERE key = of_key LIMIT 1;
  IF FOUND AND NOT {schema}.is_pinned(of_key)
    AND {schema}.offer_next(of_key, t, 0, offer_ms, NULL, ended) IS NOT NULL
  THEN
    RETURN true;
  END IF;
  -- Not `until = t`: if the clock is set back, the key would be blocked for as long.
  UPDATE {schema}.locks SET holder = NULL, since = t, until = 'epoch', revoked = NULL WHERE key = of_key;
  RETURN false;
END
$$;

-- leave: ends an acquisition that gets a record: its offer, or the free key, goes to the next
-- waiter. Locks the row, but only if there is something to end: most retries of a request write
-- nothing.
CREATE OR REPLACE FUNCTION {schema}.leave(of_key text, me text, offer_ms bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  lock {schema}.locks;
  t timestamptz := clock_timestamp();
BEGIN
  IF NOT EXISTS (SELECT FROM {schema}.waiters WHERE key = of_key AND id = me)
    AND NOT EXISTS (
      SELECT FROM {schema}.locks l WHERE l.key = of_key AND CASE
        WHEN l.until > t THEN l.holder = me
        ELSE EXISTS (SELECT FROM {schema}.waiters w WHERE w.key = of_key AND w.until > t)
      END
    )
  THEN
    RETURN;
  END IF;
  lock := {schema}.lock_row(of_key);
  t := clock_timestamp();
  DELETE FROM {schema}.waiters WHERE key = of_key AND id = me;
  IF lock.holder = me OR lock.until <= t THEN
    PERFORM {schema}.end_hold(of_key, t, offer_ms);
  END IF;
END
$$;

-- acquire_share: grants a share of the key. `key_until` is the end in its row. Otherwise returns
-- the time until a place may be free.
CREATE OR REPLACE FUNCTION {schema}.acquire_share(
  of_key text, me text, t timestamptz, lease_ms bigint, offer_ms bigint, key_until timestamptz, pinned boolean,
  OUT what_share text, OUT left_share bigint
)
LANGUAGE plpgsql AS $$
DECLARE
  others record;
BEGIN
  -- A repeated call, or an accepted offer. A delayed copy never shortens the lease.
  UPDATE {schema}.waiters SET until = greatest(until, {schema}.after(t, lease_ms))
    WHERE key = of_key AND id = me AND since IS NOT NULL AND until > t;
  IF FOUND THEN
    UPDATE {schema}.locks SET until = greatest(until, {schema}.after(t, lease_ms)) WHERE key = of_key;
    what_share := 'granted';
    RETURN;
  END IF;
  SELECT * INTO others FROM {schema}.shares(of_key, t);
  -- Without places and before its end, the key is held or blocked as a whole.
  IF others.places > 0 OR key_until <= t AND NOT pinned THEN
    IF {schema}.offer_next(of_key, t, others.places, offer_ms, me) = me THEN
      SELECT * INTO others FROM {schema}.shares(of_key, t);
      PERFORM {schema}.add_share(of_key, me, t, lease_ms, others.places);
      -- Those behind it may fit, too.
      PERFORM {schema}.offer_next(of_key, t, others.places + 1, offer_ms, NULL);
      what_share := 'granted';
      RETURN;
    END IF;
    SELECT * INTO others FROM {schema}.shares(of_key, t);
    SELECT until INTO key_until FROM {schema}.locks WHERE key = of_key;
  END IF;
  left_share := greatest(0, {schema}.us(coalesce(others.first_until, key_until)) - {schema}.us(t));
END
$$;

-- acquire_one: grants a key, or enqueues. Not under the lock of the row: it takes it.
--
-- what: superseded: a newer acquisition replaces this one, and nothing has changed; granted, with
-- `fence`; queued or pinned (it waits, and polls soon), with `left_us` and
-- `waiting` ahead; busy, with `left_us`; full, with `left_us` and `waiting`; recorded, with `head`
-- and `body`; expired: it has waited for too long, and does nothing. `trace` is that of the row
-- before the call.
CREATE OR REPLACE FUNCTION {schema}.acquire_one(
  of_key text, me text, lease_ms bigint, may_wait boolean, unless_recorded boolean,
  offer_ms bigint, entry_ms bigint, capacity bigint, expires_us bigint, my_trace text,
  OUT what text, OUT fence bigint, OUT left_us bigint, OUT waiting bigint, OUT head bytea, OUT body bytea,
  OUT trace text
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  lock {schema}.locks;
  t timestamptz;
  pinned boolean;
  my_position bigint;
  my_limit bigint := {schema}.limit_of(me);
BEGIN
  IF unless_recorded THEN
    SELECT r.head, r.body INTO head, body FROM {schema}.records r
      WHERE r.key = of_key AND r.until > clock_timestamp();
    IF FOUND THEN
      what := 'recorded';
      PERFORM {schema}.leave(of_key, me, offer_ms);
      RETURN;
    END IF;
  END IF;
  -- Most calls that find the key busy do not wait for it: they write nothing, and wait for no other
  -- call.
  IF NOT may_wait AND right(me, 2) <> '/1' THEN
    SELECT * INTO lock FROM {schema}.locks WHERE key = of_key;
    t := clock_timestamp();
    IF lock.until > t AND lock.holder IS DISTINCT FROM me AND my_limit = 1 THEN
      what := 'busy';
      left_us := {schema}.us(lock.until) - {schema}.us(t);
      trace := CASE WHEN lock.holder IS NOT NULL THEN lock.trace END;
      RETURN;
    END IF;
  END IF;
  lock := {schema}.lock_row(of_key);
  -- After the wait for the row: `now()` is the start of the transaction, and a lease that counts
  -- from there is too short.
  t := clock_timestamp();
  IF {schema}.us(t) > expires_us THEN
    what := 'expired';
    RETURN;
  END IF;
  trace := CASE WHEN lock.holder IS NOT NULL THEN lock.trace END;
  pinned := lock.until <= t AND {schema}.is_pinned(of_key);
  IF unless_recorded THEN
    -- Once more: a release that was waited for may have left it, or a transaction of the
    -- application that had pinned the key until now.
    SELECT r.head, r.body INTO head, body FROM {schema}.records r WHERE r.key = of_key AND r.until > t;
    IF FOUND THEN
      what := 'recorded';
      PERFORM {schema}.leave(of_key, me, offer_ms);
      RETURN;
    END IF;
  END IF;
  IF right(me, 2) = '/1' AND {schema}.is_superseded(of_key, me, t, lock.holder = me AND lock.until > t) THEN
    what := 'superseded';
    RETURN;
  END IF;
  -- A repeated call, or an accepted offer. A delayed copy never shortens the lease. An update in
  -- any case: its commit waits for the disk, and with it for the offer, which did not.
  IF lock.holder = me AND lock.until > t THEN
    UPDATE {schema}.locks SET until = greatest(until, {schema}.after(t, lease_ms)), trace = my_trace
      WHERE key = of_key;
    what := 'granted';
    fence := lock.fence;
    RETURN;
  END IF;
  IF my_limit > 1 THEN
    SELECT what_share, left_share INTO what, left_us
      FROM {schema}.acquire_share(of_key, me, t, lease_ms, offer_ms, lock.until, pinned);
    IF what = 'granted' THEN
      fence := {schema}.us(t);
      RETURN;
    END IF;
  ELSE
    IF lock.until <= t AND NOT pinned THEN
      IF {schema}.offer_next(of_key, t, 0, offer_ms, me) = me THEN
        what := 'granted';
        fence := {schema}.grant_key(of_key, me, t, lease_ms, my_trace);
        trace := NULL;
        RETURN;
      END IF;
      SELECT l.until INTO lock.until FROM {schema}.locks l WHERE l.key = of_key;
    END IF;
    left_us := greatest(0, {schema}.us(lock.until) - {schema}.us(t));
  END IF;
  IF NOT may_wait THEN
    what := 'busy';
    RETURN;
  END IF;
  -- The position of a repeated entry stays.
  UPDATE {schema}.waiters SET until = {schema}.after(t, entry_ms)
    WHERE key = of_key AND id = me RETURNING position INTO my_position;
  IF FOUND THEN
    SELECT count(*) INTO waiting FROM {schema}.waiters
      WHERE key = of_key AND position < my_position AND until > t AND since IS NULL;
  ELSE
    DELETE FROM {schema}.waiters WHERE key = of_key AND until <= t;
    SELECT count(*) FILTER (WHERE since IS NULL), coalesce(max(position), 0) + 1 INTO waiting, my_position
      FROM {schema}.waiters WHERE key = of_key;
    IF waiting >= capacity THEN
      what := 'full';
      RETURN;
    END IF;
    INSERT INTO {schema}.waiters (key, position, id, until)
      VALUES (of_key, my_position, me, {schema}.after(t, entry_ms));
  END IF;
  IF right(me, 2) = '/1' THEN
    -- The one that this one replaces asks: the nearest waiter before it, or else the holder. Those
    -- before that waiter were notified when it came, and ask once a second.
    PERFORM {schema}.send('revoked', older.id, of_key)
      FROM (
        SELECT l.holder AS id, 0 AS position FROM {schema}.locks l WHERE l.key = of_key AND l.until > t
        UNION ALL
        SELECT w.id, w.position FROM {schema}.waiters w
          WHERE w.key = of_key AND w.since IS NULL AND w.until > t AND w.position < my_position
      ) older
      WHERE right(older.id, 2) = '/1' ORDER BY older.position DESC LIMIT 1;
  END IF;
  what := CASE WHEN pinned THEN 'pinned' ELSE 'queued' END;
END
$$;
