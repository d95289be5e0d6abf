"""What the tests on real machines share: a real server, a client for it, sandboxes, leak checks, fixtures."""
