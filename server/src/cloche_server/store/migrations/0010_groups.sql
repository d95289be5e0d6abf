-- Private networks: the group of a sandbox, and the address that its other members know it by.
ALTER TABLE sandboxes ADD COLUMN network_group TEXT;
ALTER TABLE sandboxes ADD COLUMN group_address TEXT NOT NULL DEFAULT '';
