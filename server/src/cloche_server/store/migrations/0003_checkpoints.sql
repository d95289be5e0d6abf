-- The snapshot that a sandbox has last gone on from, or that was last taken of it.
ALTER TABLE sandboxes ADD COLUMN checkpoint_id TEXT;
UPDATE sandboxes SET checkpoint_id = snapshot_id;
