-- What a sandbox may reach, and the secrets it may use, as JSON. Empty: of a server that knew no network.
ALTER TABLE sandboxes ADD COLUMN network TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN grants TEXT NOT NULL DEFAULT '[]';
