"""Pure decisions and records: standard library only, no I/O, no clock, no async."""
