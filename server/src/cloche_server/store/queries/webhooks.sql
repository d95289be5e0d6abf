-- insert_webhook --
-- A new receiver.
INSERT INTO webhooks (id, workspace, url, types, sandbox_id, description, secret, enabled, disabled_reason, created_at,
    position, failures, failing_since, last_success_at, last_attempt_at, last_error, delivered, given_up, missed)
VALUES (:id, :workspace, :url, :types, :sandbox_id, :description, :secret, :enabled, :disabled_reason, :created_at,
    :position, :failures, :failing_since, :last_success_at, :last_attempt_at, :last_error, :delivered, :given_up, :missed);

-- all_webhooks --
-- Every receiver, oldest first.
SELECT * FROM webhooks ORDER BY created_at, id;

-- update_webhook --
-- Writes what may change: what its owner has set, and how far it has come.
UPDATE webhooks SET url = :url, types = :types, description = :description, enabled = :enabled,
    disabled_reason = :disabled_reason, position = :position, failures = :failures, failing_since = :failing_since,
    last_success_at = :last_success_at, last_attempt_at = :last_attempt_at, last_error = :last_error,
    delivered = :delivered, given_up = :given_up, missed = :missed
WHERE id = :id;

-- delete_webhook --
-- For good.
DELETE FROM webhooks WHERE id = :id;
