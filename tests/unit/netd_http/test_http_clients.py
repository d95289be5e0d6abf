"""Programs that people use, through the engine: each has a placeholder, and the server accepts the value only."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from http_kit import PLACEHOLDER, VALUE, Recorder, Seen, Stage, answered, grant

from cloche_server.core.secrets import CA_BUNDLE, TRUST_ENV
from kit.data import CHECKOUT

pytestmark = pytest.mark.thorough

#: A name that everything resolves, and that is sent in SNI.
NAME = "localhost"
BODY = bytes(range(256)) * 5000
#: What `./test` brings: Node and npm beside Python, and Go where the machine has none.
OURS = (str(Path(sys.executable).parent), str(CHECKOUT / ".cloche" / "go" / "bin"))
DENIED = answered(b"who are you?", 'WWW-Authenticate: Basic realm="x"', status="401 Unauthorized")


def authorized(seen: Seen) -> bool:
    sent = {name.lower(): value.decode() for name, value in seen.headers}.get(b"authorization", "")
    kind, _, token = sent.partition(" ")
    if kind.lower() == "basic":
        return base64.b64decode(token).decode().partition(":")[2] == VALUE
    return (kind.lower(), token) == ("bearer", VALUE)


def guarded(answer: Callable[[Seen], bytes]) -> Callable[[Seen], bytes]:
    return lambda seen: answer(seen) if authorized(seen) else DENIED


def echo(seen: Seen) -> bytes:
    """The digest of what came, and what it was told to be."""
    return answered(hashlib.sha256(seen.body).hexdigest().encode(), f"X-Authorization: {seen['authorization']}")


class Guest:
    """Runs programs as a guest would: they trust what `TRUST_ENV` says, and know a placeholder."""

    def __init__(self, scene: Stage, port: int) -> None:
        self.port = port
        self.home = scene.folder
        self.url = f"https://{NAME}:{port}"
        self.env = {name: str(scene.own) for name in TRUST_ENV}
        self.env |= {
            "PATH": os.pathsep.join((*OURS, os.environ["PATH"])),
            "HOME": str(self.home),
            "KEY": PLACEHOLDER,
            "URL": self.url,
            "LC_ALL": "C",
        }
        self.env["GOCACHE"] = os.environ.get("GOCACHE", str(Path.home() / ".cache/go-build"))

    async def run(self, *argv: str, cwd: Path | None = None) -> str:
        """What it prints. Skips the test, and says so, where there is no such program."""
        program = shutil.which(argv[0], path=self.env["PATH"])
        if program is None:
            pytest.skip(f"{argv[0]} is not installed, so that it works through the engine is not tested")
        process = await asyncio.create_subprocess_exec(
            program, *argv[1:], env=self.env, cwd=cwd or self.home, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            async with asyncio.timeout(120):
                out = (await process.communicate())[0].decode("utf-8", "replace")
        except BaseException:
            process.kill()
            raise
        assert process.returncode == 0, out
        assert VALUE not in out
        return out


async def guest(scene: Stage, answer: Callable[[Seen], bytes] | None = None) -> tuple[Guest, Recorder]:
    """A guest with a grant for a server that answers so to those with the value."""
    site = Recorder(guarded(answer or echo))
    return await guest_of(scene, site), site


async def guest_of(scene: Stage, site: Recorder) -> Guest:
    scene.carrier.grants = [grant(hosts=(NAME,))]
    scene.carrier.routes[NAME] = await scene.server(site, NAME)
    return Guest(scene, await scene.door(NAME, port=0))


def test_all_programs_are_told_whom_to_trust() -> None:
    assert {TRUST_ENV[name] for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT")} == {
        CA_BUNDLE
    }


# ------------------------------------------------------------------ one request


@pytest.mark.parametrize(
    "more", [[], ["--http1.1", "-H", "Transfer-Encoding: chunked"], ["-H", "Expect: 100-continue"]]
)
async def test_curl(scene: Stage, more: list[str]) -> None:
    one, site = await guest(scene)
    (one.home / "body").write_bytes(BODY)
    out = await one.run(
        "curl", "-sS", "--fail", "-i", "-H", f"Authorization: Bearer {PLACEHOLDER}", "--data-binary", "@body", *more,
        one.url,
    )  # fmt: skip
    assert hashlib.sha256(BODY).hexdigest() in out
    assert f"X-Authorization: Bearer {PLACEHOLDER}" in out
    assert site.seen[0].body == BODY


REQUESTS = """
import os, requests, httpx
url, headers = os.environ["URL"], {"Authorization": "Bearer " + os.environ["KEY"]}
body = bytes(range(256)) * 5000
with requests.Session() as session:
    for _ in range(2):
        print(session.post(url, headers=headers, data=body).text)
    print(session.get(url, auth=("user", os.environ["KEY"])).status_code)
with httpx.Client() as client:
    print(client.post(url, headers=headers, content=iter([body])).text)
"""


async def test_python(scene: Stage) -> None:
    one, site = await guest(scene)
    out = await one.run(sys.executable, "-c", REQUESTS)
    assert out.split() == [hashlib.sha256(BODY).hexdigest()] * 2 + ["200", hashlib.sha256(BODY).hexdigest()]
    assert site.connections == 2


NODE = """
const https = require('https');
const headers = {authorization: 'Bearer ' + process.env.KEY};
const body = Buffer.alloc(1280000, Buffer.from(Array.from({length: 256}, (_, i) => i)));
const asked = () => new Promise((done, failed) => {
  const request = https.request(process.env.URL, {method: 'POST', headers}, (answer) => {
    let text = '';
    answer.on('data', (part) => text += part).on('end', () => done(text));
  });
  request.on('error', failed).end(body);
});
(async () => {
  console.log(await (await fetch(process.env.URL, {method: 'POST', headers, body})).text());
  console.log(await asked());
})();
"""


async def test_node(scene: Stage) -> None:
    one, _ = await guest(scene)
    assert (await one.run("node", "-e", NODE)).split() == [hashlib.sha256(BODY).hexdigest()] * 2


GO = """
package main

import ("bytes"; "fmt"; "io"; "net/http"; "os")

func main() {
	body := make([]byte, 0, 1280000)
	for len(body) < 1280000 { body = append(body, byte(len(body))) }
	for range 2 {
		r, _ := http.NewRequest("POST", os.Getenv("URL"), bytes.NewReader(body))
		r.Header.Set("Authorization", "Bearer " + os.Getenv("KEY"))
		a, err := http.DefaultClient.Do(r)
		if err != nil { panic(err) }
		text, _ := io.ReadAll(a.Body)
		fmt.Println(string(text))
	}
}
"""


async def test_go(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/usr/local/go/bin")
    one, _ = await guest(scene)
    one.env |= {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOPATH": str(one.home / "go"), "GO111MODULE": "off"}
    (one.home / "main.go").write_text(GO)
    assert (await one.run("go", "run", "main.go")).split() == [hashlib.sha256(BODY).hexdigest()] * 2


# ------------------------------------------------------------------ tools with protocols of their own


def wheel() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("demo.py", "x = 1\n")
        archive.writestr("demo-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        archive.writestr("demo-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("demo-1.0.dist-info/RECORD", "")
    return made.getvalue()


async def test_pip(scene: Stage) -> None:
    file = wheel()
    digest = hashlib.sha256(file).hexdigest()
    page = f'<a href="/files/demo-1.0-py3-none-any.whl#sha256={digest}">demo-1.0-py3-none-any.whl</a>'.encode()
    one, site = await guest(
        scene, lambda seen: answered(page, "Content-Type: text/html") if b"/simple/" in seen.target else answered(file)
    )
    index = f"https://__token__:{PLACEHOLDER}@{NAME}:{one.port}/simple/"
    await one.run(
        sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--no-cache-dir", "--cert",
        one.env["PIP_CERT"], "download", "--no-deps", "--index-url", index, "demo==1.0",
    )  # fmt: skip
    assert (one.home / "demo-1.0-py3-none-any.whl").read_bytes() == file
    assert len(site.seen) >= 2


async def test_npm(scene: Stage) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        text = json.dumps({"name": "demo", "version": "1.0.0"}).encode()
        info = tarfile.TarInfo("package/package.json")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
    tarball = made.getvalue()

    def registry(seen: Seen) -> bytes:
        if seen.target.endswith(b".tgz"):
            return answered(tarball)
        dist = {"tarball": f"https://{seen['host']}/demo/-/demo-1.0.0.tgz"}
        dist["integrity"] = "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode()
        version = {"name": "demo", "version": "1.0.0", "dist": dist}
        packument = {"name": "demo", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
        return answered(json.dumps(packument).encode(), "Content-Type: application/json")

    one, _ = await guest(scene, registry)
    (one.home / ".npmrc").write_text(f"registry={one.url}/\n//{NAME}:{one.port}/:_authToken={PLACEHOLDER}\n")
    one.env["npm_config_fetch_retries"] = "0"
    (one.home / "package.json").write_text("{}")
    await one.run("npm", "install", "--no-audit", "--no-fund", "--no-update-notifier", "demo")
    assert json.loads((one.home / "node_modules/demo/package.json").read_text())["version"] == "1.0.0"


class Backend(Recorder):
    """`git http-backend`, behind a password."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    async def respond(self, seen: Seen) -> bytes:
        if not authorized(seen):
            return DENIED
        path, _, query = seen.target.decode().partition("?")
        fields = {name.lower().decode(): value.decode() for name, value in seen.headers}
        env = {
            "PATH": os.pathsep.join((*OURS, os.environ["PATH"])),
            "HOME": str(self._root),
            "GIT_PROJECT_ROOT": str(self._root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": seen.method.decode(),
            "REMOTE_USER": "user",
            "CONTENT_LENGTH": str(len(seen.body)),
            "CONTENT_TYPE": fields.get("content-type", ""),
            "GIT_PROTOCOL": fields.get("git-protocol", ""),
            "HTTP_CONTENT_ENCODING": fields.get("content-encoding", ""),
        }
        process = await asyncio.create_subprocess_exec(
            "git", "http-backend", env=env, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        made, _ = await process.communicate(seen.body)
        head, _, body = made.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        status = next((line[8:] for line in lines if line.startswith("Status:")), "200 OK")
        return answered(body, *(line for line in lines if not line.startswith("Status:")), status=status)


async def test_git(scene: Stage) -> None:
    root = scene.folder / "served"
    root.mkdir()
    one = await guest_of(scene, Backend(root))
    one.env |= {f"GIT_{who}_{what}": "a@b.test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    one.env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1"}
    await one.run("git", "init", "-q", "--bare", "served/repo.git")
    await one.run("git", "-C", "served/repo.git", "config", "http.receivepack", "true")
    url = f"https://user:{PLACEHOLDER}@{NAME}:{one.port}/repo.git"
    await one.run("git", "clone", "-q", url, "first")
    (one.home / "first/large").write_bytes(os.urandom(3_000_000))  # so large that git sends it in chunks
    for argv in (["add", "."], ["commit", "-qm", "x"], ["push", "-q", "origin", "HEAD:main"]):
        await one.run("git", "-C", "first", *argv)
    await one.run("git", "clone", "-q", "-b", "main", url, "second")
    assert (one.home / "second/large").read_bytes() == (one.home / "first/large").read_bytes()
