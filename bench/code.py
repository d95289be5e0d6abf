"""How long code takes: the first cell of a fresh sandbox, which finds a kernel in the snapshot, and those after it."""

from __future__ import annotations

import time

import httpx
from common import Report, client, create, delete, facts, milliseconds, must, parser


def cell(api: httpx.Client, sandbox_id: str, text: str = "1 + 1") -> float:
    """Milliseconds for a cell that must give the right value."""
    began = time.perf_counter()
    ran = must(api.post(f"/sandboxes/{sandbox_id}/code", json={"code": text}, timeout=300))
    took = milliseconds(began)
    assert ran["status"] == "ok", ran
    return took


def main() -> None:
    args = parser(__doc__, 8).parse_args()
    with client() as api:
        report = Report("code", facts(api))
        firsts, nexts, charts = [], [], []
        for _ in range(args.runs):
            sandbox_id = create(api, template="code-interpreter")["id"]
            try:
                firsts.append(cell(api, sandbox_id))
                nexts += [cell(api, sandbox_id) for _ in range(10)]
                draw = "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()"
                charts.append(cell(api, sandbox_id, draw))
            finally:
                delete(api, sandbox_id)
        report.add("first 1+1 after create", firsts, target=500.0)
        report.add("next 1+1", nexts, target=120.0)
        report.add("first chart", charts)
        report.finish()


if __name__ == "__main__":
    main()
