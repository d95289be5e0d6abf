-- insert_run --
-- A run that is about to wait for its turn.
INSERT INTO runs (id, workspace, state, language, created_at, finished_at, outcome, callback_url, callback_secret,
    callback_state, callback_error)
VALUES (:id, :workspace, :state, :language, :created_at, :finished_at, :outcome, :callback_url, :callback_secret,
    :callback_state, :callback_error);

-- find_run --
-- One run of a workspace.
SELECT * FROM runs WHERE workspace = :workspace AND id = :id;

-- update_run --
-- How far it has come.
UPDATE runs SET state = :state, finished_at = :finished_at, outcome = :outcome, callback_state = :callback_state,
    callback_error = :callback_error
WHERE id = :id;

-- unfinished_runs --
-- What a server that has ended was at, and whose receivers have not been told.
SELECT * FROM runs WHERE state IN ('queued', 'running') OR callback_state = 'pending' ORDER BY created_at, id;

-- delete_run --
-- For good.
DELETE FROM runs WHERE workspace = :workspace AND id = :id;

-- prune_runs --
-- Results that have been kept long enough.
DELETE FROM runs WHERE finished_at IS NOT NULL AND finished_at < :before;
