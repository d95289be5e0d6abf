"""A value stands in no log, no note, no message and no representation, whatever goes wrong with its request."""

from __future__ import annotations

import asyncio
import base64
import logging
import traceback
from typing import Any

import pytest
from http_kit import ALL_PLACES, HOST, PLACEHOLDER, VALUE, Recorder, Stage, answered, get, grant

from cloche_server.host.certificates import make_authority
from cloche_server.netd.flow import Target, Verdict
from cloche_server.netd.http.judge import BodyRewriter, Judge, Value
from cloche_server.netd.http.request import Asked
from cloche_server.netd.http.strip import Stripper

BEARER = f"Authorization: Bearer {PLACEHOLDER}"
BASIC = "Authorization: Basic " + base64.b64encode(f"u:{PLACEHOLDER}".encode()).decode()
#: In whatever form: its beginning is enough.
MARKERS = (VALUE[:6], base64.b64encode(f"u:{VALUE}".encode()).decode()[4:20])


def leaks(text: str) -> bool:
    return any(marker in text for marker in MARKERS)


def test_nothing_shows_it() -> None:
    asked = Asked("POST", HOST, "/", f"/?k={PLACEHOLDER}".encode())
    judge = Judge([grant(places=ALL_PLACES)], asked, secure=True, secret=lambda _: VALUE)
    assert leaks(judge.target().decode())
    made = judge.headers([tuple(part.encode() for part in BASIC.split(": "))])  # type: ignore[list-item]
    assert leaks(repr(made))
    rewriter = BodyRewriter(judge, b"", fixed=False)
    assert leaks((rewriter.feed(PLACEHOLDER.encode()) + rewriter.finish()).decode())
    stripper = Stripper(judge.values(), judge.put)
    authority = make_authority("x", 0.0)
    shown = [judge, judge.put, judge.values(), judge.scanner, rewriter, stripper, stripper.body(fixed=True)]
    assert not leaks(repr(shown))
    assert not leaks(repr(Value("S", b"p", VALUE.encode())))
    assert "PRIVATE" not in repr(authority)


async def test_no_log_no_note_and_no_error_has_it(
    scene: Stage, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    asyncio.get_running_loop().set_debug(True)
    scene.carrier.grants = [grant(places=ALL_PLACES)]
    told: list[bytes] = []

    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Says everything it was told where an answer should be."""
        told.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(told[-1])

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 " + told[-1][:300].replace(b"\r\n", b" ") + b"\r\nContent-Length: 99\r\n\r\n")
        writer.transport.abort()

    door = await scene.door()
    answers: list[str] = []
    for handler in (Recorder(lambda seen: answered(repr(seen).encode())), rude, cut):
        await scene.server(handler)
        scene.engine.forget(scene.carrier)
        for headers in ([BEARER], [BASIC], [BEARER, "X: a\x01b"], [BEARER] + [f"X-{n}: y" for n in range(201)]):
            try:
                answers.append(repr(await scene.ask(door, get(f"/?k={PLACEHOLDER}", *headers))))
            except ConnectionError as error:
                answers.append(repr(error))
    scene.carrier.values["KEY"] = VALUE + "\x07"
    answers.append(repr(await scene.ask(door, get("/", BEARER))))
    assert any(leaks(one.decode()) for one in told), "the servers did get it"
    shown = capfd.readouterr()
    for text in (*answers, repr(scene.carrier.notes), caplog.text, shown.out, shown.err):
        assert not leaks(text)


async def test_a_fault_of_ours_does_not_tell_it(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception that the caller sees, with all that it was raised from."""
    scene.carrier.grants = [grant()]

    def fail(target: Target, kind: str, verdict: Verdict, **more: Any) -> None:
        raise RuntimeError("the log is broken")

    await scene.server(Recorder())
    port = await scene.door()
    failures: list[BaseException] = []
    monkeypatch.setattr(scene.carrier, "note", fail)
    monkeypatch.setattr(scene, "_ended", lambda task: failures.append(task.exception()))
    with pytest.raises(ConnectionError):
        await scene.ask(port, get("/", BEARER))
    text = "".join(traceback.format_exception(failures[0]))
    assert "the log is broken" in text
    assert not leaks(text)
    scene.serving.clear()
