-- Time in each state and the end that nothing moves (in the record of a sandbox), meters, and budgets.
ALTER TABLE sandboxes ADD COLUMN walls TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN cpu_origin DOUBLE PRECISION NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN max_lifetime_seconds INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN ends_at DOUBLE PRECISION;
ALTER TABLE sandboxes ADD COLUMN account_id TEXT;

-- One row per sandbox, kept longer than its record. `meter` and `walls` are JSON.
CREATE TABLE usage (
    sandbox_id   TEXT PRIMARY KEY,
    workspace    TEXT NOT NULL,
    status       TEXT NOT NULL,
    created_at   DOUBLE PRECISION NOT NULL,
    ended_at     DOUBLE PRECISION,
    cpus         INTEGER NOT NULL,
    memory_mb    INTEGER NOT NULL,
    metadata     TEXT NOT NULL,
    walls        TEXT NOT NULL,
    meter        TEXT NOT NULL
);
CREATE INDEX usage_by_workspace ON usage (workspace, sandbox_id);
CREATE INDEX usage_by_end ON usage (ended_at);

CREATE TABLE budgets (
    id           TEXT PRIMARY KEY,
    workspace    TEXT NOT NULL,
    budget       TEXT NOT NULL,
    closed       TEXT NOT NULL,
    offsets      TEXT NOT NULL,
    warned       INTEGER NOT NULL,
    exceeded_at  DOUBLE PRECISION,
    exceeded_by  TEXT
);
