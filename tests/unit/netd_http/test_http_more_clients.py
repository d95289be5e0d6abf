"""More programs through the engine: Java, pulls from a registry, and those that cannot work and have to be told so."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import socket
import ssl
import sys
import threading
import time

import httpx
import pytest
from http_kit import PLACEHOLDER, VALUE, Recorder, Seen, Stage, answered, get, grant, public_authority
from test_http_clients import BODY, NAME, guest

from cloche_server.host.certificates import issue, server_context

pytestmark = pytest.mark.thorough

JAVA = """
import java.io.*; import java.net.*; import java.net.http.*; import java.security.*; import java.util.*;
public class Main {
  static String hex(byte[] data) throws Exception {
    return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(data));
  }
  public static void main(String[] args) throws Exception {
    byte[] body = new byte[1280000];
    for (int i = 0; i < body.length; i++) body[i] = (byte) i;
    URI url = URI.create(System.getenv("URL"));
    String token = "Bearer " + System.getenv("KEY");
    HttpClient client = HttpClient.newHttpClient();
    for (HttpRequest.BodyPublisher one : List.of(
        HttpRequest.BodyPublishers.ofByteArray(body),
        HttpRequest.BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body)))) {
      for (boolean expect : new boolean[] {false, true}) {
        HttpRequest request = HttpRequest.newBuilder(url).header("Authorization", token).expectContinue(expect)
            .POST(one).build();
        HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
        System.out.println(answer.body() + " " + answer.version());
      }
    }
    HttpURLConnection old = (HttpURLConnection) new URL(url.toString() + "/large").openConnection();
    old.setRequestProperty("Authorization", token);
    System.out.println(hex(old.getInputStream().readAllBytes()) + " " + old.getResponseCode());
  }
}
"""
LARGE = bytes(range(251)) * 40_000


def large_or_echo(seen: Seen) -> bytes:
    if seen.target == b"/large":
        return answered(LARGE)
    return answered(hashlib.sha256(seen.body).hexdigest().encode())


async def test_java(scene: Stage) -> None:
    """Its list of authorities is the one of the image with ours in it: `agent/internal/machine/keystore_test.go` proves
    that Java reads what the agent writes."""
    one, site = await guest(scene, large_or_echo)
    store = one.home / "cacerts"
    await one.run(
        "keytool", "-importcert", "-noprompt", "-storetype", "JKS", "-alias", "cloche", "-file", str(scene.own),
        "-keystore", str(store), "-storepass", "changeit",
    )  # fmt: skip
    (one.home / "Main.java").write_text(JAVA)
    lines = (await one.run("java", f"-Djavax.net.ssl.trustStore={store}", "Main.java")).splitlines()
    digest = hashlib.sha256(BODY).hexdigest()
    assert [line for line in lines if "HTTP_" in line] == [f"{digest} HTTP_1_1"] * 4
    assert f"{hashlib.sha256(LARGE).hexdigest()} 200" in lines
    assert [len(seen.body) for seen in site.seen] == [len(BODY)] * 4 + [0]


async def test_java_that_was_not_told_is_seen_in_the_log(scene: Stage) -> None:
    one, site = await guest(scene, large_or_echo)
    (one.home / "Main.java").write_text(JAVA.replace("public static void main", "static void other").replace(
        "\n}\n", """
  public static void main(String[] args) throws Exception {
    try { other(args); } catch (IOException e) { System.out.println(e); }
  }
}
"""))  # fmt: skip
    assert "SSLHandshakeException" in await one.run("java", "Main.java")
    assert ("http", "not-trusted") in scene.carrier.denials()
    assert site.heads == 0


PULL = """
import hashlib, os, re, requests
base, user = os.environ["URL"], ("user", os.environ["KEY"])
with requests.Session() as session:
    first = session.get(base + "/v2/app/manifests/latest")
    assert first.status_code == 401, first.status_code
    words = dict(re.findall('(\\\\w+)="([^"]*)"', first.headers["WWW-Authenticate"]))
    asked = {"service": words["service"], "scope": words["scope"]}
    token = session.get(words["realm"], params=asked, auth=user).json()["token"]
    bearer = {"Authorization": "Bearer " + token}
    accept = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
    manifest = session.get(base + "/v2/app/manifests/latest", headers={**bearer, **accept})
    assert "sha256:" + hashlib.sha256(manifest.content).hexdigest() == manifest.headers["Docker-Content-Digest"]
    for layer in manifest.json()["layers"]:
        with session.get(f"{base}/v2/app/blobs/{layer['digest']}", headers=bearer, stream=True) as answer:
            assert len(answer.history) == 1
            data = answer.raw.read(decode_content=False)
        assert "sha256:" + hashlib.sha256(data).hexdigest() == layer["digest"]
        assert len(data) == layer["size"]
        print(layer["digest"])
"""


async def test_a_pull_from_a_registry(scene: Stage) -> None:
    """The registry protocol, version 2: a token for a password, a manifest, and layers somewhere else."""
    layers = [os.urandom(3_000_000), os.urandom(10)]
    named = {"sha256:" + hashlib.sha256(layer).hexdigest(): layer for layer in layers}
    manifest = json.dumps(
        {"schemaVersion": 2, "layers": [{"digest": name, "size": len(data)} for name, data in named.items()]}
    ).encode()
    seen_by_storage: list[Seen] = []
    doors: dict[str, int] = {}

    def registry(seen: Seen) -> bytes:
        target, sent = seen.target.decode(), dict(seen.headers)
        if target.startswith("/token"):
            secret = base64.b64decode(sent[b"Authorization"].partition(b" ")[2]).decode()
            return answered(json.dumps({"token": "t0ken" if secret == f"user:{VALUE}" else "none"}).encode())
        if target.startswith("/storage/"):
            seen_by_storage.append(seen)
            return answered(named[target.removeprefix("/storage/")])
        if sent.get(b"Authorization") != b"Bearer t0ken":
            realm = f'realm="https://{NAME}:{doors["registry"]}/token",service="x",scope="repository:app:pull"'
            return answered(b"", f"WWW-Authenticate: Bearer {realm}", status="401 Unauthorized")
        if "/manifests/" in target:
            digest = "sha256:" + hashlib.sha256(manifest).hexdigest()
            return answered(manifest, f"Docker-Content-Digest: {digest}")
        where = f"https://{NAME}:{doors['storage']}/storage/{target.rpartition('/')[2]}"
        return answered(b"", f"Location: {where}", status="307 Temporary Redirect")

    one, _ = await guest(scene)
    scene.carrier.routes[NAME] = await scene.server(Recorder(registry), NAME)
    doors |= {"registry": one.port, "storage": await scene.door(NAME, port=0)}
    assert (await one.run(sys.executable, "-c", PULL)).split() == list(named)
    assert len(seen_by_storage) == 2
    assert all(b"Authorization" not in dict(seen.headers) for seen in seen_by_storage)


# ------------------------------------------------------------------ what cannot work, and is told


async def test_a_client_of_both_takes_http_1_1(scene: Stage) -> None:
    one, _ = await guest(scene)
    async with httpx.AsyncClient(http2=True, verify=scene.trusting(), trust_env=False) as client:
        answer = await client.post(one.url, content=BODY, headers={"Authorization": f"Bearer {PLACEHOLDER}"})
    assert (answer.http_version, answer.text) == ("HTTP/1.1", hashlib.sha256(BODY).hexdigest())


async def test_a_client_of_http_2_alone_is_told_in_its_words(scene: Stage) -> None:
    """gRPC is one."""
    one, site = await guest(scene)
    context = ssl.create_default_context(cafile=scene.own)
    async with httpx.AsyncClient(http1=False, http2=True, verify=context, trust_env=False) as client:
        with pytest.raises(httpx.RemoteProtocolError) as caught:
            await client.get(one.url)
    assert "error_code:13," in str(caught.value)  # HTTP_1_1_REQUIRED; after it our sentence, which this client cuts
    assert (scene.carrier.denials(), site.connections) == ([("http", "http2")], 0)


def refuse_one(listener: socket.socket, context: ssl.SSLContext) -> None:
    """As servers do: with an alert, after the handshake of TLS 1.3 and in that of 1.2."""
    plain, _ = listener.accept()
    with plain, contextlib.suppress(OSError):
        context.wrap_socket(plain, server_side=True)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_server_that_wants_a_client_certificate(scene: Stage, version: ssl.TLSVersion) -> None:
    context = server_context(issue(public_authority(), NAME, time.time()))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(scene.public)
    context.maximum_version = version
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=refuse_one, args=(listener, context))
        server.start()
        scene.carrier.grants = [grant(hosts=(NAME,))]
        scene.carrier.routes[NAME] = listener.getsockname()[1]
        answer = await scene.ask(await scene.door(NAME), get(host=NAME), name=NAME)
        await asyncio.to_thread(server.join)
    told = json.loads(answer.body)
    assert (answer.status, told["code"]) == (502, "network.upstream_failed")
    assert "wants a certificate of its client" in told["error"]
    rule = "client-certificate" if version is ssl.TLSVersion.TLSv1_3 else "upstream-tls"
    assert scene.carrier.denials() == [("http", rule)]


async def test_a_pinned_certificate(scene: Stage) -> None:
    one, site = await guest(scene)
    pin = base64.b64encode(hashlib.sha256(b"the key of the real server").digest()).decode()
    out = await one.run("sh", "-c", f"curl -sS --pinnedpubkey sha256//{pin} {one.url} 2>&1; echo ended $?")
    assert "ended 90" in out  # CURLE_SSL_PINNEDPUBKEYNOTMATCH
    async with asyncio.timeout(10):
        while ("http", "not-trusted") not in scene.carrier.denials():
            await asyncio.sleep(0.02)
    assert site.heads == 0
