"""The command line of QEMU as a pure function of a plan."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloche_server.core.network import GUEST_MAC
from cloche_server.engine.qemu.nodes import rw_tag

#: Name of the virtio-serial port of the agent, host and guest side.
AGENT_PORT = "cloche.agent.0"
#: Named, so that a snapshot meets the same CPU again. Under emulation features have a price: with erms and fsrm the
#: guest's kernel copies and clears memory byte by byte (a fifth of all instructions of fork and exec), smap splits
#: the TLB of the kernel, la57 makes each page walk longer, pku each switch between processes.
CPU_MODEL = {"tcg": "max,-erms,-fsrm,-smap,-la57,-pku", "kvm": "host"}
#: What the guest's kernel does without under emulation: guards against speculation, which do not guard translated
#: code; the clearing of memory that is written before anybody reads it; pressure figures at each switch of tasks;
#: security modules that have no policy here. The wall is the emulator, not this kernel. The last word becomes a
#: variable of process 1, whose Go runtime then does not interrupt its goroutines by signals, as it does after 10 ms.
TCG_KERNEL_WORDS = (
    "mitigations=off",
    "init_on_alloc=0",
    "psi=0",
    "lsm=landlock,yama",
    "GODEBUG=asyncpreemptoff=1",
)


@dataclass(frozen=True, slots=True)
class ColdBoot:
    """What a machine boots from when there is no snapshot yet."""

    kernel: Path
    initrd: Path
    tsc_khz: int | None


@dataclass(frozen=True, slots=True)
class DiskFile:
    """One file of a disk. `fds`: QEMU's descriptors of it: of the top one to write and one to read, which is what is
    left of it when another layer has been laid over it; of all others one to read."""

    driver: str
    fds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VmPlan:
    """One machine. It opens nothing by name but its memory and what it boots from; all else it inherits.

    `qmp_fd` and `agent_fd` are listening Unix sockets, `console_fd` is a file to append to. `layers`: its disk, top
    first; `node`: what QEMU calls the top layer.
    `boot` set: a cold boot. `boot` None: a machine that waits for device state.
    """

    binary: str
    name: str
    accel: str
    cpus: int
    memory_mb: int
    memory: Path
    node: str
    layers: tuple[DiskFile, ...]
    tcg_buffer_mb: int
    qmp_fd: int
    agent_fd: int
    console_fd: int
    boot: ColdBoot | None = None
    #: An open tap device that QEMU inherits; None: a network card whose cable leads nowhere.
    nic_fd: int | None = None
    #: Writes its memory to the file `memory`, which a bake keeps; all others only read it.
    keeps_memory: bool = False


#: Set of descriptors of the console's log; those of the disk follow.
_CONSOLE_SET = 1
_DISK_SETS = 2


def build_argv(plan: VmPlan) -> list[str]:
    """The argv for `plan`."""
    return [*_machine(plan), *_host_side(plan), *_devices(plan), *_start(plan)]


def _machine(plan: VmPlan) -> list[str]:
    return [
        plan.binary,
        *("-name", f"guest={plan.name}"),
        *("-M", "microvm,acpi=on,rtc=on,isa-serial=on,suppress-vmdesc=on,memory-backend=m0"),
        *("-accel", _accel(plan)),
        *("-cpu", CPU_MODEL[plan.accel]),
        *("-smp", str(plan.cpus)),
        *("-m", f"{plan.memory_mb}M"),
        *("-object", _memory(plan)),
        # Device state must be a plain stream without the configuration section.
        *("-global", "migration.send-configuration=off"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
    ]


def _host_side(plan: VmPlan) -> list[str]:
    return [
        *_add_fds(plan),
        # Appended to, so that the host may cut the file while the guest goes on writing.
        *("-chardev", f"file,id=console,path={fd_name(_CONSOLE_SET)},append=on"),
        *("-serial", "chardev:console"),
        # Both sockets are bound and listening before QEMU starts: nobody ever polls for a path.
        *("-chardev", f"socket,id=qmp,fd={plan.qmp_fd},server=on,wait=off"),
        *("-mon", "chardev=qmp,mode=control"),
        *("-blockdev", json.dumps(_blockdev(plan), separators=(",", ":"))),
        # A full host disk stops the machine instead of damaging its file system; it goes on later.
        *("-device", f"virtio-blk-device,drive={plan.node},werror=enospc,rerror=report"),
    ]


def _devices(plan: VmPlan) -> list[str]:
    return [
        *("-device", "virtio-serial-device"),
        *("-chardev", f"socket,id=agent,fd={plan.agent_fd},server=on,wait=off"),
        *("-device", f"virtserialport,chardev=agent,name={AGENT_PORT}"),
        *("-device", "virtio-rng-device"),
        *("-netdev", "hubport,id=n0,hubid=0" if plan.nic_fd is None else f"tap,id=n0,fd={plan.nic_fd}"),
        *("-device", f"virtio-net-device,netdev=n0,mac={GUEST_MAC}"),
    ]


def _start(plan: VmPlan) -> list[str]:
    if plan.boot is None:
        return ["-incoming", "defer"]
    return ["-kernel", str(plan.boot.kernel), "-initrd", str(plan.boot.initrd), "-append", _append(plan)]


def fd_name(fdset: int) -> str:
    """The name by which QEMU opens a descriptor that it was given."""
    return f"/dev/fdset/{fdset}"


def _add_fds(plan: VmPlan) -> list[str]:
    words = ["-add-fd", f"fd={plan.console_fd},set={_CONSOLE_SET}"]
    for number, layer in enumerate(plan.layers, _DISK_SETS):
        *write, read = layer.fds
        words += [word for fd in write for word in ("-add-fd", f"fd={fd},set={number},opaque={rw_tag(plan.node)}")]
        words += ["-add-fd", f"fd={read},set={number}"]
    return words


def layer_options(driver: str, fdset: int, *, node: str | None = None) -> dict[str, Any]:
    """A file of a disk as QEMU's block layer wants it described."""
    named = {"node-name": node} if node else {"read-only": True}
    return {"driver": driver, **named, "discard": "unmap", "file": {"driver": "file", "filename": fd_name(fdset)}}


def _blockdev(plan: VmPlan) -> dict[str, Any]:
    """All layers are named here, so QEMU follows no name that stands in one of the files."""
    described: dict[str, Any] | None = None
    for number, layer in reversed(list(enumerate(plan.layers, _DISK_SETS))):
        top = number == _DISK_SETS
        options = layer_options(layer.driver, number, node=plan.node if top else None)
        if layer.driver == "qcow2":
            options["backing"] = described
        described = options
    assert described is not None, "a machine has a disk"
    return described


def machine_digest(accel: str) -> str:
    """Eight hex digits that change with anything in the command line a snapshot depends on: a template baked
    under another one is baked anew. How files come to QEMU is no part of it."""
    boot = ColdBoot(Path("kernel"), Path("initrd"), tsc_khz=1)
    plan = VmPlan("qemu", "any", accel, 1, 1, Path("memory"), "any", (), 1, 0, 0, 0, boot, keeps_memory=True)
    words = [*_machine(plan), *"virtio-blk-device", *_devices(plan), *_start(plan)]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]


def _accel(plan: VmPlan) -> str:
    if plan.accel == "kvm":
        return "kvm"
    thread = "single" if plan.cpus == 1 else "multi"
    return f"tcg,thread={thread},tb-size={plan.tcg_buffer_mb}"


def _memory(plan: VmPlan) -> str:
    # A clone opens the file read-only and maps it privately: no guest can write what others share.
    sharing = "share=on" if plan.keeps_memory else "share=off,readonly=on,rom=off"
    return f"memory-backend-file,id=m0,size={plan.memory_mb}M,mem-path={plan.memory},{sharing}"


def _append(plan: VmPlan) -> str:
    assert plan.boot is not None
    words = ["console=ttyS0", "reboot=t", "panic=-1", "quiet", "random.trust_cpu=on"]
    if plan.accel == "tcg":
        words += TCG_KERNEL_WORDS
    if plan.accel == "tcg" and plan.boot.tsc_khz:
        # On a busy host the kernel cannot calibrate its clock under emulation, and hangs; nor may its
        # watchdog judge the counter, or it falls back to jiffies: 250 interrupts a second, and time drifts.
        words += [f"tsc_early_khz={plan.boot.tsc_khz}", "tsc=reliable"]
    return " ".join(words)
