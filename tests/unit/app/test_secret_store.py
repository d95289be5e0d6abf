"""The secret store: what callers may see of it, what is on the disk, and a key that is not there."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from app_host import Crew, Host
from events_server import Front, serve

from cloche_server.app.journal import Journal
from cloche_server.app.secrets import Secrets
from cloche_server.core.errors import ClocheError
from cloche_server.core.secrets import MAX_VALUE
from cloche_server.host.clock import SystemClock
from cloche_server.host.sealing import SealBroken, Sealer
from cloche_server.store.db import Database
from cloche_server.store.events import EventStore
from cloche_server.store.secrets import SecretStore

MARKER = "marker-7f3a9c-value"


@pytest.fixture
async def front(host: Host, crew: Crew) -> AsyncIterator[Front]:
    async with serve(host, crew) as front:
        yield front


def kept(database: Database, folder: Path, key_file: Path | None = None) -> Secrets:
    return Secrets(SecretStore(database), folder, key_file, SystemClock(), Journal(EventStore(database), SystemClock()))


async def put(front: Front, name: str = "OPENAI", **body: Any) -> dict[str, Any]:
    response = await front.http.put(f"/v1/secrets/{name}", json={"value": MARKER, **body})
    assert response.status_code in (200, 201), response.text
    assert MARKER not in response.text
    return {"status": response.status_code, **response.json()}


async def test_a_secret_is_written_rotated_listed_and_deleted_and_never_read(front: Front) -> None:
    made = await put(front, description="for the model")
    assert (made["status"], made["name"], made["version"], made["description"]) == (201, "OPENAI", 1, "for the model")
    again = await put(front, value=MARKER + "2")
    assert (again["status"], again["version"], again["description"]) == (200, 2, "for the model")
    assert again["created_at"] == made["created_at"]
    assert set(again) == {"status", "name", "version", "description", "created_at", "updated_at"}
    for path in ("/v1/secrets", "/v1/secrets/OPENAI"):
        assert MARKER not in (await front.http.get(path)).text
    assert [one["name"] for one in (await front.get("/v1/secrets"))["secrets"]] == ["OPENAI"]
    assert (await front.http.delete("/v1/secrets/OPENAI")).status_code == 204
    assert (await front.http.get("/v1/secrets/OPENAI")).status_code == 404
    assert (await front.http.delete("/v1/secrets/OPENAI")).json()["code"] == "secret.not_found"


async def test_a_foreign_secret_does_not_exist(front: Front) -> None:
    await put(front)
    foreign = await front.other.get("/v1/secrets/OPENAI")
    absent = await front.other.get("/v1/secrets/NOTHING")
    assert foreign.status_code == absent.status_code == 404
    assert foreign.json()["error"] == absent.json()["error"]
    assert (await front.other.delete("/v1/secrets/OPENAI")).status_code == 404
    assert (await front.other.get("/v1/secrets")).json() == {"secrets": []}
    assert (await front.services.secrets.material("foreign")).values == {}
    assert (await front.services.secrets.material("w")).values == {"OPENAI": MARKER}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("1X", {"value": MARKER}),
        ("a b", {"value": MARKER}),
        ("X" * 129, {"value": MARKER}),
        ("X", {}),
        ("X", {"value": ""}),
        ("X", {"value": MARKER + "\n"}),
        ("X", {"value": MARKER + "\0"}),
        ("X", {"value": MARKER + "\r"}),
        ("X", {"value": [MARKER]}),
        ("X", {"value": {MARKER: MARKER}}),
        ("X", {"value": MARKER + "ä" * (MAX_VALUE // 2)}),
        ("X", {"value": MARKER, "description": 5}),
    ],
)
async def test_what_is_wrong_is_refused_without_repeating_it(front: Front, name: str, body: dict[str, Any]) -> None:
    response = await front.http.put(f"/v1/secrets/{name}", json=body)
    assert (response.status_code, response.json()["code"]) == (400, "request.invalid")
    assert "marker" not in response.text


async def test_changes_are_told(front: Front) -> None:
    told: list[str] = []

    async def tell(workspace: str) -> None:
        told.append(workspace)

    front.services.secrets.on_change.append(tell)
    await put(front)
    await put(front)
    await front.http.delete("/v1/secrets/OPENAI")
    assert told == ["w"] * 3


async def test_the_authority_is_made_once_for_each_workspace(front: Front) -> None:
    response = await front.http.get("/v1/network/ca")
    assert response.headers["content-type"] == "application/x-pem-file"
    assert (await front.http.get("/v1/network/ca")).text == response.text
    assert (await front.other.get("/v1/network/ca")).text != response.text
    material = await front.services.secrets.material("w")
    assert material.ca_cert_pem == response.text
    found = ssl.create_default_context(cadata=material.ca_cert_pem).get_ca_certs()
    assert "PRIVATE KEY" not in response.text
    assert "PRIVATE KEY" in material.ca_key_pem
    assert any("Cloche workspace w" in str(one["subject"]) for one in found)


# ------------------------------------------------------------------ on the disk


async def test_nothing_shows_a_value(database: Database, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    secrets = kept(database, tmp_path)
    await secrets.start()
    await secrets.put("w", "X", MARKER, None)
    material = await secrets.material("w")
    assert material.values == {"X": MARKER}
    assert MARKER not in repr(material)
    assert "PRIVATE" not in repr(material)
    await database.close()
    for file in tmp_path.iterdir():
        data = file.read_bytes()
        assert MARKER.encode() not in data, file
        assert b"PRIVATE KEY" not in data, file
    shown = capfd.readouterr()
    assert MARKER not in shown.out + shown.err
    assert (tmp_path / "secret.key").stat().st_mode & 0o777 == 0o600


async def test_a_restart_reads_what_was_written(database: Database, tmp_path: Path) -> None:
    first = kept(database, tmp_path)
    await first.start()
    await first.put("w", "X", MARKER, None)
    ca = await first.ca("w")
    second = kept(database, tmp_path)
    await second.start()
    material = await second.material("w")
    assert (material.values, material.ca_cert_pem) == ({"X": MARKER}, ca)


@pytest.mark.parametrize("key", [None, "00" * 32, "not a key"])
async def test_without_its_key_the_server_starts_and_says_what_is_missing(
    database: Database, tmp_path: Path, key: str | None
) -> None:
    first = kept(database, tmp_path)
    await first.start()
    await first.put("w", "X", MARKER, None)
    right = (tmp_path / "secret.key").read_text()
    (tmp_path / "secret.key").unlink()
    if key is not None:
        (tmp_path / "secret.key").write_text(key)
    second = kept(database, tmp_path)
    await second.start()
    for call in (second.material("w"), second.put("w", "Y", MARKER, None), second.ca("w")):
        with pytest.raises(ClocheError) as caught:
            await call
        assert caught.value.code == "secret.unavailable"
        assert "secret.key" in caught.value.message
    assert key is not None or not (tmp_path / "secret.key").exists(), "a new key would make the loss final"
    assert [info.name for info in await second.all("w")] == ["X"]
    (tmp_path / "secret.key").write_text(right)
    third = kept(database, tmp_path)
    await third.start()
    assert (await third.material("w")).values == {"X": MARKER}


async def test_the_key_may_be_elsewhere_but_is_not_made_there(database: Database, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    without = kept(database, tmp_path, elsewhere)
    await without.start()
    with pytest.raises(ClocheError, match="does not exist"):
        await without.put("w", "X", MARKER, None)
    elsewhere.write_bytes(os.urandom(32))
    with_key = kept(database, tmp_path, elsewhere)
    await with_key.start()
    await with_key.put("w", "X", MARKER, None)
    assert not (tmp_path / "secret.key").exists()


async def test_a_sealed_value_is_of_no_use_in_another_place(database: Database, tmp_path: Path) -> None:
    secrets = kept(database, tmp_path)
    await secrets.start()
    await secrets.put("w", "X", MARKER, None)
    await secrets.put("v", "X", "another value", None)
    await database.run(
        lambda c: c.execute("UPDATE secrets SET sealed = (SELECT sealed FROM secrets WHERE workspace = 'w')")
    )
    with pytest.raises(ClocheError) as caught:
        await secrets.material("v")
    assert caught.value.code == "secret.unavailable"


async def test_a_workspace_has_an_end_of_secrets(database: Database, tmp_path: Path) -> None:
    secrets = kept(database, tmp_path)
    await secrets.start()
    for number in range(15):
        await secrets.put("w", f"X{number}", "v" * MAX_VALUE, None)
    with pytest.raises(ClocheError) as caught:
        await secrets.put("w", "Y", "v" * MAX_VALUE, None)
    assert caught.value.code == "secret.too_many"
    await secrets.put("w", "X1", "v" * MAX_VALUE, None)
    assert await secrets.missing("w", ["X1", "Y"]) == ["Y"]


def test_a_seal_holds() -> None:
    sealer = Sealer(bytes(32))
    sealed = sealer.seal(b"value", b"here")
    assert sealer.open(sealed, b"here") == b"value"
    assert sealer.seal(b"value", b"here") != sealed
    for at in range(len(sealed)):
        with pytest.raises(SealBroken):
            sealer.open(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :], b"here")
    for broken, purpose in ((sealed, b"there"), (sealed[:20], b"here"), (b"", b"here")):
        with pytest.raises(SealBroken):
            sealer.open(broken, purpose)
