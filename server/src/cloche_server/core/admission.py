"""May another sandbox be made? A pure decision over what is used and what there is."""

from __future__ import annotations

from dataclasses import dataclass

from cloche_server.core.records import Resources


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator allows on this host. Sizes in MiB."""

    max_sandboxes: int
    memory_mb: int  # to be promised in all, overcommit included
    memory_reserve_mb: int  # of really available memory, never touched
    disk_mb: int  # to be promised in all, overcommit included
    disk_reserve_mb: int  # of really free disk, never touched
    overhead_mb: int  # what a machine costs beside its own memory


@dataclass(frozen=True, slots=True)
class Usage:
    """What is promised (pools included) and what the host has left. Sizes in MiB."""

    sandboxes: int
    memory_mb: int
    disk_mb: int
    available_memory_mb: int
    free_disk_mb: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not: the `resource` that is short, and a sentence for the caller."""

    resource: str
    message: str
    limit: int
    used: int


def admit(limits: Limits, usage: Usage, wanted: Resources) -> Refusal | None:
    """None when `wanted` fits beside `usage`, else the first reason why it does not."""
    if usage.sandboxes + 1 > limits.max_sandboxes:
        return Refusal(
            "sandboxes",
            f"this host runs {usage.sandboxes} sandboxes, its limit is {limits.max_sandboxes}",
            limits.max_sandboxes,
            usage.sandboxes,
        )
    memory = wanted.memory_mb + limits.overhead_mb
    if usage.memory_mb + memory > limits.memory_mb:
        return Refusal(
            "memory",
            f"{memory} MiB of memory are needed, {max(0, limits.memory_mb - usage.memory_mb)} MiB of the "
            f"{limits.memory_mb} MiB that may be promised are left",
            limits.memory_mb,
            usage.memory_mb,
        )
    # A restored machine starts with its overhead only; its memory fills as the guest writes.
    if usage.available_memory_mb - limits.overhead_mb < limits.memory_reserve_mb:
        return Refusal(
            "memory",
            f"only {usage.available_memory_mb} MiB of memory are free on this host, "
            f"{limits.memory_reserve_mb} MiB are kept in reserve",
            limits.memory_reserve_mb,
            usage.available_memory_mb,
        )
    if usage.disk_mb + wanted.disk_mb > limits.disk_mb:
        return Refusal(
            "disk",
            f"{wanted.disk_mb} MiB of disk are needed, {max(0, limits.disk_mb - usage.disk_mb)} MiB of the "
            f"{limits.disk_mb} MiB that may be promised are left",
            limits.disk_mb,
            usage.disk_mb,
        )
    if usage.free_disk_mb < limits.disk_reserve_mb:
        return Refusal(
            "disk",
            f"only {usage.free_disk_mb} MiB are free on the disk of this host, "
            f"{limits.disk_reserve_mb} MiB are kept in reserve",
            limits.disk_reserve_mb,
            usage.free_disk_mb,
        )
    return None
