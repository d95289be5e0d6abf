-- insert_ssh_key --
-- A new key.
INSERT INTO ssh_keys (id, workspace, sandbox_id, kind, public_key, fingerprint, comment, created_at, expires_at)
VALUES (:id, :workspace, :sandbox_id, :kind, :public_key, :fingerprint, :comment, :created_at, :expires_at);

-- ssh_keys_of --
-- The keys of a workspace, oldest first.
SELECT id, workspace, sandbox_id, kind, public_key, fingerprint, comment, created_at, expires_at
FROM ssh_keys WHERE workspace = :workspace ORDER BY created_at, id;

-- ssh_keys_by_fingerprint --
-- The keys of all workspaces with a fingerprint, oldest first.
SELECT id, workspace, sandbox_id, kind, public_key, fingerprint, comment, created_at, expires_at
FROM ssh_keys WHERE fingerprint = :fingerprint ORDER BY created_at, id;

-- delete_ssh_key --
-- Forgets a key.
DELETE FROM ssh_keys WHERE id = :id AND workspace = :workspace;

-- prune_ssh_keys --
-- Forgets keys that have expired, and those of sandboxes that have ended.
DELETE FROM ssh_keys WHERE (expires_at IS NOT NULL AND expires_at <= :now)
OR (sandbox_id IS NOT NULL AND sandbox_id NOT IN (SELECT id FROM sandboxes WHERE status <> 'deleted'));
