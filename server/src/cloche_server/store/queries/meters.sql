-- put_usage --
-- The meter of a sandbox as it stands.
INSERT INTO usage (sandbox_id, workspace, status, created_at, ended_at, cpus, memory_mb, metadata, walls, meter)
VALUES (:sandbox_id, :workspace, :status, :created_at, :ended_at, :cpus, :memory_mb, :metadata, :walls, :meter)
ON CONFLICT (sandbox_id) DO UPDATE SET status = excluded.status, ended_at = excluded.ended_at,
    metadata = excluded.metadata, walls = excluded.walls, meter = excluded.meter;

-- living_usage --
-- Meters of sandboxes whose end is not recorded here.
SELECT * FROM usage WHERE ended_at IS NULL;

-- get_usage --
-- The meter of one sandbox.
SELECT * FROM usage WHERE sandbox_id = :sandbox_id AND workspace = :workspace;

-- page_usage --
-- Meters of a workspace whose lives touch a span of time, some at a time, by id.
SELECT * FROM usage WHERE workspace = :workspace AND sandbox_id > :after
    AND created_at < :until AND (ended_at IS NULL OR ended_at >= :since)
ORDER BY sandbox_id LIMIT :count;

-- unmetered_ends --
-- Deleted sandboxes whose end is not in their meter. One without a meter that ended before a moment had it forgotten.
SELECT s.* FROM sandboxes s LEFT JOIN usage u ON u.sandbox_id = s.id
WHERE s.status = 'deleted' AND u.ended_at IS NULL AND (u.sandbox_id IS NOT NULL OR s.ended_at >= :since);

-- prune_usage --
-- Forgets the meters of what ended before a moment.
DELETE FROM usage WHERE ended_at < :before;

-- forget_usage --
-- Forgets the meter of a create that came to nothing.
DELETE FROM usage WHERE sandbox_id = :id;

-- put_budget --
-- An account as it stands.
INSERT INTO budgets (id, workspace, budget, closed, offsets, warned, exceeded_at, exceeded_by)
VALUES (:id, :workspace, :budget, :closed, :offsets, :warned, :exceeded_at, :exceeded_by)
ON CONFLICT (id) DO UPDATE SET budget = excluded.budget, closed = excluded.closed, offsets = excluded.offsets,
    warned = excluded.warned, exceeded_at = excluded.exceeded_at, exceeded_by = excluded.exceeded_by;

-- all_budgets --
-- Every account.
SELECT * FROM budgets;

-- drop_budget --
-- Forgets an account that has no member.
DELETE FROM budgets WHERE id = :id;

-- forget_budget --
-- Forgets the account that was opened for a create that came to nothing.
DELETE FROM budgets WHERE id = (SELECT account_id FROM sandboxes WHERE id = :id)
    AND NOT EXISTS (
        SELECT 1 FROM sandboxes s WHERE s.account_id = budgets.id AND s.id <> :id AND s.status <> 'deleted'
    );
