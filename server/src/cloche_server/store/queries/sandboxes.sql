-- insert_sandbox --
-- A new record; fails when the id exists.
INSERT INTO sandboxes (id, workspace, status, template, template_name, template_id, cpus, memory_mb, disk_mb, isolation,
    defaults, metadata, created_at, ttl_seconds, persistent, expires_at, started_at, boot_ms, boot_mode, process,
    termination, ended_at, generation, version, layer_id, parent_id, fork_tree_id, snapshot_id,
    idle_seconds, idle_action, status_reason, name, cold, checkpoint_id, walls, cpu_origin, max_lifetime_seconds,
    ends_at, account_id, network, grants, network_group, group_address)
VALUES (:id, :workspace, :status, :template, :template_name, :template_id, :cpus, :memory_mb, :disk_mb, :isolation,
    :defaults, :metadata, :created_at, :ttl_seconds, :persistent, :expires_at, :started_at, :boot_ms, :boot_mode, :process,
    :termination, :ended_at, :generation, :version, :layer_id, :parent_id, :fork_tree_id, :snapshot_id,
    :idle_seconds, :idle_action, :status_reason, :name, :cold, :checkpoint_id, :walls, :cpu_origin,
    :max_lifetime_seconds, :ends_at, :account_id, :network, :grants, :network_group,
    :group_address);

-- update_sandbox --
-- Writes the next version of a record, only over the version it was derived from.
UPDATE sandboxes SET status = :status, metadata = :metadata, ttl_seconds = :ttl_seconds, persistent = :persistent,
    expires_at = :expires_at, started_at = :started_at, boot_ms = :boot_ms, boot_mode = :boot_mode, process = :process,
    termination = :termination, ended_at = :ended_at, disk_mb = :disk_mb, generation = :generation, version = :version,
    layer_id = :layer_id, idle_seconds = :idle_seconds, idle_action = :idle_action, status_reason = :status_reason,
    cold = :cold, checkpoint_id = :checkpoint_id, template = :template, template_name = :template_name,
    template_id = :template_id, walls = :walls, cpu_origin = :cpu_origin, account_id = :account_id,
    network = :network, grants = :grants, network_group = :network_group, group_address = :group_address
WHERE id = :id AND version = :version - 1;

-- all_sandboxes --
-- Every record that is not deleted, oldest first.
SELECT * FROM sandboxes WHERE status <> 'deleted' ORDER BY created_at, id;

-- get_sandbox --
-- One record, deleted ones included.
SELECT * FROM sandboxes WHERE id = :id;

-- get_sandbox_of --
-- One record of a workspace, deleted ones included.
SELECT * FROM sandboxes WHERE id = :id AND workspace = :workspace;

-- forget_sandbox --
-- Removes the record of a create that came to nothing.
DELETE FROM sandboxes WHERE id = :id;

-- prune_sandboxes --
-- Forgets deleted sandboxes that ended before a moment.
DELETE FROM sandboxes WHERE status = 'deleted' AND ended_at < :before;

-- count_template_users --
-- How many living sandboxes run on a baked template.
SELECT COUNT(*) AS n FROM sandboxes WHERE template_id = :template_id AND status <> 'deleted';
