-- What was said about ports of sandboxes. A row goes with its sandbox.
CREATE TABLE ports (
    sandbox_id TEXT NOT NULL,
    port       INTEGER NOT NULL,
    workspace  TEXT NOT NULL,
    access     TEXT NOT NULL,
    label      TEXT,
    domain     TEXT UNIQUE,
    username   TEXT,
    password   TEXT,
    host       TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (sandbox_id, port)
);
