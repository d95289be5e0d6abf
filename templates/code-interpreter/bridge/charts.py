"""The data that a matplotlib figure is drawn from, for those who want to draw it in their own way.

`{"version": 1, "charts": [{"type", "title", "x_label", "y_label", "x_scale", "y_scale", "elements": […]}]}`, one chart
for each pair of axes that holds something. `type` is line, scatter, bar, pie, box or unknown.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

#: Points of one element, elements of one chart and charts of one figure that are told.
MAX_POINTS = 10_000
MAX_ELEMENTS = 200
MAX_CHARTS = 32


def chart_of(figure: Any) -> dict[str, Any] | None:
    """None for a figure without data. Whatever is odd in one is no reason to lose its picture."""
    try:
        charts = [chart for axes in figure.axes[:MAX_CHARTS] if (chart := _chart(axes)) is not None]
    except Exception:
        return None
    return {"version": 1, "charts": charts} if charts else None


def _chart(axes: Any) -> dict[str, Any] | None:
    kinds = {"pie": _pie, "box": _boxes, "bar": _bars, "scatter": _scatter, "line": _lines}
    found = ((kind, elements) for kind, extract in kinds.items() if (elements := extract(axes)))
    kind, elements = next(found, ("unknown", []))
    if not elements and not axes.has_data():
        return None
    chart = {
        "type": kind,
        "title": axes.get_title(),
        "x_label": axes.get_xlabel(),
        "y_label": axes.get_ylabel(),
        "x_scale": axes.get_xscale(),
        "y_scale": axes.get_yscale(),
        "elements": elements[:MAX_ELEMENTS],
    }
    if len(elements) > MAX_ELEMENTS:
        chart["elements_dropped"] = len(elements) - MAX_ELEMENTS
    return chart


def _label(artist: Any) -> str:
    label = str(artist.get_label() or "")
    return "" if label.startswith("_") else label


def _value(value: Any) -> Any:
    """A number, text or a time as text; what is not finite is None, because JSON has no word for it."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool | int | str):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


def _points(xs: Any, ys: Any) -> list[list[Any]]:
    return [[_value(x), _value(y)] for x, y in zip(list(xs)[:MAX_POINTS], list(ys)[:MAX_POINTS], strict=False)]


def _lines(axes: Any) -> list[dict[str, Any]]:
    found = []
    for line in axes.get_lines():
        xs, ys = line.get_xdata(orig=True), line.get_ydata(orig=True)
        if hasattr(xs, "dtype") and xs.dtype.kind == "M":
            xs = [str(x) for x in xs]
        found.append({"label": _label(line), "points": _points(xs, ys)})
    return [element for element in found if element["points"]]


def _scatter(axes: Any) -> list[dict[str, Any]]:
    from matplotlib.collections import PathCollection

    found = []
    for collection in axes.collections:
        if isinstance(collection, PathCollection):
            pairs = collection.get_offsets()
            found.append({"label": _label(collection), "points": _points(pairs[:, 0], pairs[:, 1])})
    return [element for element in found if element["points"]]


def _bars(axes: Any) -> list[dict[str, Any]]:
    from matplotlib.container import BarContainer

    found = []
    for container in axes.containers:
        if not isinstance(container, BarContainer):
            continue
        flat = getattr(container, "orientation", "vertical") == "horizontal"
        names = _ticks(axes.yaxis if flat else axes.xaxis)
        for bar in container.patches[:MAX_POINTS]:
            middle = bar.get_y() + bar.get_height() / 2 if flat else bar.get_x() + bar.get_width() / 2
            value = bar.get_width() if flat else bar.get_height()
            name = _nearest(names, float(middle))
            if name is None:
                name = _value(middle)
            found.append({"label": str(name), "group": _label(container), "value": _value(value)})
    return found


def _ticks(axis: Any) -> dict[float, str]:
    """Names of places on an axis, where it has names and not only numbers."""
    mapping = getattr(axis.units, "_mapping", None)
    if mapping:
        return {float(place): str(name) for name, place in mapping.items()}
    if type(axis.get_major_formatter()).__name__ not in {"FixedFormatter", "FuncFormatter"}:
        return {}
    places, names = axis.get_ticklocs(), axis.get_ticklabels()
    return {float(p): n.get_text() for p, n in zip(places, names, strict=False) if n.get_text()}


def _nearest(names: dict[float, str], place: float) -> str | None:
    """Bars of several groups stand side by side around the place that has the name."""
    if not names:
        return None
    places = sorted(names)
    closest = min(places, key=lambda one: abs(one - place))
    gap = min((b - a for a, b in itertools.pairwise(places)), default=1.0)
    return names[closest] if abs(closest - place) <= gap / 2 else None


def _pie(axes: Any) -> list[dict[str, Any]]:
    from matplotlib.patches import Wedge

    wedges = [patch for patch in axes.patches if isinstance(patch, Wedge)]
    return [
        {
            "label": str(wedge.get_label() or "") if not str(wedge.get_label()).startswith("_") else "",
            "angle": _value(wedge.theta2 - wedge.theta1),
            "fraction": _value((wedge.theta2 - wedge.theta1) / 360),
            "radius": _value(wedge.r),
        }
        for wedge in wedges
    ]


def _boxes(axes: Any) -> list[dict[str, Any]]:
    """Of a box plot matplotlib keeps no numbers, but the lines that it has drawn of them: box, whiskers, caps, median
    and fliers, in this order for each box."""

    found = []
    lines = axes.get_lines()
    names = _ticks(axes.xaxis)
    position = 0
    while position < len(lines):
        group = [line.get_ydata() for line in lines[position : position + 7]]
        if len(group) < 6 or [len(y) for y in group[:6]] != [5, 2, 2, 2, 2, 2]:
            return []
        box, low, high, _, _, median = group[:6]
        has_fliers = len(group) == 7 and lines[position + 6].get_linestyle() in {"None", ""}
        middle = float(sum(lines[position + 5].get_xdata()) / 2)
        found.append(
            {
                "label": _nearest(names, middle) or str(_value(middle)),
                "min": _value(low[1]),
                "first_quartile": _value(min(box)),
                "median": _value(median[0]),
                "third_quartile": _value(max(box)),
                "max": _value(high[1]),
                "outliers": [_value(y) for y in group[6]] if has_fliers else [],
            }
        )
        position += 7 if has_fliers else 6
    return found
