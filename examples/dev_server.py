"""A development server in a sandbox: seen from outside at its preview address, edited while it runs.

A small site is written into the sandbox, a service builds and serves it, and this program fetches its page, changes a
file, and fetches the page again. The same address works in a browser for as long as the sandbox lives.

. .cloche/env
.cloche/venv/bin/python examples/dev_server.py
"""

from __future__ import annotations

import sys
import time
from urllib.parse import urlsplit

import httpx

from cloche import HealthCheck, Sandbox

PORT = 3000
SITE = "/srv/site"

#: Renders the page anew for each request, as development servers do, from a template and a file of data.
SERVER = """\
import http.server, json, pathlib, string

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        values = json.loads(pathlib.Path("data.json").read_text())
        page = string.Template(pathlib.Path("page.html").read_text()).substitute(values).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

http.server.ThreadingHTTPServer(("0.0.0.0", 3000), Handler).serve_forever()
"""
PAGE = "<!doctype html><title>$title</title><h1>$title</h1>"


def fetch(url: str) -> str:
    """The page. Names below `localhost` lead here in browsers; not every resolver knows that, so it is said."""
    parts = urlsplit(url)
    headers = {}
    if (parts.hostname or "").endswith(".localhost"):
        headers["Host"] = parts.netloc
        url = parts._replace(netloc=f"127.0.0.1:{parts.port or 80}").geturl()
    answer = httpx.get(url, headers=headers, timeout=60, trust_env=False)
    answer.raise_for_status()
    return answer.text


def main() -> int:
    """0 when the change was seen from outside."""
    with Sandbox.create(ttl_seconds=600, metadata={"example": "dev_server"}) as sandbox:
        sandbox.files.write(f"{SITE}/server.py", SERVER)
        sandbox.files.write(f"{SITE}/page.html", PAGE)
        sandbox.files.write(f"{SITE}/data.json", '{"title": "Hello"}')
        web = sandbox.services.define(
            "web", ["python3", "server.py"], cwd=SITE, health=HealthCheck(http=PORT, interval=2)
        )
        state = web.wait("healthy", "failed", timeout=120).state
        if state != "healthy":
            print("\n".join(web.logs(tail=20).lines), file=sys.stderr)
            return 1
        url = sandbox.preview_url(PORT)
        print(f"the server is {state}, and at {url}")

        before = fetch(url)
        print(f"the page: {before}")
        sandbox.files.write(f"{SITE}/data.json", '{"title": "Hello again"}')
        began = time.perf_counter()
        after = fetch(url)
        print(f"after the edit: {after}  ({(time.perf_counter() - began) * 1000:.0f} ms)")

        changed = "<h1>Hello</h1>" in before and "<h1>Hello again</h1>" in after
        print(f"the change is seen from outside: {'yes' if changed else 'NO'}")
    return 0 if changed else 1


if __name__ == "__main__":
    sys.exit(main())
