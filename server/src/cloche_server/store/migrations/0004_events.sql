-- What has happened. `seq` grows by one with each event; the newest one is never removed, so that no number comes twice.
CREATE TABLE events (
    seq        INTEGER PRIMARY KEY,
    at         DOUBLE PRECISION NOT NULL,
    workspace  TEXT NOT NULL,
    sandbox_id TEXT NOT NULL,
    type       TEXT NOT NULL,
    payload    TEXT NOT NULL
);
CREATE INDEX events_by_workspace ON events (workspace, seq);
CREATE INDEX events_by_sandbox ON events (sandbox_id, seq);

-- Receivers of events. `secret` is kept as it is, because it has to sign; `position` is the last event that is done with.
CREATE TABLE webhooks (
    id              TEXT PRIMARY KEY,
    workspace       TEXT NOT NULL,
    url             TEXT NOT NULL,
    types           TEXT NOT NULL,
    sandbox_id      TEXT,
    description     TEXT,
    secret          TEXT NOT NULL,
    enabled         INTEGER NOT NULL,
    disabled_reason TEXT,
    created_at      DOUBLE PRECISION NOT NULL,
    position        BIGINT NOT NULL,
    failures        INTEGER NOT NULL,
    failing_since   DOUBLE PRECISION,
    last_success_at DOUBLE PRECISION,
    last_attempt_at DOUBLE PRECISION,
    last_error      TEXT,
    delivered       BIGINT NOT NULL,
    given_up        BIGINT NOT NULL,
    missed          BIGINT NOT NULL
);
CREATE INDEX webhooks_by_workspace ON webhooks (workspace, created_at);
