-- put_secret --
-- A new secret, or a new value of one.
INSERT INTO secrets (workspace, name, description, version, sealed, created_at, updated_at)
VALUES (:workspace, :name, :description, :version, :sealed, :created_at, :updated_at)
ON CONFLICT (workspace, name) DO UPDATE SET description = excluded.description, version = excluded.version,
    sealed = excluded.sealed, updated_at = excluded.updated_at;

-- list_secrets --
-- The secrets of a workspace by name, without their values.
SELECT workspace, name, description, version, created_at, updated_at FROM secrets WHERE workspace = :workspace ORDER BY name;

-- find_secret --
-- One secret, without its value.
SELECT workspace, name, description, version, created_at, updated_at FROM secrets
WHERE workspace = :workspace AND name = :name;

-- sealed_secrets --
-- All of a workspace with their sealed values.
SELECT workspace, name, version, sealed FROM secrets WHERE workspace = :workspace ORDER BY name;

-- any_secret --
-- Some secret with its sealed value, to see whether the key fits.
SELECT workspace, name, version, sealed FROM secrets LIMIT 1;

-- secret_sizes --
-- How many secrets a workspace has, and how many bytes, without one of them.
SELECT COUNT(*) AS count, COALESCE(SUM(LENGTH(sealed)), 0) AS bytes FROM secrets
WHERE workspace = :workspace AND name <> :name;

-- delete_secret --
-- For good.
DELETE FROM secrets WHERE workspace = :workspace AND name = :name;

-- put_authority --
-- The authority of a workspace, in place of one that cannot be used.
INSERT INTO authorities (workspace, certificate, sealed, created_at)
VALUES (:workspace, :certificate, :sealed, :created_at)
ON CONFLICT (workspace) DO UPDATE SET certificate = excluded.certificate, sealed = excluded.sealed,
    created_at = excluded.created_at;

-- find_authority --
-- The authority of a workspace with its sealed key.
SELECT certificate, sealed FROM authorities WHERE workspace = :workspace;
