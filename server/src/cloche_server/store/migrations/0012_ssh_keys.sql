-- Public keys that open sandboxes over SSH. The same key may be in several workspaces, and once in each for a sandbox.
CREATE TABLE ssh_keys (
    id          TEXT PRIMARY KEY,
    workspace   TEXT NOT NULL,
    sandbox_id  TEXT,
    kind        TEXT NOT NULL,
    public_key  TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    comment     TEXT NOT NULL,
    created_at  DOUBLE PRECISION NOT NULL,
    expires_at  DOUBLE PRECISION
);
CREATE INDEX ssh_keys_by_fingerprint ON ssh_keys (fingerprint);
CREATE INDEX ssh_keys_by_workspace ON ssh_keys (workspace, created_at);
