-- insert_token --
-- A new token; fails when its hash or prefix exists.
INSERT INTO tokens (hash, prefix, name, workspace, created_at, scope, sandbox_id, expires_at)
VALUES (:hash, :prefix, :name, :workspace, :created_at, :scope, :sandbox_id, :expires_at);

-- find_token --
-- The token with a hash that is not revoked; it may have expired.
SELECT prefix, name, workspace, created_at, revoked_at, scope, sandbox_id, expires_at
FROM tokens WHERE hash = :hash AND revoked_at IS NULL;

-- list_tokens --
-- All tokens, oldest first.
SELECT prefix, name, workspace, created_at, revoked_at, scope, sandbox_id, expires_at
FROM tokens ORDER BY created_at, prefix;

-- list_tokens_of --
-- The tokens of a workspace that are not revoked, oldest first.
SELECT prefix, name, workspace, created_at, revoked_at, scope, sandbox_id, expires_at
FROM tokens WHERE workspace = :workspace AND revoked_at IS NULL ORDER BY created_at, prefix;

-- living_tokens --
-- The prefixes of all tokens that are not revoked.
SELECT prefix FROM tokens WHERE revoked_at IS NULL;

-- revoke_token --
-- Ends a token by its prefix.
UPDATE tokens SET revoked_at = :now WHERE prefix = :prefix AND revoked_at IS NULL;

-- token_generation --
-- Changes whenever a token is made or revoked.
SELECT COUNT(*) AS made, COUNT(revoked_at) AS revoked FROM tokens;

-- find_idempotency --
-- What an idempotency key was used for.
SELECT request_hash, sandbox_id, created_at FROM idempotency WHERE workspace = :workspace AND key = :key;

-- insert_idempotency --
-- Remembers a key; fails when it exists.
INSERT INTO idempotency (workspace, key, request_hash, sandbox_id, created_at)
VALUES (:workspace, :key, :request_hash, :sandbox_id, :created_at);

-- forget_idempotency --
-- Sets the key of a create that came to nothing free.
DELETE FROM idempotency WHERE sandbox_id = :id;

-- prune_idempotency --
-- Forgets keys older than a moment.
DELETE FROM idempotency WHERE created_at < :before;
