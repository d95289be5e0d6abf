-- Times are Unix seconds (REAL), JSON is text. Only what SQLite and PostgreSQL have in common.
CREATE TABLE sandboxes (
    id           TEXT PRIMARY KEY,
    workspace    TEXT NOT NULL,
    status       TEXT NOT NULL,
    template     TEXT NOT NULL,
    template_name TEXT NOT NULL,
    template_id  TEXT NOT NULL,
    cpus         INTEGER NOT NULL,
    memory_mb    INTEGER NOT NULL,
    disk_mb      INTEGER NOT NULL,
    isolation    TEXT NOT NULL,
    defaults     TEXT NOT NULL,
    metadata     TEXT NOT NULL,
    created_at   DOUBLE PRECISION NOT NULL,
    ttl_seconds  INTEGER NOT NULL,
    persistent   INTEGER NOT NULL,
    expires_at   DOUBLE PRECISION,
    started_at   DOUBLE PRECISION,
    boot_ms      INTEGER NOT NULL,
    boot_mode    TEXT NOT NULL,
    process      TEXT,
    termination  TEXT,
    ended_at     DOUBLE PRECISION,
    generation   INTEGER NOT NULL,
    version      INTEGER NOT NULL
);
CREATE INDEX sandboxes_by_status ON sandboxes (status);
CREATE INDEX sandboxes_by_end ON sandboxes (ended_at);

CREATE TABLE tokens (
    hash        TEXT PRIMARY KEY,
    prefix      TEXT NOT NULL UNIQUE,
    name        TEXT NOT NULL,
    workspace   TEXT NOT NULL,
    created_at  DOUBLE PRECISION NOT NULL,
    revoked_at  DOUBLE PRECISION
);

CREATE TABLE idempotency (
    workspace    TEXT NOT NULL,
    key          TEXT NOT NULL,
    request_hash TEXT NOT NULL,
    sandbox_id   TEXT NOT NULL,
    created_at   DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (workspace, key)
);
