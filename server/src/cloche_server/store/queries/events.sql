-- insert_event --
-- The next number, whoever writes: there is one connection.
INSERT INTO events (seq, at, workspace, sandbox_id, type, payload)
SELECT COALESCE(MAX(seq), 0) + 1, :at, :workspace, :sandbox_id, :type, :payload FROM events;

-- event_bounds --
-- First and last number there is; 0 when nothing has ever happened.
SELECT COALESCE(MIN(seq), 0) AS first, COALESCE(MAX(seq), 0) AS last FROM events;

-- events_after --
-- The events of a workspace after a number, oldest first.
SELECT * FROM events WHERE workspace = :workspace AND seq > :after ORDER BY seq LIMIT :count;

-- events_of_after --
-- The same of one sandbox.
SELECT * FROM events WHERE workspace = :workspace AND sandbox_id = :sandbox_id AND seq > :after
ORDER BY seq LIMIT :count;

-- events_before --
-- The events of a workspace before a number, newest first.
SELECT * FROM events WHERE workspace = :workspace AND seq < :before ORDER BY seq DESC LIMIT :count;

-- events_of_before --
-- The same of one sandbox.
SELECT * FROM events WHERE workspace = :workspace AND sandbox_id = :sandbox_id AND seq < :before
ORDER BY seq DESC LIMIT :count;

-- count_events_after --
-- How many events of a workspace come after a number.
SELECT COUNT(*) AS n FROM events WHERE workspace = :workspace AND seq > :after;

-- first_event_since --
-- The first that is young enough, or nothing.
SELECT MIN(seq) AS seq FROM events WHERE at >= :before;

-- prune_events --
-- All before a number.
DELETE FROM events WHERE seq < :below;
