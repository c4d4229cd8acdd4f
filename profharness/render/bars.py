"""Draw charts of the kind `stack` as HTML bars that need no library and fit every width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from profharness.render.colors import IDLE, ink_on, series_colors
from profharness.render.document import Chart, axis_text
from profharness.render.html_text import plain, prose
from profharness.units import share_text

LETTERED = 0.03  # minimum share of a bar for which a text is drawn inside; CSS hides longer texts


def draw_bars(chart: Chart) -> str:
    """Return the bars of a chart with a legend.

    Draw a single bar of several parts taller, and list its parts with their labels. Do the same for
    bars of which each part has a label.
    """
    rows = chart.plain_rows()
    names = list(dict.fromkeys(row["series"] for row in rows))
    colors = dict(zip(names, series_colors(names), strict=True))
    bars: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        bars.setdefault(str(row["y"]), []).append(row)
    if len(bars) == 1 and len(rows) > 1:
        return _listed(rows, colors)
    longest = max((sum(row["x"] for row in parts) for parts in bars.values()), default=0) or 1
    divided = any(len(parts) > 1 for parts in bars.values())
    if divided and all(row["label"] for row in rows):
        return "".join(_titled(name, parts, longest, colors, chart) for name, parts in bars.items())
    lines = "".join(
        f'<li><span class="name">{plain(name)}</span><span class="track">'
        f"{_parts(parts, longest, colors, chart.x_title)}</span>"
        f'<span class="value">{prose(_label(parts, chart.x_title))}</span></li>'
        for name, parts in bars.items()
    )
    return f'{legend(colors)}<ul class="bars">{lines}</ul>'


def _titled(
    name: str,
    parts: Sequence[Mapping[str, Any]],
    longest: float,
    colors: Mapping[str, str],
    chart: Chart,
) -> str:
    """Return a bar below its name and its sum. The bar with the length `longest` has full width."""
    whole = sum(row["x"] for row in parts)
    title = f"<b>{plain(name)}</b> {prose(axis_text(whole, chart.x_title))}"
    return f'<p class="bar-name">{title}</p>{_listed(parts, colors, whole / longest)}'


def legend(colors: Mapping[str, str]) -> str:
    """Return a list of series with their colours."""
    items = "".join(
        f"<li>{swatch(name, color)}{plain(name)}</li>" for name, color in colors.items()
    )
    return f'<ul class="legend">{items}</ul>'


def swatch(name: str, color: str) -> str:
    """Return a small square in the colour of a series."""
    return f'<i class="{_class(name)}" style="background-color:{color}"></i>'


def _listed(rows: Sequence[Mapping[str, Any]], colors: Mapping[str, str], length: float = 1) -> str:
    """Return a bar that takes the share `length` of the width, and a list of its parts."""
    whole = sum(row["x"] for row in rows) or 1
    parts, items = [], []
    for row in rows:
        name, share = row["series"], row["x"] / whole
        color, text = colors[name], f"{name}: {row['label']}"
        inside = f"<b>{share_text(share)}</b>" if share >= LETTERED else ""
        parts.append(
            f'<i class="{_class(name)}" title="{plain(text)}" style="width:{100 * share:.3f}%;'
            f'background-color:{color};color:{ink_on(color)}">{inside}</i>'
        )
        items.append(
            f"<li>{swatch(name, color)}<b>{plain(name)}</b> <span>{prose(row['label'])}</span></li>"
        )
    width = f' style="width:{100 * length:.3f}%"' if length < 1 else ""
    return (
        f'<div class="bar" aria-hidden="true"{width}>{"".join(parts)}</div>'
        f'<ul class="legend parts">{"".join(items)}</ul>'
    )


def _parts(
    parts: Iterable[Mapping[str, Any]], longest: float, colors: Mapping[str, str], axis: str
) -> str:
    return "".join(
        f'<i class="{_class(row["series"])}" title="{plain(_title(row, axis))}" '
        f'style="width:{100 * row["x"] / longest:.3f}%;background-color:{colors[row["series"]]}"></i>'
        for row in parts
    )


def _title(row: Mapping[str, Any], axis: str) -> str:
    return f"{row['series']}: {row['label'] or axis_text(row['x'], axis)}"


def _label(parts: Sequence[Mapping[str, Any]], axis: str) -> str:
    labels = [row["label"] for row in parts if row["label"]]
    # If each part has a label, the hover texts show the labels, and the bar has the sum.
    return labels[0] if len(labels) == 1 else axis_text(sum(row["x"] for row in parts), axis)


def _class(name: str) -> str:
    return "idle" if name == IDLE else "part"
