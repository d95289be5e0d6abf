"""Whether this machine can give a sandbox a network: tap devices and nftables."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def tap_obstacle() -> str | None:
    """Why no tap device can be made, or None."""
    device = Path("/dev/net/tun")
    if not device.exists():
        return "/dev/net/tun is missing"
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun cannot be opened ({error.strerror})"
    return None


def nft_obstacle() -> str | None:
    """Why nftables cannot be used, or None."""
    if shutil.which("nft") is None:
        return "the program nft is not installed (package nftables)"
    return None
