"""Writes `docs/security-cases.md`."""

from __future__ import annotations

from test_bypass import TABLE, table

if __name__ == "__main__":
    TABLE.write_text(table(), "utf-8")
