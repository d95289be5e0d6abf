"""What this host and this QEMU can do: version, and whether KVM really runs a guest."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche_server.core.errors import ClocheError
from cloche_server.host import machine as host_machine
from cloche_server.host import process

MINIMUM_VERSION: Final = (8, 2)
_VERSION = re.compile(rb"version (\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class QemuFacts:
    """The binary and its version."""

    binary: str
    version: tuple[int, int, int]

    @property
    def version_text(self) -> str:
        return ".".join(str(part) for part in self.version)


@dataclass(frozen=True, slots=True)
class KvmFacts:
    """Whether KVM works here, and the sentence that says why (not)."""

    usable: bool
    reason: str


async def probe_qemu(binary: str) -> QemuFacts:
    """Raises `host.unsupported` when QEMU is missing or older than 8.2.

    Older ones open a private memory file read-write, so an escaped guest could write what all share.
    """
    path = shutil.which(binary)
    if path is None:
        raise ClocheError(
            "host.unsupported",
            f"{binary} is not installed; install the package qemu-system-x86 (on Debian 12 from backports)",
        )
    done = await process.run([path, "--version"], timeout=30)
    match = _VERSION.search(done.stdout)
    if match is None:
        raise ClocheError("host.unsupported", f"{path} does not tell its version")
    version = (int(match[1]), int(match[2]), int(match[3]))
    if version[:2] < MINIMUM_VERSION:
        raise ClocheError(
            "host.unsupported",
            f"QEMU {version[0]}.{version[1]} is too old, 8.2 is needed; on Debian 12 install it from backports",
        )
    return QemuFacts(path, version)


def kvm_obstacle() -> str | None:
    """Why KVM cannot work, as far as can be told without a guest; None when a guest must tell."""
    if not host_machine.cpu_flags() & {"vmx", "svm"}:
        return "the CPU shows neither vmx nor svm (virtualisation is off in the firmware, or not passed on by the host)"
    device = Path("/dev/kvm")
    try:
        if not stat.S_ISCHR(device.stat().st_mode):
            return "/dev/kvm is not a device"
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        return f"/dev/kvm cannot be opened ({error.strerror})"
    return None


async def probe_kvm(qemu: QemuFacts, guest_kernel: Path | None) -> KvmFacts:
    """Whether KVM runs a guest. `/dev/kvm` that opens is no proof: nested KVM may be emulated or broken,
    so a guest kernel is started and must come as far as its panic for want of a root file system.
    """
    obstacle = kvm_obstacle()
    if obstacle:
        return KvmFacts(False, obstacle)
    if guest_kernel is None:
        return KvmFacts(False, "there is no guest kernel yet to try KVM with; bake a template first")
    argv = [
        qemu.binary,
        *("-M", "microvm,acpi=on,isa-serial=on", "-accel", "kvm", "-cpu", "host", "-m", "256M"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"),
        *("-kernel", str(guest_kernel), "-append", "console=ttyS0 panic=-1 reboot=t"),
    ]
    try:
        done = await process.run(argv, timeout=20, check=False, max_output=1 << 20)
    except ClocheError:
        return KvmFacts(False, "a probe guest under KVM did not come to its end within 20 s")
    if b"Linux version" in done.stdout and b"Kernel panic" in done.stdout:
        return KvmFacts(True, "a probe guest ran under KVM")
    return KvmFacts(False, "a probe guest under KVM did not boot")


async def choose_accel(wanted: str, qemu: QemuFacts, guest_kernel: Path | None) -> tuple[str, str]:
    """`("kvm"|"tcg", reason)`. `wanted` is `auto`, `kvm` or `tcg`; an explicit choice is taken at its word,
    except that `kvm` without a usable device is refused (`host.unsupported`)."""
    if wanted == "tcg":
        return "tcg", "chosen by configuration"
    if wanted == "kvm":
        obstacle = await asyncio.to_thread(kvm_obstacle)
        if obstacle:
            raise ClocheError("host.unsupported", f"KVM was chosen by configuration, but {obstacle}")
        return "kvm", "chosen by configuration"
    facts = await probe_kvm(qemu, guest_kernel)
    return ("kvm" if facts.usable else "tcg"), facts.reason
