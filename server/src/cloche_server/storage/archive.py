"""Archives of snapshots: what is in one, and in which order.

A tar file in one zstd frame. `manifest.json` comes first and names every other member with its size and SHA-256, in
order; `end.json` comes last: an archive without it is not whole. Everything in an archive may be hostile, so a manifest
is taken apart field by field, and nothing of it becomes the name of a file.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cloche_server.core.command import check_env
from cloche_server.core.errors import ClocheError
from cloche_server.core.ids import is_sandbox_id, is_template_name
from cloche_server.core.records import SECRET_METADATA_PREFIX, ExecDefaults, Shape

FORMAT: Final = 1
KIND: Final = "cloche-snapshot"
MANIFEST: Final = "manifest.json"
END: Final = "end.json"
BLOCK: Final = 512
MANIFEST_MAX: Final = 4 << 20
END_MAX: Final = 4096
DEV_MAX: Final = 64 << 20
LAYERS_MAX: Final = 1000
TEMPLATE_FILES: Final = ("mem", "dev", "disk.qcow2")
BOOT_FILES: Final = ("kernel", "initrd", "root_image")
#: zstd may look back so far (2 to the power of): what decompressing takes in memory.
WINDOW_LOG: Final = 23
_DEPTH: Final = 8
_MIB: Final = 1 << 20
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_FINGERPRINT: Final = re.compile(r"[ -~]{1,300}")
_TEMPLATE_ID: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,120}")
_IMAGE: Final = re.compile(r"images/[A-Za-z0-9_-]{1,80}/[A-Za-z0-9_-]{1,80}\.raw|boot/[0-9a-f]{64}")
_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ArchivedTemplate:
    """What lies below a snapshot. `image`: the name of the root image where the archive was made, relative to the data
    directory; empty when the template is not in the archive."""

    id: str
    name: str
    digests: Mapping[str, str]
    shape: Shape
    disk_mb: int
    accel: str
    thaw: bool
    image: str = ""

    @property
    def origin(self) -> str:
        """One digest of all that tells this template from others."""
        known = [self.id, *(self.digests[name] for name in TEMPLATE_FILES)]
        return hashlib.sha256("\n".join(known).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Manifest:
    fingerprint: str
    shape: Shape
    disk_mb: int
    cold: bool
    page_count: int
    #: It holds memory and device state; else the disk only.
    memory: bool
    sandbox_id: str
    name: str | None
    created_at: float
    template_asked: str
    template: ArchivedTemplate
    #: Top first, as they are called in the headers of one another.
    layers: tuple[str, ...]
    members: tuple[Member, ...]
    defaults: ExecDefaults = field(default_factory=ExecDefaults)
    metadata: Mapping[str, str] = field(default_factory=dict)
    sha256: str = ""

    @property
    def with_template(self) -> bool:
        return bool(self.template.image)

    def member(self, name: str) -> Member:
        return next(one for one in self.members if one.name == name)


def bad(why: str) -> ClocheError:
    """`why` holds nothing from the archive."""
    return ClocheError("request.invalid", f"the archive cannot be imported: {why}")


def member_names(layers: int, *, with_template: bool, memory: bool) -> list[str]:
    """All members between the manifest and the end, in order."""
    names = ["snapshot/pages", "snapshot/dev"] if memory else []
    names += [f"layers/{number}.qcow2" for number in range(layers)]
    if with_template:
        names += [f"template/{name}" for name in TEMPLATE_FILES]
        names += [f"boot/{name}" for name in BOOT_FILES]
    return names


# ------------------------------------------------------------------ writing


def tar_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def end_of(manifest: bytes) -> bytes:
    """The last member."""
    return json.dumps({"complete": True, "manifest_sha256": hashlib.sha256(manifest).hexdigest()}).encode()


def shown_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """What the API would show: secrets do not leave the server."""
    return {key: value for key, value in metadata.items() if not key.startswith(SECRET_METADATA_PREFIX)}


# ------------------------------------------------------------------ reading


def read_tar_header(block: bytes) -> tuple[str, int]:
    """Name and size of a plain file. Raises `request.invalid` for anything else."""
    try:
        info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.HeaderError, ValueError, OverflowError):
        raise bad("it holds something that is no tar header") from None
    if info.type != tarfile.REGTYPE or info.linkname or info.size < 0:
        raise bad("it holds a member that is no plain file")
    return info.name, info.size


def parse_json(raw: bytes) -> Any:
    """JSON of bounded depth, UTF-8 only, no numbers that are none."""

    def refuse(_: str) -> Any:
        raise ValueError

    try:
        data = json.loads(raw.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError):
        raise bad("its description is not JSON") from None
    level: list[Any] = [data]
    for _ in range(_DEPTH):
        level = [
            item
            for node in level
            if isinstance(node, dict | list)
            for item in (node.values() if isinstance(node, dict) else node)
        ]
    if level:
        raise bad("its description is nested too deeply")
    return data


class _Fields:
    """The fields of an object of a manifest, each checked when it is taken."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise bad(f"{where} of its description is missing")
        self._data = data
        self._where = where

    def bad(self, name: str) -> ClocheError:
        return bad(f"{name} in {self._where} of its description is missing or not possible")

    def inside(self, name: str) -> _Fields:
        return _Fields(self._data.get(name), name)

    def number(self, name: str, low: int, high: int) -> int:
        value = self._data.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.bad(name)
        return value

    def seconds(self, name: str) -> float:
        value = self._data.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1e10:
            raise self.bad(name)
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._data.get(name, default)
        if not isinstance(value, bool):
            raise self.bad(name)
        return value

    def text(self, name: str, pattern: re.Pattern[str]) -> str:
        value = self._data.get(name)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self.bad(name)
        return value

    def words(self, name: str, most: int) -> str | None:
        """Text for people, or nothing."""
        value = self._data.get(name)
        if value is not None and (not isinstance(value, str) or len(value) > most or not _is_text(value)):
            raise self.bad(name)
        return value

    def listed(self, name: str, most: int) -> list[Any]:
        value = self._data.get(name)
        if not isinstance(value, list) or len(value) > most:
            raise self.bad(name)
        return value

    def mapping(self, name: str, entries: int, key: int, value: int) -> dict[str, str]:
        found = self._data.get(name)
        if not isinstance(found, dict) or len(found) > entries:
            raise self.bad(name)
        for one, text in found.items():
            if not isinstance(text, str) or not 0 < len(one) <= key or len(text) > value:
                raise self.bad(name)
            if not (_is_text(one) and _is_text(text)):
                raise self.bad(name)
        return dict(found)


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # half a character
        return False
    return True


def parse_manifest(raw: bytes) -> Manifest:
    """Raises `request.invalid`."""
    data = _Fields(parse_json(raw), "the whole")
    if data.number("format", 0, 1 << 31) != FORMAT or data.words("kind", 64) != KIND:
        raise bad("it was made by another release, or is no archive of a snapshot")
    one = data.inside("snapshot")
    template = _template(data.inside("template"))
    memory = one.flag("memory", True)  # of archives that were made when all had memory
    layers = [name for name in one.listed("layers", LAYERS_MAX) if isinstance(name, str) and is_sandbox_id(name)]
    if not layers or len(set(layers)) != len(one.listed("layers", LAYERS_MAX)):
        raise one.bad("layers")
    found = Manifest(
        fingerprint=data.text("fingerprint", _FINGERPRINT),
        shape=_shape(one),
        disk_mb=one.number("disk_mb", 1, 1 << 30),
        cold=one.flag("cold"),
        page_count=one.number("page_count", 0, 1 << 40),
        memory=memory,
        sandbox_id=one.text("sandbox_id", re.compile(r"[a-z0-9]{8,56}")),
        name=one.words("name", 256),
        created_at=one.seconds("created_at"),
        template_asked=one.words("template", 256) or template.name,
        template=template,
        layers=tuple(layers),
        members=_members(data, len(layers), with_template=bool(template.image), memory=memory),
        defaults=_defaults(one.inside("defaults")),
        metadata=shown_metadata(one.mapping("metadata", 64, 128, 4096)),
        sha256=hashlib.sha256(raw).hexdigest(),
    )
    if found.shape != template.shape:
        raise one.bad("cpus or memory_mb")
    if not found.memory and not (found.cold and found.page_count == 0):
        raise one.bad("memory")
    _check_sizes(found)
    return found


def _shape(fields: _Fields) -> Shape:
    return Shape(fields.number("cpus", 1, 1024), fields.number("memory_mb", 1, 1 << 24))


def _template(fields: _Fields) -> ArchivedTemplate:
    digests = fields.inside("digests")
    name = fields.words("name", 63) or ""
    if not is_template_name(name):
        raise fields.bad("name")
    return ArchivedTemplate(
        id=fields.text("id", _TEMPLATE_ID),
        name=name,
        digests={one: digests.text(one, _DIGEST) for one in TEMPLATE_FILES},
        shape=_shape(fields),
        disk_mb=fields.number("disk_mb", 1, 1 << 30),
        accel=fields.text("accel", re.compile("kvm|tcg")),
        thaw=fields.flag("thaw"),
        image=fields.text("image", _IMAGE) if fields.words("image", 256) else "",
    )


def _defaults(fields: _Fields) -> ExecDefaults:
    env = fields.mapping("env", 4096, 4096, MANIFEST_MAX)
    try:
        check_env(env)
    except ClocheError:
        raise fields.bad("env") from None
    cwd, user = fields.words("cwd", 4095), fields.words("user", 256)
    if cwd is not None and (not cwd.startswith("/") or "\0" in cwd):
        raise fields.bad("cwd")
    if user is not None and _CONTROLS.search(user):
        raise fields.bad("user")
    return ExecDefaults(env, cwd, user)


def _members(data: _Fields, layers: int, *, with_template: bool, memory: bool) -> tuple[Member, ...]:
    expected = member_names(layers, with_template=with_template, memory=memory)
    listed = [_Fields(item, "members") for item in data.listed("members", len(expected))]
    names = [one.words("name", 256) for one in listed]
    if names != expected:
        raise bad("its members are not those of a snapshot")
    return tuple(
        Member(name, one.number("size", 1, 1 << 50), one.text("sha256", _DIGEST))
        for name, one in zip(expected, listed, strict=True)
    )


def _check_sizes(found: Manifest) -> None:
    memory, disk = found.shape.memory_mb * _MIB, found.disk_mb * _MIB
    most = {
        "snapshot/pages": memory + memory // 512 + (1 << 16),
        "snapshot/dev": DEV_MAX,
        "template/mem": memory,
        "template/dev": DEV_MAX,
        "boot/kernel": 1 << 30,
        "boot/initrd": 1 << 30,
        "boot/root_image": found.template.disk_mb * _MIB,
    }
    for member in found.members:
        # A layer may be a little larger than its disk, by the tables in it.
        if member.size > most.get(member.name, disk + disk // 8 + (64 << 20)):
            raise bad("a member is larger than its snapshot could be")
        kept = member.name.removeprefix("template/")
        if kept != member.name and member.sha256 != found.template.digests[kept]:
            raise bad("the digests in its description differ")
    if found.with_template and found.member("template/mem").size != memory:
        raise bad("the memory of its template has another size than the snapshot")
