"""HTTP in: the JSON API. Knows the use cases and the core, no adapter."""
