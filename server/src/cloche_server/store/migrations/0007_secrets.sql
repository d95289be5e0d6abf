-- Secrets of workspaces, and the authority that signs certificates for the TLS that is read to put them in. What is
-- `sealed` is encrypted with the key of the server, which is not in the database.
CREATE TABLE secrets (
    workspace   TEXT NOT NULL,
    name        TEXT NOT NULL,
    description TEXT,
    version     INTEGER NOT NULL,
    sealed      BLOB NOT NULL,
    created_at  DOUBLE PRECISION NOT NULL,
    updated_at  DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (workspace, name)
);

CREATE TABLE authorities (
    workspace   TEXT PRIMARY KEY,
    certificate TEXT NOT NULL,
    sealed      BLOB NOT NULL,
    created_at  DOUBLE PRECISION NOT NULL
);
