"""A table goes in, a chart comes out: code that keeps its state, with the template `code-interpreter`.

.cloche/venv/bin/cloche-server template bake code-interpreter
. .cloche/env
.cloche/venv/bin/python examples/data_analysis.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from cloche import Execution, Sandbox

SALES = """month,region,amount
Jan,north,120
Jan,south,80
Feb,north,140
Feb,south,95
Mar,north,90
Mar,south,130
"""


def checked(found: Execution) -> Execution:
    """A run that was not well ends the program with its traceback."""
    if not found.ok:
        raise SystemExit(str(found.error or found.detail))
    return found


def main() -> None:
    """Upload, load, look, draw, save."""
    with Sandbox.create("code-interpreter", ttl_seconds=300) as sandbox:
        sandbox.files.write("/data/sales.csv", SALES)
        checked(sandbox.run_code("import pandas as pd\ndf = pd.read_csv('/data/sales.csv')"))
        totals = checked(sandbox.run_code("df.groupby('region')['amount'].sum()"))
        print(totals.text)

        drawn = checked(
            sandbox.run_code(
                "import matplotlib.pyplot as plt\n"
                "table = df.pivot(index='month', columns='region', values='amount').loc[['Jan', 'Feb', 'Mar']]\n"
                "table.plot.bar(rot=0, title='Sales')\n"
                "plt.show()"
            )
        )
        chart = drawn.results[0]
        assert chart.png is not None
        assert chart.chart is not None
        for bar in chart.chart["charts"][0]["elements"]:
            print(f"{bar['label']} {bar['group']}: {bar['value']:g}")
        target = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()) / "sales.png"
        target.write_bytes(chart.png)
        print(f"the chart is in {target}")


if __name__ == "__main__":
    main()
