"""The slots of sandboxes on the host, and the link to netd."""
