-- One-shot runs that nobody waits for: their state, and what came of them until it is forgotten.
CREATE TABLE runs (
    id              TEXT PRIMARY KEY,
    workspace       TEXT NOT NULL,
    state           TEXT NOT NULL,
    language        TEXT NOT NULL,
    created_at      DOUBLE PRECISION NOT NULL,
    finished_at     DOUBLE PRECISION,
    outcome         TEXT,
    callback_url    TEXT,
    callback_secret TEXT,
    callback_state  TEXT NOT NULL,
    callback_error  TEXT
);
CREATE INDEX runs_by_workspace ON runs (workspace, created_at);
