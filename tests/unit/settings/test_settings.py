"""Settings: one declaration, strict names and ranges, and the documented precedence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cloche_server import settings
from cloche_server.settings import Settings, SettingsError, load


@pytest.fixture(autouse=True)
def no_system_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(settings, "DEFAULT_CONFIG_FILE", tmp_path / "absent.toml")


def test_defaults() -> None:
    found = load({}, {})
    assert found == Settings()
    assert found.host == "127.0.0.1"


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('port = 1\npool_warm = 7\nlog_format = "json"\n')
    environ = {"CLOCHE_CONFIG": str(config), "CLOCHE_PORT": "2", "CLOCHE_POOL_WARM": "8"}
    found = load({"port": "3", "pool_warm": None}, environ)
    assert (found.port, found.pool_warm, found.log_format) == (3, 8, "json")


def test_the_system_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "system.toml"
    config.write_text("max_sandboxes = 3\n")
    monkeypatch.setattr(settings, "DEFAULT_CONFIG_FILE", config)
    assert load({}, {}).max_sandboxes == 3


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({"CLOCHE_PROT": "1"}, "CLOCHE_PROT"),
        ({"CLOCHE_PORT": "http"}, "port"),
        ({"CLOCHE_PORT": "1.5"}, "port"),
        ({"CLOCHE_PORT": "70000"}, "0 to 65535"),
        ({"CLOCHE_ACCEL": "xen"}, "auto, kvm, tcg"),
        ({"CLOCHE_MEMORY_OVERCOMMIT": "lots"}, "memory_overcommit"),
        ({"CLOCHE_DATA": "/" + "x" * 60}, "longer than"),
        ({"CLOCHE_DEFAULT_MEMORY_MB": "99999"}, "above the largest"),
        ({"CLOCHE_EXEC_DEFAULT_TIMEOUT": "90000"}, "exec_max_timeout"),
        ({"CLOCHE_CONFIG": "/does/not/exist.toml"}, "does not exist"),
    ],
)
def test_mistakes_are_named(environ: dict[str, str], word: str) -> None:
    with pytest.raises(SettingsError, match="(?s)" + word.replace(".", r"\.")):
        load({}, environ)


@pytest.mark.parametrize("text", ["no_such_setting = 1\n", "port = [\n", 'port = "x"\n', "port = true\n"])
def test_mistakes_in_the_file(text: str, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(text)
    with pytest.raises(SettingsError):
        load({}, {"CLOCHE_CONFIG": str(config)})


def test_variables_of_clients_are_not_ours() -> None:
    load({}, {"CLOCHE_API_URL": "http://x", "CLOCHE_API_KEY": "k", "PATH": "/bin"})


@pytest.mark.parametrize(("text", "wanted"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False)])
def test_yes_and_no(text: str, wanted: bool) -> None:
    assert load({}, {"CLOCHE_WEBHOOK_PRIVATE": text}).webhook_private is wanted


@pytest.mark.parametrize("text", ["", "2", "perhaps"])
def test_neither_yes_nor_no(text: str) -> None:
    with pytest.raises(SettingsError, match="webhook_private"):
        load({}, {"CLOCHE_WEBHOOK_PRIVATE": text})


def test_a_switch_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cloche.toml"
    file.write_text("webhook_private = true\nevents_keep_days = 2\n")
    found = load({}, {"CLOCHE_CONFIG": str(file)})
    assert (found.webhook_private, found.events_keep_days) == (True, 2.0)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("network_never", "10.0.0.0/8,nowhere", "'nowhere' is not a network"),
        ("network_resolvers", "192.0.2.53, dns.example", "'dns.example' is not an address"),
        ("network_proxy", "ftp://user:hidden@192.0.2.1", "begins with http:// or socks5://"),
    ],
)
def test_what_netd_is_told_is_checked_before_it_starts(name: str, value: str, told: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(told)) as error:
        load({name: value}, {})
    assert "hidden" not in str(error.value)
