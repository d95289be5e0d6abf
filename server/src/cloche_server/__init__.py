"""Cloche: self-hosted microVM sandboxes for AI agents. This package is the server."""

__version__ = "0.1.0"
