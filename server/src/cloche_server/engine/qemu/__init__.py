"""The QEMU driver: a microvm per sandbox, restored from a snapshot."""
