-- Makes the tables and the procedures of tower-lock, or replaces procedures of an older release, in
-- the database of the session. This text may be executed again: it keeps tables and rows. Every
-- name begins with {p}.

SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION';;
SET NAMES utf8mb4;;

-- One row for each key that was used lately. Its lock is the mutex of the key: every change of the
-- key, of its shares and of its record holds it. Renewals write it.
--
-- A row without a holder is blocked, or held by shares, until `until_us`, and then free. A key that
-- is free at once has zero there: it is free by any clock. `since_us` is the time of the last
-- grant, or of the release after it. `revoked` is the holder that a forced release has ended, while
-- the block after it lasts.
CREATE TABLE IF NOT EXISTS {p}_locks (
  lock_key VARBINARY(1025) NOT NULL PRIMARY KEY,
  holder VARBINARY(255),
  fence BIGINT NOT NULL,
  since_us BIGINT NOT NULL,
  until_us BIGINT NOT NULL,
  revoked VARBINARY(255)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC COMMENT = '{version}';;

-- The fence of the last grant of each key, and its holder. A grant writes the row, and a renewal
-- does not: a transaction of the application that has read it LOCK IN SHARE MODE delays no renewal,
-- and its key is granted to nobody.
CREATE TABLE IF NOT EXISTS {p}_fences (
  lock_key VARBINARY(1025) NOT NULL PRIMARY KEY,
  fence BIGINT NOT NULL,
  holder VARBINARY(255)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC COMMENT = '{version}';;

-- The permits of each key, and the places that are blocked: `<id>:end` after a release, and
-- `<id>:forced` after a revocation. While a key is shared, its row in `locks` has no holder, and
-- the latest end of the places.
CREATE TABLE IF NOT EXISTS {p}_shares (
  lock_key VARBINARY(1025) NOT NULL,
  id VARBINARY(262) NOT NULL,
  since_us BIGINT NOT NULL,
  until_us BIGINT NOT NULL,
  PRIMARY KEY (lock_key, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC COMMENT = '{version}';;

-- The record of each key, and the acquisition that has left it.
CREATE TABLE IF NOT EXISTS {p}_records (
  lock_key VARBINARY(1025) NOT NULL PRIMARY KEY,
  id VARBINARY(255) NOT NULL,
  head MEDIUMBLOB NOT NULL,
  body MEDIUMBLOB,
  until_us BIGINT NOT NULL,
  KEY (until_us)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC COMMENT = '{version}';;

-- The largest fence of all rows that were deleted: a key that is used again gets a larger one. A
-- process recognizes its tables by `id`: its address may lead to other tables later.
CREATE TABLE IF NOT EXISTS {p}_floor (
  one TINYINT NOT NULL PRIMARY KEY,
  fence BIGINT NOT NULL,
  id VARCHAR(36) NOT NULL
) ENGINE = InnoDB COMMENT = '{version}';;
INSERT IGNORE INTO {p}_floor VALUES (1, 0, UUID());;
