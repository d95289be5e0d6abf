"""Settings: one declaration per setting gives its environment name, flag, default, range and text.

Precedence: flag, then environment (`CLOCHE_*`), then the TOML file (`CLOCHE_CONFIG`, else
`/etc/cloche/cloche.toml` when it exists), then the default. An unknown `CLOCHE_*` variable or TOML key
is an error, so that a typing mistake never runs silently with a default.
`docs/reference/settings.md` is generated from this file.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cloche_server import settings_together

PREFIX: Final = "CLOCHE_"
DEFAULT_CONFIG_FILE: Final = Path("/etc/cloche/cloche.toml")
#: Variables with our prefix that belong to clients, to the set-up scripts or to tests, not to the server.
FOREIGN_VARIABLES: Final = frozenset(
    {
        "CLOCHE_API_URL",
        "CLOCHE_API_KEY",
        "CLOCHE_CONFIG",
        "CLOCHE_GUEST_SUITE",
        "CLOCHE_GUEST_MIRROR",
    }
)
MAX_DATA_DIR_LENGTH: Final = settings_together.MAX_DATA_DIR_LENGTH


class SettingsError(ValueError):
    """A setting is unknown or out of range; the message names it and says what is allowed."""


def _setting(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of the server. Sizes in MiB, durations in seconds."""

    host: str = _setting("127.0.0.1", "Address the API listens on.")
    port: int = _setting(8600, "TCP port of the API; 0 takes a free one.", low=0, high=65535)
    data: Path = _setting(
        Path("/var/lib/cloche"),
        f"Data directory: database, templates, sandboxes. At most {MAX_DATA_DIR_LENGTH} characters long.",
    )
    log_format: str = _setting(
        "auto", "Log format; `auto` is `console` on a terminal.", choices=("auto", "json", "console")
    )
    log_level: str = _setting("info", "Lowest level that is logged.", choices=("debug", "info", "warning", "error"))
    accel: str = _setting(
        "auto",
        "Acceleration. `auto` takes KVM only where a probe guest really runs.",
        choices=("auto", "kvm", "tcg"),
    )
    qemu: str = _setting("qemu-system-x86_64", "QEMU binary, a name on PATH or a path. Version 8.2 or later.")
    jail: str = _setting(
        "on",
        "Whether each QEMU runs in a jail: its own user, namespaces and root, no privileges. `off` runs them as root: "
        "whoever breaks out of one has the host.",
        choices=("on", "off"),
    )
    uid_base: int = _setting(
        1_600_000_000,
        "First of the user ids that jailed processes get; this and the next 536870912 must be nobody else's, as user "
        "and as group ids.",
        low=65536,
        high=3_600_000_000,
    )
    agent: Path | None = _setting(None, "Guest agent binary; unset looks beside the checkout and in `/usr/lib/cloche`.")
    recipes: Path | None = _setting(None, "Folder of template recipes; unset looks beside the checkout.")
    tcg_buffer_mb: int = _setting(128, "Translation cache of each machine under TCG.", low=32, high=1024)
    default_cpus: int = _setting(1, "vCPUs of a sandbox when the caller names none.", low=1, high=64)
    default_memory_mb: int = _setting(256, "Memory of a sandbox when the caller names none.", low=128, high=1048576)
    max_cpus: int = _setting(8, "Most vCPUs one sandbox may have.", low=1, high=64)
    max_memory_mb: int = _setting(16384, "Most memory one sandbox may have.", low=128, high=1048576)
    max_disk_mb: int = _setting(65536, "Largest disk one sandbox may have.", low=1024, high=1048576)
    max_disk_mb_per_second: int = _setting(
        0,
        "Most MiB per second that one sandbox reads, and writes, on the disk of the host; 0 = no limit.",
        low=0,
        high=1048576,
    )
    max_sandboxes: int = _setting(500, "Most sandboxes at once, pools included.", low=1, high=100000)
    memory_overcommit: float = _setting(
        2.0, "How much of the host's memory may be promised in all (2.0 = twice).", low=0.1, high=100
    )
    memory_reserve_mb: int = _setting(1024, "Free memory that is never given to sandboxes.", low=0, high=1048576)
    disk_overcommit: float = _setting(
        20.0, "How much of the data disk may be promised in all; disks are sparse.", low=0.1, high=1000
    )
    disk_reserve_mb: int = _setting(2048, "Free disk that is never given to sandboxes.", low=0, high=1048576)
    pool_template: str = _setting(
        "base,code-interpreter",
        "Templates the pools are filled with, those of them that are baked, with commas between; `<workspace>/<name>` "
        "for one that was promoted; empty switches both off.",
    )
    pool_launched: int = _setting(2, "Launched processes of each kept waiting for a restore.", low=0, high=1000)
    pool_warm: int = _setting(2, "Restored and warmed sandboxes of each kept ready.", low=0, high=1000)
    pool_practice_seconds: int = _setting(
        1,
        "Quiet seconds after which the warm ones run Python once, so that its next start is quick; 0 = never.",
        low=0,
        high=3600,
    )
    parallel_boots: int = _setting(4, "Machines started at the same time; more wait their turn.", low=1, high=256)
    default_ttl_seconds: int = _setting(3600, "TTL when the caller names none; 0 = none.", low=0, high=315360000)
    max_ttl_seconds: int = _setting(0, "Longest TTL a caller may ask for; 0 = no limit.", low=0, high=315360000)
    max_lifetime_seconds: int = _setting(
        0, "Longest life of a sandbox, which no TTL, resume or start passes; 0 = no limit.", low=0, high=315360000
    )
    network: str = _setting(
        "on", "Whether sandboxes have a network at all; it needs /dev/net/tun and nftables.", choices=("on", "off")
    )
    network_default: str = _setting(
        "open",
        "Mode of a sandbox whose caller names none: `open` reaches public addresses only.",
        choices=("none", "open"),
    )
    network_prepared: int = _setting(4, "Network slots kept ready, so that a create need not wait.", low=0, high=1000)
    network_resolvers: str = _setting(
        "", "Addresses of the name servers that are asked for sandboxes, with commas; empty: those of this host."
    )
    network_never: str = _setting(
        "127.0.0.0/8,::1/128,169.254.0.0/16,fe80::/10",
        "Networks that no rule of a sandbox opens, with commas. Others around this host are open to whoever writes a "
        "rule for them: name them here if tenants are not trusted with that.",
    )
    network_ca: Path | None = _setting(
        None, "Authorities (PEM) that servers are trusted by when a secret goes to them, besides those of this host."
    )
    network_proxy: str = _setting(
        "",
        "Proxy for all that sandboxes reach, `http://` or `socks5://` with user and password; give it in the "
        "environment or the file, because everybody on the host can read command lines.",
    )
    exec_default_timeout: int = _setting(3600, "Timeout of a command when the caller names none.", low=1, high=31536000)
    exec_max_timeout: int = _setting(86400, "Longest timeout of a command.", low=1, high=31536000)
    run_parallel: int = _setting(0, "One-shot runs that go on at once; 0: two for each CPU.", low=0, high=1000)
    run_queue: int = _setting(500, "One-shot runs of one workspace that may wait for their turn.", low=1, high=100000)
    run_queue_seconds: float = _setting(
        120.0, "How long a one-shot run waits for room on the host before it is refused.", low=0, high=86400
    )
    run_keep_hours: float = _setting(24.0, "How long results of runs nobody waited for are kept.", low=0.01, high=8760)
    terminal_linger: int = _setting(
        600,
        "How long the shell of a terminal lives on when its client has gone, unless the client says how long.",
        low=1,
        high=604800,
    )
    max_import_mb: int = _setting(
        16384,
        "Largest archive that may be imported, unpacked; 0 refuses all imports. Without jails (`jail = off`) set that: "
        "whoever made an archive could then have the host.",
        low=0,
        high=16777216,
    )
    deleted_retention: int = _setting(86400, "How long the record of a deleted sandbox is kept.", low=60, high=31536000)
    events_keep_days: float = _setting(7.0, "How many days events stay readable.", low=0.01, high=3650)
    events_keep: int = _setting(100_000, "Most events that are kept; older ones go first.", low=1000, high=100_000_000)
    webhook_private: bool = _setting(
        False, "Whether webhooks may go to addresses that are not public: this host and the networks around it."
    )
    secret_key_file: Path | None = _setting(
        None,
        "File with the key that secrets are encrypted with: 64 hexadecimal digits. It has to exist; unset takes "
        "`secret.key` in the data directory, which is made.",
    )
    usage_keep_days: int = _setting(90, "How long the usage of a deleted sandbox is kept, in days.", low=1, high=36500)
    price_currency: str = _setting("USD", "Currency of the prices; it is only shown.")
    price_cpu_hour: float = _setting(0.0, "Price of an hour of active CPU time; 0 = none.", low=0, high=1e9)
    price_memory_gib_hour: float = _setting(
        0.0, "Price of a GiB of memory that is provisioned for an hour; 0 = none.", low=0, high=1e9
    )
    price_disk_gib_month: float = _setting(
        0.0, "Price of a GiB on the disk of the host for 30 days; 0 = none.", low=0, high=1e9
    )
    rate_limit_per_minute: int = _setting(
        30_000, "Requests a token may send in a minute, on average; 0 = no limit.", low=0, high=10_000_000
    )
    rate_limit_burst: int = _setting(2000, "Requests a token may send at once.", low=1, high=1_000_000)
    auth_failures_per_minute: int = _setting(
        300,
        "Requests without a valid token from one address that are told so in a minute; 0 = all.",
        low=0,
        high=1_000_000,
    )
    open_requests_per_workspace: int = _setting(
        2000, "Most requests of a workspace that are open at once, streams included; 0 = no limit.", low=0, high=10**6
    )
    open_requests_per_sandbox: int = _setting(500, "The same for one sandbox; 0 = no limit.", low=0, high=10**6)
    max_json_kb: int = _setting(
        1024, "Largest JSON body of a request, but those of commands, in KiB.", low=16, high=65536
    )
    max_exec_body_mb: int = _setting(16, "Largest JSON body of a command with its input.", low=1, high=256)
    max_header_kb: int = _setting(64, "Most that request line and headers may be, in KiB.", low=8, high=1024)
    header_timeout: float = _setting(30.0, "How long request line and headers may take to come.", low=1, high=600)
    body_timeout: float = _setting(
        60.0, "How long a JSON body may take to come; uploads are not limited.", low=1, high=3600
    )
    cors_origins: str = _setting(
        "",
        "Origins whose pages may call the API, such as `https://app.example.com`, separated by commas; empty = none.",
    )
    allowed_hosts: str = _setting(
        "",
        "Names the server answers under, separated by commas, `*.example.com` for all below; empty = any with a token, "
        "and only loopback names without one while it listens on loopback.",
    )
    audit_max_mb: int = _setting(
        64, "Most that the audit log takes, its older parts included; 0 = none is kept.", low=0, high=65536
    )
    preview_port: int = _setting(
        8601, "TCP port on which previews are served; 0 takes a free one, -1 serves none.", low=-1, high=65535
    )
    preview_host: str = _setting("", "Address previews are served on; empty: that of the API.")
    preview_domain: str = _setting(
        "localhost", "Domain whose names `<port>-<sandbox id>.<domain>` lead to this server. `*.localhost` always does."
    )
    preview_url: str = _setting(
        "",
        "How clients reach previews when that is not by port and domain, because of a proxy before them: "
        "`https://preview.example.org`, where names stand below the domain of this address.",
    )
    preview_cert: Path | None = _setting(None, "Certificate chain (PEM) for previews; read again when it changes.")
    preview_key: Path | None = _setting(None, "Its private key (PEM).")
    preview_acme: str = _setting("", "ACME directory (`https://…`) to get certificates for previews from; empty: none.")
    preview_acme_email: str = _setting("", "Address of mail that the authority may write to.")
    preview_acme_agree: bool = _setting(False, "Whether you agree to the terms of service of the authority; needed.")
    preview_acme_ca: Path | None = _setting(None, "Authorities (PEM) that the ACME server is trusted by; unset: usual.")
    preview_acme_port: int = _setting(
        80, "TCP port on which the authority's proof (HTTP-01) is answered, -1 for none.", low=-1, high=65535
    )
    preview_acme_hook: str = _setting("", "Command that sets TXT records (DNS-01), for a wildcard certificate.")
    preview_access: str = _setting(
        "public",
        "Who may use a port about which nothing was said: whoever knows the id, or who has a token.",
        choices=("public", "token"),
    )
    preview_connections: int = _setting(200, "Most connections to ports of one sandbox at once.", low=1, high=500)
    preview_workspace_connections: int = _setting(1000, "The same for a whole workspace.", low=1, high=4000)
    preview_requests_per_minute: int = _setting(30_000, "Requests to one sandbox; 0 = no limit.", low=0, high=10**7)
    preview_requests_burst: int = _setting(3000, "Requests to one sandbox at once.", low=1, high=10**6)
    preview_failures_per_minute: int = _setting(
        30, "Wrong tokens and passwords from one address at one sandbox; 0 = no limit.", low=0, high=10**6
    )
    preview_timeout: float = _setting(
        300.0, "How long a server in a sandbox may take until its answer begins.", low=1, high=86400
    )
    preview_idle_timeout: float = _setting(
        3600.0, "A connection on which nothing moves for so long is cut.", low=1, high=604800
    )
    ssh_port: int = _setting(
        -1, "TCP port on which SSH is served; 0 takes a free one, -1 serves none.", low=-1, high=65535
    )
    ssh_host: str = _setting("", "Address SSH is served on; empty: that of the API.")
    ssh_connections: int = _setting(32, "Most SSH connections to one sandbox at once.", low=1, high=1000)
    ssh_workspace_connections: int = _setting(256, "The same for a whole workspace.", low=1, high=10_000)
    ssh_failures_per_minute: int = _setting(
        30, "Wrong passwords by SSH before an address is kept out for a while; 0 = no limit.", low=0, high=10**6
    )
    ssh_login_timeout: float = _setting(30.0, "How long an SSH client may take to say who it is.", low=1, high=600)
    ssh_idle_timeout: float = _setting(
        3600.0, "An SSH connection on which nothing moves for so long is ended; 0 = never.", low=0, high=604800
    )
    shutdown_grace: float = _setting(5.0, "How long running requests may finish at shutdown.", low=0, high=600)

    @property
    def origins(self) -> tuple[str, ...]:
        """Those that may call the API from a page."""
        return tuple(part.strip() for part in self.cors_origins.split(",") if part.strip())

    @property
    def usual_ttl_seconds(self) -> int:
        """When the caller names none. No default goes beyond the longest that may be asked for."""
        if not self.max_ttl_seconds:
            return self.default_ttl_seconds
        return min(self.default_ttl_seconds or self.max_ttl_seconds, self.max_ttl_seconds)


def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(Settings)}


def env_name(name: str) -> str:
    return PREFIX + name.upper()


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _convert(name: str, declared: dataclasses.Field[Any], raw: object, source: str) -> object:
    kind = str(declared.type)
    try:
        if "Path" in kind:
            return Path(str(raw)).absolute() if str(raw) else None
        if kind == "int":
            if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
                raise ValueError("not a whole number")
            return int(raw)  # type: ignore[call-overload]
        if kind == "bool":
            return _as_bool(raw)
        if kind == "float":
            return float(raw)  # type: ignore[arg-type]
        return str(raw)
    except (TypeError, ValueError):
        raise SettingsError(f"{source}: {name} = {raw!r} is not a valid {kind}") from None


def _as_bool(raw: object) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    found = known.get(str(raw).lower())
    if found is None:
        raise ValueError("neither true nor false")
    return found


def _check(name: str, declared: dataclasses.Field[Any], value: Any, source: str) -> None:
    low, high, choices = (declared.metadata[k] for k in ("low", "high", "choices"))
    if choices and value not in choices:
        raise SettingsError(f"{source}: {name} = {value!r}; allowed: {', '.join(choices)}")
    if low is not None and not low <= value <= high:
        raise SettingsError(f"{source}: {name} = {value}; allowed: {low} to {high}")


def _from_environment(environ: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, tuple[object, str]]:
    found: dict[str, tuple[object, str]] = {}
    for variable, raw in environ.items():
        if not variable.startswith(PREFIX) or variable in FOREIGN_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in known:
            raise SettingsError(f"the environment variable {variable} is not a setting of this server")
        found[name] = (raw, variable)
    return found


def _from_file(path: Path, known: Mapping[str, Any]) -> dict[str, tuple[object, str]]:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"the configuration file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"the configuration file {path} cannot be read: {error}") from None
    for name in table:
        if name not in known:
            raise SettingsError(f"{path}: {name} is not a setting of this server")
    return {name: (value, str(path)) for name, value in table.items()}


def load(flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in force. `flags` holds what was given on the command line (None = not given).

    Raises `SettingsError` with one sentence.
    """
    environ = os.environ if environ is None else environ
    known = _fields()
    chosen: dict[str, tuple[object, str]] = {}
    config = environ.get("CLOCHE_CONFIG")
    if config:
        chosen.update(_from_file(Path(config), known))
    elif DEFAULT_CONFIG_FILE.is_file():
        chosen.update(_from_file(DEFAULT_CONFIG_FILE, known))
    chosen.update(_from_environment(environ, known))
    for name, value in (flags or {}).items():
        if value is not None:
            chosen[name] = (value, flag_name(name))
    values: dict[str, Any] = {}
    for name, (raw, source) in chosen.items():
        values[name] = _convert(name, known[name], raw, source)
        if values[name] is not None:
            _check(name, known[name], values[name], source)
    settings = Settings(**values)
    if wrong := settings_together.obstacle(settings):
        raise SettingsError(wrong)
    return settings
