"""`cloche-server doctor`: what this host can do, and what to do about the rest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict

import click

from cloche_server import __version__
from cloche_server.app.throwaway import probe_throwaway
from cloche_server.cli.common import data_option, run_async, settings_from
from cloche_server.cli.doctor_previews import examine_previews
from cloche_server.cli.finding import FAIL, OK, WARN, Finding
from cloche_server.core.errors import ClocheError
from cloche_server.core.probes import Probe
from cloche_server.engine.qemu.probe import choose_accel, kvm_obstacle, probe_kvm, probe_qemu
from cloche_server.host import cgroups, network
from cloche_server.host import machine as host_machine
from cloche_server.host.jail import Launcher
from cloche_server.settings import Settings
from cloche_server.storage.kernel import find_kernel
from cloche_server.storage.locate import find_agent
from cloche_server.storage.templates import TemplateCatalog
from cloche_server.wiring import build_engine, build_network, build_wall, prepare_data


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--probe", is_flag=True, help="Also make a throw-away sandbox and try to get out of it.")
@data_option
def doctor(as_json: bool, probe: bool, data: str | None) -> None:
    """Say what this host can do. Exit code 1 when sandboxes cannot run here, or when a probe got through."""
    settings = settings_from(data=data, log_level="error")
    findings = run_async(examine(settings))
    if probe and not any(finding.level == FAIL for finding in findings):
        findings += run_async(probe_host(settings))
    if as_json:
        click.echo(json.dumps({"version": __version__, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        width = max(12, *(len(finding.name) for finding in findings))
        for finding in findings:
            click.echo(f"{finding.level:5} {finding.name:{width}} {finding.found}")
            if finding.advice:
                click.echo(f"{'':{width + 6}} → {finding.advice}")
    if any(finding.level == FAIL for finding in findings):
        sys.exit(1)


async def examine(settings: Settings) -> list[Finding]:
    """All findings, in the order in which they matter."""
    checks: list[Callable[[Settings], Awaitable[list[Finding]]]] = [
        _system,
        _qemu,
        _jail,
        _resources,
        _kernel_parts,
        _baked,
        examine_previews,
    ]
    found: list[Finding] = []
    for check in checks:
        found += await check(settings)
    return found


async def _system(_: Settings) -> list[Finding]:
    arch = host_machine.architecture()
    flags = host_machine.cpu_flags() & {"vmx", "svm", "ept", "npt"}
    virtual = " ".join(sorted(flags)) or "no virtualisation flags"
    root = os.geteuid() == 0
    return [
        Finding("arch", OK if arch == "x86_64" else FAIL, arch, "" if arch == "x86_64" else "use an x86_64 host"),
        Finding("kernel", OK, host_machine.kernel()),
        Finding(
            "cpu",
            OK,
            f"{host_machine.cpu_count()} x {host_machine.cpu_model()} ({virtual})",
        ),
        Finding(
            "root",
            OK if root else FAIL,
            "running as root" if root else "not root",
            "" if root else "run as root",
        ),
    ]


async def _qemu(settings: Settings) -> list[Finding]:
    try:
        facts = await probe_qemu(settings.qemu)
    except ClocheError as error:
        return [Finding("qemu", FAIL, error.message, "install QEMU 8.2 or later")]
    kernel = await asyncio.to_thread(find_kernel, settings.data)
    kvm = await probe_kvm(facts, kernel.vmlinuz if kernel else None)
    found = [
        Finding("qemu", OK, f"{facts.binary} {facts.version_text}"),
        Finding(
            "kvm",
            OK if kvm.usable else WARN,
            kvm.reason,
            ""
            if kvm.usable
            else "sandboxes run under software emulation: about 12 times slower, and a weaker boundary",
        ),
    ]
    try:
        accel, reason = await choose_accel(settings.accel, facts, kernel.vmlinuz if kernel else None)
        found.append(Finding("accel", OK, f"{accel} ({reason})"))
    except ClocheError as error:
        found.append(Finding("accel", FAIL, error.message, "set CLOCHE_ACCEL=auto"))
    return found


async def _jail(settings: Settings) -> list[Finding]:
    if settings.jail == "off":
        advice = "whoever breaks out of QEMU has the host; take CLOCHE_JAIL=off away"
        return [Finding("jail", WARN, "QEMU runs as root, as it was configured", advice)]
    if os.geteuid() != 0:
        return []
    launcher = Launcher()
    try:
        facts = await probe_qemu(settings.qemu)
        accel = "tcg" if kvm_obstacle() else "kvm"
        wall = await build_wall(settings, facts.binary, accel, launcher)
    except ClocheError as error:
        return [Finding("jail", FAIL, error.message, "mend that, or set CLOCHE_JAIL=off and keep nothing else here")]
    finally:
        launcher.close()
    found = [Finding("jail", OK, f"QEMU runs in one, as a user from {wall.uids.first + 1} on")]
    if failures := await asyncio.to_thread(wall.groups.trial):
        advice = "sandboxes run without these limits; where this server runs in a container, give it the host's cgroups"
        found.append(Finding("limits", WARN, "; ".join(failures), advice))
    return found


async def probe_host(settings: Settings) -> list[Finding]:
    """What a throw-away sandbox of the first baked template could not get hold of."""
    await asyncio.to_thread(prepare_data, settings.data)
    engine, _ = await build_engine(settings)
    with contextlib.closing(engine):
        metas = await asyncio.to_thread(TemplateCatalog(settings.data).all)
        fitting = [meta for meta in metas if meta.fingerprint == engine.fingerprint]
        if not fitting:
            advice = "run `cloche-server template bake base`"
            return [Finding("probe", FAIL, "no template is baked that a sandbox could be made of", advice)]
        try:
            probes = await probe_throwaway(engine, build_network(settings), settings.data, fitting[0])
        except ClocheError as error:
            return [Finding("probe", FAIL, f"no sandbox could be made: {error.message}")]
    return [
        Finding(one.name, OK if one.held else FAIL, one.detail)
        if isinstance(one, Probe)
        else Finding(one.name, WARN, f"not tried: {one.reason}")
        for one in probes
    ]


async def _resources(settings: Settings) -> list[Finding]:
    memory = host_machine.memory()
    place = settings.data
    while not place.exists():
        place = place.parent
    disk = host_machine.disk(place)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    low_memory = memory.available_mb < settings.memory_reserve_mb + 512
    low_disk = disk.free_mb < settings.disk_reserve_mb + 1024
    return [
        Finding(
            "memory",
            WARN if low_memory else OK,
            f"{memory.available_mb} of {memory.total_mb} MiB available",
            "creates will be refused; free memory, or lower CLOCHE_MEMORY_RESERVE_MB" if low_memory else "",
        ),
        Finding(
            "disk",
            WARN if low_disk else OK,
            f"{disk.free_mb} of {disk.total_mb} MiB free below {place}",
            "creates will be refused; free disk, or lower CLOCHE_DISK_RESERVE_MB" if low_disk else "",
        ),
        Finding(
            "files",
            OK if files >= 4096 else WARN,
            f"at most {files} open files",
            "" if files >= 4096 else "raise the limit (ulimit -n) to 4096 or more; each sandbox takes about 4",
        ),
    ]


async def _kernel_parts(_: Settings) -> list[Finding]:
    groups = cgroups.probe()
    tap, nft = network.tap_obstacle(), network.nft_obstacle()
    return [
        Finding(
            "cgroups",
            OK if not groups.missing else WARN,
            f"version {groups.version}: {' '.join(groups.controllers) or 'none'}",
            f"the controllers {' '.join(groups.missing)} are missing: no limits per sandbox" if groups.missing else "",
        ),
        Finding(
            "tap",
            OK if tap is None else WARN,
            tap or "tap devices can be made",
            "load the module tun" if tap else "",
        ),
        Finding(
            "nftables",
            OK if nft is None else WARN,
            nft or "nft is installed",
            "install nftables" if nft else "",
        ),
    ]


async def _baked(settings: Settings) -> list[Finding]:
    found = []
    try:
        found.append(Finding("agent", OK, str(find_agent(settings.agent))))
    except ClocheError as error:
        found.append(Finding("agent", WARN, error.message, "run ./quickstart"))
    catalog = TemplateCatalog(settings.data)
    metas = await asyncio.to_thread(catalog.all)
    if not metas:
        found.append(Finding("templates", WARN, "none is baked", "run `cloche-server template bake base`"))
    for meta in metas:
        try:
            await asyncio.to_thread(catalog.check, meta)
            found.append(Finding("template", OK, meta.template.id))
        except ClocheError as error:
            found.append(
                Finding("template", FAIL, error.message, f"run `cloche-server template bake {meta.template.name}`")
            )
    return found
