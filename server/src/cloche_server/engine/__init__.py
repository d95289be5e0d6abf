"""Engines: drivers that run machines. QEMU is the first."""
