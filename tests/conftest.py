"""Fixtures for tests on real machines come from `kit`; other tests have their own beside them."""

pytest_plugins = ["kit.plugin"]
