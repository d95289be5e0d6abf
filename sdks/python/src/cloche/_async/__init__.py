"""The asynchronous client. The blocking client in `_sync` is generated from these files."""
