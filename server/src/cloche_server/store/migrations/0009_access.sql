-- What a token may do, where, and until when. Tokens that were there before keep all rights.
ALTER TABLE tokens ADD COLUMN scope TEXT NOT NULL DEFAULT 'admin';
ALTER TABLE tokens ADD COLUMN sandbox_id TEXT;
ALTER TABLE tokens ADD COLUMN expires_at DOUBLE PRECISION;
CREATE INDEX tokens_by_workspace ON tokens (workspace, created_at);
