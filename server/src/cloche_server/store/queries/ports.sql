-- put_port --
-- What is said about a port, in place of what was said before.
INSERT INTO ports (sandbox_id, port, workspace, access, label, domain, username, password, host, created_at)
VALUES (:sandbox_id, :port, :workspace, :access, :label, :domain, :username, :password, :host, :created_at)
ON CONFLICT (sandbox_id, port) DO UPDATE SET access = excluded.access, label = excluded.label,
    domain = excluded.domain, username = excluded.username, password = excluded.password, host = excluded.host;

-- all_ports --
-- All of them.
SELECT * FROM ports ORDER BY sandbox_id, port;

-- delete_port --
-- Takes back what was said about a port.
DELETE FROM ports WHERE sandbox_id = :sandbox_id AND port = :port;

-- prune_ports --
-- Forgets what was said about ports of sandboxes that have ended.
DELETE FROM ports WHERE NOT EXISTS (
    SELECT 1 FROM sandboxes s WHERE s.id = ports.sandbox_id AND s.status <> 'deleted'
);
