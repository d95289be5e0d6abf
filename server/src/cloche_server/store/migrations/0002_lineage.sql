-- Where a sandbox comes from, and the disk layer it writes to.
ALTER TABLE sandboxes ADD COLUMN layer_id TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN parent_id TEXT;
ALTER TABLE sandboxes ADD COLUMN fork_tree_id TEXT;
ALTER TABLE sandboxes ADD COLUMN snapshot_id TEXT;
ALTER TABLE sandboxes ADD COLUMN idle_seconds INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN idle_action TEXT NOT NULL DEFAULT 'hibernate';
ALTER TABLE sandboxes ADD COLUMN status_reason TEXT;
ALTER TABLE sandboxes ADD COLUMN name TEXT;
ALTER TABLE sandboxes ADD COLUMN cold INTEGER NOT NULL DEFAULT 0;
CREATE UNIQUE INDEX sandboxes_by_name ON sandboxes (workspace, name)
    WHERE name IS NOT NULL AND status <> 'deleted' AND status <> 'deleting';
