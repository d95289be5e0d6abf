"""netd: its own process, without rights, that carries what guests send (`docs/network.md`)."""
