"""HTTP of guests, read one request at a time: policy on each of them, and secrets put in and taken out again.

| module | what |
| --- | --- |
| `engine` | one connection: TLS, requests one after another |
| `exchange` | one request and its answer, streamed both ways |
| `refusal` | what a guest is answered instead |
| `request` | whose request it is: Host, target, SNI agree, or it is refused (pure) |
| `judge` | where placeholders stand in a request, and whether the value, nothing, or a refusal comes of it (pure) |
| `scan` | finding placeholders and values over the borders of chunks (pure) |
| `strip` | values out of answers (pure) |
| `link` | one side's bytes as HTTP events |
| `trust` | certificates towards guests, verification of servers |
"""

from cloche_server.netd.http.engine import Engine

__all__ = ["Engine"]
