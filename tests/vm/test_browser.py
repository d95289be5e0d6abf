"""A browser at a development server in a real machine: the page comes, and changes while files do."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from kit.browser import Browser, chromium, packed
from kit.client import Api, Box

FILES = {
    "package.json": '{"type": "module"}',
    "index.html": '<!doctype html><p id="said">nothing yet</p><script type="module" src="/main.js"></script>',
    "main.js": (
        "import { text } from './text.js'\n"
        "const show = (text) => { document.getElementById('said').textContent = text }\n"
        "show(text)\n"
        "import.meta.hot.accept('./text.js', (module) => show(module.text))\n"
    ),
    "text.js": "export const text = 'first'\n",
}
SAID = "document.getElementById('said') && document.getElementById('said').textContent"
LOG = "/root/vite.log"


@pytest.fixture
def project() -> bytes:
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    if chromium() is None:
        missing.append("chromium-headless-shell")
    if missing:
        pytest.skip(f"NO BROWSER TEST: {' and '.join(missing)} is not installed here")
    try:
        return packed(FILES)
    except subprocess.SubprocessError as error:
        pytest.skip(f"NO BROWSER TEST: Vite could not be installed ({error})")


@pytest.fixture
def developed(api: Api, project: bytes) -> Iterator[Box]:
    """A sandbox with Vite on port 5173."""
    box = api.create()
    try:
        box.put("/root/app.tar", project)
        box.sh("tar -xf /root/app.tar -C /root && rm /root/app.tar", timeout_seconds=120)
        box.put(LOG, b"")
        run = "cd /root/app && LD_LIBRARY_PATH=lib exec bin/node node_modules/vite/bin/vite.js --host 0.0.0.0"
        box.start(f"{run} > {LOG} 2>&1")
        deadline = time.monotonic() + 120
        while b"ready in" not in box.get(LOG):
            assert time.monotonic() < deadline, box.get(LOG)
            time.sleep(0.5)
        yield box
    finally:
        box.delete()


def test_a_page_is_reloaded_while_it_is_hot(api: Api, developed: Box) -> None:
    url = api.call("GET", f"{developed.path}/ports/5173")["proxy_url"]
    program = chromium()
    assert program is not None
    with Browser(program) as browser:
        browser.call("Page.navigate", url=url)
        browser.wait(SAID, "first", 60)
        # What a page that was loaded anew would have forgotten.
        browser.value("window.mark = 'the same page'")
        for text in ("second", "third"):
            developed.put("/root/app/text.js", f"export const text = '{text}'\n".encode())
            browser.wait(SAID, text, 60)
        assert browser.value("window.mark") == "the same page"
