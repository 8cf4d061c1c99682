-- Makes the tables and the functions of tower-lock, or replaces functions of an older release. This
-- text may be executed again, also by an older release: it keeps tables, rows and newer functions.
--
-- They have a schema of their own, {schema}. So a right is granted for all of them at once, and no
-- name of the application is in the way.
--
-- A table that exists is not locked, and the functions are replaced together: calls of other
-- instances and transactions of the application go on meanwhile.

-- The functions of the system are named in full: a function that another user has created in
-- `public`, with arguments that match better, would run with the rights of this one.
DO $migration$
DECLARE
  version text;
  functions text;
  own pg_catalog.regprocedure;
  foreign_name text;
BEGIN
  -- Instances that start together must not do this together.
  PERFORM pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('tower-lock {schema}', 0));
  -- Not `IF NOT EXISTS`: that asks for the right to create a schema also if the schema exists.
  IF pg_catalog.to_regnamespace('{schema}') IS NULL THEN
    CREATE SCHEMA {schema};
  END IF;

  IF pg_catalog.to_regclass('{schema}.locks') IS NULL THEN
    -- No name of another program is used, or in the way.
    SELECT c.relname INTO foreign_name FROM pg_catalog.pg_class c
      WHERE c.relnamespace = pg_catalog.to_regnamespace('{schema}') LIMIT 1;
    IF foreign_name IS NULL THEN
      SELECT f.proname INTO foreign_name FROM pg_catalog.pg_proc f
        WHERE f.pronamespace = pg_catalog.to_regnamespace('{schema}') LIMIT 1;
    END IF;
    IF foreign_name IS NOT NULL THEN
      RAISE EXCEPTION 'the schema {schema} has `%` of another program', foreign_name
        USING HINT = 'Choose another schema.';
    END IF;

    -- One row for each key that was used lately. Its lock is the mutex of the key: every change of
    -- the key, of its waiters and of its record holds it.
    --
    -- A row without a holder is blocked until `until`, and then free. A key that is free at once
    -- has the epoch there: it is free by any clock. `since` is the time of the last grant, or of
    -- the release after it. `fence` is that of the last grant, and zero before the first one.
    -- `revoked` is the holder that a forced release has ended, while the block after it lasts.
    -- `trace` is that of the section of the last grant. Of an offer, it is `<` and the trace of the
    -- section before.
    --
    -- No column but the key has an index: an update then writes no index entry, and takes a lock on
    -- the row that passes `FOR KEY SHARE`.
    CREATE TABLE {schema}.locks (
      key text COLLATE "C" PRIMARY KEY,
      holder text,
      fence bigint NOT NULL,
      since timestamptz,
      until timestamptz NOT NULL,
      revoked text,
      trace text
    ) WITH (fillfactor = 70);
    COMMENT ON TABLE {schema}.locks IS '{version}';

    -- The waiters of each key, in order of arrival, and the end of each queue entry. A row with
    -- `since` is no waiter: it holds a share of the key from then until its end, or blocks a place.
    -- While a key is shared, its row in `locks` has no holder, and the latest end of the shares.
    CREATE TABLE {schema}.waiters (
      key text COLLATE "C" NOT NULL,
      position bigint NOT NULL,
      id text NOT NULL,
      until timestamptz NOT NULL,
      since timestamptz,
      PRIMARY KEY (key, position)
    ) WITH (fillfactor = 70);

    -- The record of each key, and the acquisition that has left it.
    CREATE TABLE {schema}.records (
      key text COLLATE "C" PRIMARY KEY,
      id text NOT NULL,
      head bytea NOT NULL,
      body bytea,
      until timestamptz NOT NULL
    );
    CREATE INDEX records_until ON {schema}.records (until);

    -- The largest fence of all rows that were deleted: a key that is used again gets a larger one.
    CREATE TABLE {schema}.floor (
      one boolean PRIMARY KEY DEFAULT true CHECK (one),
      fence bigint NOT NULL
    );
    INSERT INTO {schema}.floor (fence) VALUES (0);
    -- A process recognizes its tables by this id: its address may lead to other tables later.
    EXECUTE pg_catalog.format('COMMENT ON TABLE {schema}.floor IS %L', pg_catalog.gen_random_uuid());
  END IF;

  version := pg_catalog.obj_description(pg_catalog.to_regclass('{schema}.locks'), 'pg_class');
  IF version IS DISTINCT FROM '{version}' THEN
    RAISE EXCEPTION 'the table {schema}.locks is not of {version}, but of %',
      coalesce(version, 'another program')
      USING HINT = 'Choose another schema.';
  END IF;

  functions := pg_catalog.obj_description(
    pg_catalog.to_regprocedure('{schema}.check_fence(text, bigint, text)'), 'pg_proc'
  );
  IF coalesce(substring(functions FROM '[0-9]+$')::bigint, 0) < {functions} THEN
{rules}
{verbs}
{application}
COMMENT ON FUNCTION {schema}.check_fence(text, bigint, text) IS 'tower-lock functions {functions}';
  END IF;
END
$migration$;
