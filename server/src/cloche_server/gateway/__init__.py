"""HTTP from outside to a port of a sandbox."""
