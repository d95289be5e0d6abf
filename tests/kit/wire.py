"""Networks between client and server that misbehave: a wire that goes dead, and a real nginx."""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest


class Wire:
    """Forwards TCP to a server. `freeze` drops everything from then on, as a firewall does: nobody is told."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (str(parts.hostname), int(parts.port or 80))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._frozen = threading.Event()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        self._frozen.set()

    def close(self) -> None:
        """Ends every connection with a reset, and the wire."""
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self._frozen.is_set():
                    target.sendall(data)
            if not self._frozen.is_set():
                target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def wire(url: str) -> Iterator[Wire]:
    made = Wire(url)
    try:
        yield made
    finally:
        made.close()


_NGINX = """\
daemon off;
master_process off;
pid {work}/nginx.pid;
error_log {work}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {work}/body;
  proxy_temp_path {work}/proxy;
  fastcgi_temp_path {work}/f;
  uwsgi_temp_path {work}/u;
  scgi_temp_path {work}/s;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass {url};
      proxy_read_timeout {idle}s;
      proxy_send_timeout {idle}s;
    }}
  }}
}}
"""


@contextlib.contextmanager
def nginx(url: str, idle: int) -> Iterator[str]:
    """The address of a real nginx before `url`, at its defaults but for the idle time (60 s)."""
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if binary is None:
        pytest.skip("NGINX IS MISSING: nothing proves that quiet streams survive a proxy; apt-get install nginx-light")
    with tempfile.TemporaryDirectory(prefix="ct-nginx-", dir="/tmp") as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = Path(folder) / "nginx.conf"
        config.write_text(_NGINX.format(work=folder, port=port, url=url, idle=idle))
        process = subprocess.Popen([binary, "-p", folder, "-c", config], stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 20
            while True:
                assert process.poll() is None, (Path(folder) / "error.log").read_text()
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                assert time.monotonic() < deadline, "nginx does not listen"
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)
