"""SSH to sandboxes: shells, commands, file transfers and forwarded ports. See docs/ssh.md."""
