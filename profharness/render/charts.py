"""Draw charts as SVG and PNG with Vega-Altair and vl-convert, without a browser or a network.

Importing this module raises MissingExtraError without the `report` extra.
"""

from __future__ import annotations

import html
import math
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from profharness.errors import MissingExtraError, one_line
from profharness.render.colors import DARK, LIGHT, SHAPES, backend_styles, series_colors
from profharness.render.document import FLOPS, Chart, axis_text, axis_title

# Altair imports jsonschema, which would spend 2 seconds compiling a grammar with this optional
# package. Charts do not need the package, so hide it from jsonschema.
_SLOW = "rfc3987_syntax"
_HIDDEN = _SLOW not in sys.modules
if _HIDDEN:
    sys.modules[_SLOW] = None  # type: ignore[assignment]
try:
    import altair as alt
    import vl_convert
    from altair.utils.schemapi import debug_mode
except ImportError:
    raise MissingExtraError("drawing a chart", "report") from None
finally:
    if _HIDDEN:
        del sys.modules[_SLOW]

LANE = 9  # height of the lane of a series in a chart of dots
OF_BACKENDS = ("lines", "dots", "roofline")  # kinds of charts in which each series is a backend
DATA = alt.NamedData(
    name="rows"
)  # the rows are inserted last, because Altair would copy them dozens of times
INK = "#0a0b0c"  # placeholder for the text colour of the page
WIDTH, NARROW = 1200, 336  # pixels; a phone has at least 360
FITTED = alt.AutoSizeParams(type="fit-x", contains="padding")  # WIDTH includes the labels
LINES_HEIGHT, TEXT_HEIGHT = 340, 15  # heights of a `lines` chart and of a text in it, in pixels
TIME_LABEL = (
    "datum.value >= 1e6 ? format(datum.value / 1e6, '~g') + ' s' : "
    "datum.value >= 1e3 ? format(datum.value / 1e3, '~g') + ' ms' : format(datum.value, '~g') + ' µs'"
)  # the text of a tick on an axis in µs
TERA_LABEL = "format(datum.value / 1e12, ',~g')"  # the text of a tick on an axis in FLOP/s
MOST_DECADES = 4  # maximum number of powers of 10 on an axis that also has ticks at 2 and 5
APART = {"labelOverlap": "greedy", "labelSeparation": 8}  # hides labels of ticks that would collide
DECADE = 60  # height of a power of 10 in a roofline chart in pixels
MOST_COLUMNS = 8  # maximum number of intensities in a roofline chart that have numbers
LIST_LETTERS = 48  # maximum number of letters in a line of the list in a roofline chart
NEAR = 0.08  # share of the x axis of a roofline below which two numbers would collide
MARK_ROOM = 9  # pixels between the middle of a mark and the line to its number
STEP = 22  # pixels per row of a chart with labels
MAX_LABEL, NARROW_LABEL = 320, 130
LABEL_LETTERS, NARROW_LETTERS = 46, 20  # maximum number of letters in a line of a label
NARROW_TITLE = 42  # maximum number of letters in a line of the title of a narrow chart
LABEL_LINE = 20  # height that each further line of a label adds to its row in pixels
# These fonts have the same widths, so that the text fits on machines that lack the first font.
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
_THEME_STYLE = (
    f"<style>svg{{color:{LIGHT[1]};background:{LIGHT[0]}}}"
    f"@media (prefers-color-scheme:dark){{svg{{color:{DARK[1]};background:{DARK[0]}}}}}</style>"
)
_MARK = re.compile(r'<path aria-label="([^"]*)"([^>]*?)(?:/>|></path>)')
_NUMBER = re.compile(r"([0-9]{1,18})")
_PARTS = re.compile(r"[^-. ]*[-. ]+|[^-. ]+$")
_CLIP = re.compile(r'(id="|url\(#)(clip|gradient)')


def altair_chart(chart: Chart, *, narrow: bool = False) -> alt.LayerChart | alt.Chart:
    """Convert a chart to an Altair chart. If `narrow` is set, the chart fits a phone."""
    chart = _wrapped(_printable(chart), narrow=narrow)
    drawn = DRAWERS[chart.kind](chart)
    fitted = {} if chart.kind == "map" else {"autosize": FITTED}
    if narrow:
        room = NARROW if fitted else NARROW - NARROW_LABEL
        drawn = drawn.properties(width=min(drawn.width, room))
    side = 2 if narrow else 24
    lines = textwrap.wrap(chart.title, NARROW_TITLE, break_on_hyphens=False)
    title = "\n".join(lines) if narrow else chart.title
    return drawn.properties(title=title, **fitted).configure(
        background="transparent",
        padding={"left": side, "right": min(side, 16), "top": 5, "bottom": 5},
        font=FONT,
        lineBreak="\n",
        title={"color": INK, "anchor": "start", "fontSize": 14},
        axis={
            **dict.fromkeys(("labelColor", "titleColor", "tickColor", "domainColor"), INK),
            "gridColor": INK,
            "gridOpacity": 0.12,
            "labelLimit": NARROW_LABEL if narrow else MAX_LABEL,
            "labelFontSize": 12,
            "titleFontSize": 12,
        },
        legend={
            "labelColor": INK,
            "titleColor": INK,
            "labelFontSize": 12,
            "orient": "top",
            "columns": 3 if narrow else alt.Undefined,
        },
        view={"stroke": None},
    )


def chart_spec(chart: Chart, *, narrow: bool = False) -> dict[str, Any]:
    """Convert a chart to a Vega-Lite specification that contains its rows.

    The specification is validated only in tests.
    """
    with debug_mode(False):
        spec: dict[str, Any] = altair_chart(chart, narrow=narrow).to_dict(validate=False)
    spec.setdefault("datasets", {})[DATA.name] = _rows(_wrapped(_printable(chart), narrow=narrow))
    return spec


def draw_svg(chart: Chart, number: int = 1, *, alone: bool = False, narrow: bool = False) -> str:
    """Draw a chart as one `<svg>` element with a `<title>` per mark.

    `number` makes the ids of several charts on a page distinct. If `narrow` is true, the chart fits a
    phone. If `alone` is true, draw the chart for a separate file, with colours that follow the theme
    of the reader.
    """
    # Allow no URL, because a chart needs nothing from the network.
    svg = str(vl_convert.vegalite_to_svg(chart_spec(chart, narrow=narrow), allowed_base_urls=[]))
    svg = _CLIP.sub(rf"\g<1>chart{number}-\g<2>", svg).replace(INK, "currentColor")
    svg = _MARK.sub(r'<path aria-label="\1"\2><title>\1</title></path>', svg)
    if alone:
        return svg.replace(">", ">" + _THEME_STYLE, 1)
    description = ". ".join(part for part in (chart.title, chart.caption) if part)
    label = html.escape(one_line(description))
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def draw_png(chart: Chart, scale: float = 2.0) -> bytes:
    """Draw a chart as PNG on a light background."""
    spec = chart_spec(chart)
    spec["config"]["background"] = LIGHT[0]
    return bytes(vl_convert.vegalite_to_png(spec, scale=scale, allowed_base_urls=[]))


def _printable(chart: Chart) -> Chart:
    """Replace the characters in the texts of a chart that vl-convert cannot draw.

    Convert each text to a single line without control characters, because a control character makes
    vl-convert end the process. Replace characters beyond the Basic Multilingual Plane, because Vega
    may cut a long label in the middle of a surrogate pair, and vl-convert cannot draw the result.
    """

    def draw(text: str) -> str:
        return "".join(char if char <= "\uffff" else "\ufffd" for char in one_line(text))

    def clean(value: Any) -> Any:
        return draw(value) if isinstance(value, str) else value

    texts = {name: draw(getattr(chart, name)) for name in ("title", "x_title", "y_title")}
    marks = tuple((x, draw(text)) for x, text in chart.marks)
    rows = tuple({key: clean(value) for key, value in row.items()} for row in chart.rows)
    roofs = tuple(replace(roof, label=draw(roof.label)) for roof in chart.roofs)
    return replace(chart, rows=rows, roofs=roofs, marks=marks, **texts)


def _wrapped(chart: Chart, *, narrow: bool) -> Chart:
    """Break the labels of the y axis between their parts into lines that fit beside the chart."""
    letters = NARROW_LETTERS if narrow else LABEL_LETTERS
    rows = tuple(
        {**row, chart.y: wrapped_label(row[chart.y], letters)}
        if isinstance(row[chart.y], str)
        else row
        for row in chart.rows
    )
    return replace(chart, rows=rows)


def wrapped_label(text: str, letters: int) -> str:
    """Break a label after hyphens, spaces and dots, so that a line has at most `letters` if possible."""
    lines = [""]
    for part in _PARTS.findall(text):
        if lines[-1] and len((lines[-1] + part).rstrip()) > letters:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _rows(chart: Chart) -> list[dict[str, Any]]:
    rows, names = chart.plain_rows(), _names(chart)
    for row in rows:
        row["place"] = names.index(row["series"])
        about = f" at {row['label']}" if row["label"] else ""
        # An interval belongs to the values of `lines` on the y axis, and of other charts on the x axis.
        interval = chart.y_title if chart.kind == "lines" else chart.x_title
        y, x, low, high = (
            axis_text(value, title) if isinstance(value, float) else str(value).replace("\n", "")
            for value, title in (
                (row["y"], chart.y_title),
                (row["x"], chart.x_title),
                (row["low"], interval),
                (row["high"], interval),
            )
        )
        between = "" if row["low"] is None else f", {low} to {high}"
        row["text"] = f"{row['series']}{about}: {y}, {x}{between}"
    return rows


def _names(chart: Chart) -> list[str]:
    return list(dict.fromkeys(row["series"] for row in chart.plain_rows()))


def _color(chart: Chart) -> Any:
    names = _names(chart)
    colors = series_colors(names)
    if chart.kind in OF_BACKENDS:
        colors = [color for color, _ in backend_styles(names)]
    scale = alt.Scale(domain=names, range=colors)
    return alt.Color("series:N", title=None, scale=scale)


def _log(
    channel: str,
    name: str,
    title: str,
    *,
    values: Sequence[Any] = (),
    ends: tuple[float, float] | None = None,
    shown: Collection[float] = (),
) -> Any:
    """Return a logarithmic axis.

    If `values` is given, place ticks only at these values. `ends` contains the start and the end of
    the axis, and `shown` the values on an axis without `ends`.
    """
    axis: dict[str, Any] = {"format": "d" if values else ",~g", **APART}
    scale: dict[str, Any] = {"type": "log", "nice": False}
    if not values and ends is None:
        ends = _round_ends(min(shown, default=1), max(shown, default=1))
    if values:
        axis["values"] = list(values)
    elif ends and (ticks := _ticks(*ends)):
        axis["values"] = ticks
    if ends:
        scale["domain"] = list(ends)
    if title.startswith("µs"):
        axis["labelExpr"] = TIME_LABEL
    if title == FLOPS:
        axis["labelExpr"] = TERA_LABEL
    return getattr(alt, channel)(
        f"{name}:Q", title=axis_title(title), scale=alt.Scale(**scale), axis=alt.Axis(**axis)
    )


def _round_ends(low: float, high: float) -> tuple[float, float]:
    """Return the nearest round values, such as 5 and 50, between which all values are."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 2)
    values = [float(f"{step}e{power}") for power in powers for step in (1, 2, 5)]
    first = max(value for value in values if value <= low)
    return first, min(value for value in values if value >= high and value > first)


def _ticks(low: float, high: float) -> list[float]:
    """Return round values for the ticks of a logarithmic axis: 1, 2, 5, 10, or only powers of 10.

    Return an empty list for less than a power of 10, so that Vega chooses the ticks.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if high < 10 * low:
        return []
    steps = (1, 2, 5) if last - first <= MOST_DECADES else (1,)
    return [float(f"{step}e{power}") for power in range(first, last + 1) for step in steps]


def _shown(chart: Chart, name: str) -> list[float]:
    """Return the positive values on an axis of a chart, including the ends of its intervals."""
    interval = ("low", "high") if (name == "y") == (chart.kind == "lines") else ()
    return [
        row[key] for row in chart.plain_rows() for key in (name, *interval) if (row[key] or 0) > 0
    ]


def _label_axis(chart: Chart, *, separated: bool = False) -> tuple[Any, int]:
    """Return the y axis of a chart with labels, and the height of the chart.

    If `separated` is set, lines of the grid separate the labels.
    """
    labels = list(dict.fromkeys(row["y"] for row in chart.plain_rows()))
    rules = alt.Axis(grid=True, tickBand="extent") if separated else alt.Undefined
    axis = alt.Y("y:N", title=chart.y_title or None, sort=labels, axis=rules)
    lines = max((str(label).count("\n") + 1 for label in labels), default=1)
    return axis, (STEP + LABEL_LINE * (lines - 1)) * max(len(labels), 2)


def _bands(chart: Chart, labels: Any) -> Any:
    """Return a shade behind every second label of the y axis, so that marks belong to one label."""
    shaded = list(dict.fromkeys(row["y"] for row in chart.plain_rows()))[::2]
    return (
        alt.Chart(DATA)
        .transform_aggregate(groupby=["y"])
        .transform_filter(f"indexof({shaded!r}, datum.y) >= 0")
        .mark_rect(color=INK, opacity=0.06, aria=False, height=alt.expr("bandwidth('y')"))
        .encode(y=labels)
    )


def _points(chart: Chart, base: Any, size: int, growth: int = 50, **encoding: Any) -> Any:
    """Return outlined marks with a separate colour and shape for each series.

    Draw marks of earlier series larger by `growth`, so that all marks at the same position are
    visible.
    """
    parts = [
        part.mark_point(filled=False, opacity=1, strokeWidth=2, size=size + growth * behind)
        for part, behind in _by_series(chart, base)
    ]
    drawn = {"color": _color(chart), "shape": _backend_shape(chart), "description": "text:N"}
    return alt.layer(*(part.encode(**(drawn | encoding)) for part in parts))


def _by_series(chart: Chart, base: Any) -> list[tuple[Any, int]]:
    """Return a layer for each series, with the number of series that are drawn above the layer."""
    count = len(_names(chart))
    return [
        (base.transform_filter(f"datum.place == {place}"), count - 1 - place)
        for place in range(count)
    ]


def _intervals(chart: Chart, base: Any, axis: str) -> list[Any]:
    """Return a line from `low` to `high` along the axis for each mark that has both values.

    A logarithmic axis cannot show an interval that reaches 0.
    """
    if all(row["low"] is None for row in chart.plain_rows()):
        return []
    ends = {axis: "low:Q", f"{axis}2": "high:Q"}
    rules = base.transform_filter("datum.low > 0").mark_rule(aria=False, strokeWidth=2)
    return [rules.encode(color=_color(chart), **ends)]


def _lines(chart: Chart) -> Any:
    rows = chart.plain_rows()
    places = sorted({row["x"] for row in rows})
    x = _log("X", "x", chart.x_title, values=places if len(places) <= 12 else (), shown=places)
    ends = None
    if chart.marks and rows:
        # leave space above the points for the texts of marks
        values = [
            value
            for row in rows
            for value in (row["y"], row["low"], row["high"])
            if (value or 0) > 0
        ]
        low, high = min(values) / 1.2, max(values) * 1.2
        share = min((len(chart.marks) + 0.5) * TEXT_HEIGHT / LINES_HEIGHT, 0.6)
        ends = low, low * (high / low) ** (1 / (1 - share))
    y = _log("Y", "y", chart.y_title, ends=ends, shown=_shown(chart, "y"))
    base = alt.Chart(DATA).encode(x=x, y=y, color=_color(chart))
    # The lines below are visible between the dashes.
    lines = [
        part.mark_line(aria=False, strokeDash=[8, 4 * place])
        for place, (part, _) in enumerate(_by_series(chart, base))
    ]
    layers = alt.layer(
        *_mark_layers(chart, x, places),
        *lines,
        *_intervals(chart, base, "y"),
        _points(chart, base, 60),
    )
    return layers.properties(width=WIDTH, height=LINES_HEIGHT)


def _mark_layers(chart: Chart, axis: Any, places: Sequence[float]) -> Iterator[Any]:
    """Yield the layers of marks. Each mark has a text and a dashed line down to the x axis."""
    middle = math.sqrt(places[0] * places[-1]) if places else 0.0
    for number, (x, mark) in enumerate(chart.marks):
        top = alt.value((number + 0.6) * TEXT_HEIGHT)
        base = alt.Chart(alt.Data(values=[{"x": x, "mark": mark}])).encode(x=axis, y=top)
        align, shift = ("left", 5) if x <= middle else ("right", -5)
        rule = base.mark_rule(color=INK, strokeDash=[2, 4], opacity=0.5, aria=False)
        yield rule.encode(y2=alt.value(LINES_HEIGHT))
        text = base.mark_text(color=INK, align=align, dx=shift, fontSize=11, aria=False)
        yield text.encode(text="mark:N")


def _dots(chart: Chart) -> Any:
    labels, height = _label_axis(chart, separated=True)
    names = _names(chart)
    # A lane for each series keeps marks with equal times apart.
    lane = alt.YOffset("series:N", sort=names, scale=alt.Scale(domain=names))
    base = alt.Chart(DATA).encode(
        x=_log("X", "x", chart.x_title, shown=_shown(chart, "x")), y=labels, yOffset=lane
    )
    layers = alt.layer(
        _bands(chart, labels), *_intervals(chart, base, "x"), _points(chart, base, 50, growth=0)
    )
    return layers.properties(width=WIDTH, height=height * max(1, LANE * len(names) / STEP))


def _stack(chart: Chart) -> Any:
    labels, height = _label_axis(chart)
    expression = TIME_LABEL if chart.x_title.startswith("µs") else alt.Undefined
    axis = alt.Axis(labelExpr=expression, **APART)
    return (
        alt.Chart(DATA)
        .mark_bar()
        .encode(
            x=alt.X("x:Q", title=axis_title(chart.x_title), axis=axis, stack="zero"),
            y=labels,
            color=_color(chart),
            order=alt.Order("place:Q"),
            description="text:N",
        )
        .transform_calculate(place=f"indexof({_names(chart)!r}, datum.series)")
        .properties(width=WIDTH, height=height)
    )


def _map(chart: Chart) -> Any:
    rows = chart.plain_rows()
    places, labels = (
        sorted({row[axis] for row in rows}, key=lambda value: by_number(str(value)))
        for axis in ("x", "y")
    )
    base = alt.Chart(DATA).encode(
        x=alt.X("x:O", title=chart.x_title, sort=places, axis=alt.Axis(labelAngle=0, orient="top")),
        y=alt.Y("y:N", title=chart.y_title or None, sort=labels),
    )
    tiles = base.mark_rect(stroke="#808080", strokeWidth=0.5).encode(
        color=_color(chart), description="text:N"
    )
    texts = base.mark_text(fontSize=11, color="#ffffff", aria=False).encode(text="series:N")
    width = max(min(WIDTH - MAX_LABEL, 76 * len(places)), 76)
    return (tiles + texts).properties(width=width, height=_label_axis(chart)[1])


def by_number(text: str) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers in a text by value: `d64` precedes `d128`."""
    parts = _NUMBER.split(text)  # texts and numbers alternate in this list
    return [(int(part), "") if n % 2 else (0, part) for n, part in enumerate(parts)]


def _roofline(chart: Chart) -> Any:
    rows = chart.plain_rows()
    xs = [row["x"] for row in rows] + [roof.flops_per_s / roof.bytes_per_s for roof in chart.roofs]
    ends = (min(xs) / 2, max(xs) * 2) if xs else (0.1, 1000.0)
    roofs = [
        {"x": x, "y": min(roof.bytes_per_s * x, roof.flops_per_s), "roof": roof.label}
        for roof in chart.roofs
        for x in (ends[0], roof.flops_per_s / roof.bytes_per_s, ends[1])
    ]
    ys = [row["y"] for row in (*rows, *roofs)]
    low, high = (min(ys) / 2, max(ys) * 2) if ys else (1e9, 1e15)
    # If the marks of a config have the same intensity, they differ by the shape of their backend.
    labels = {row["label"] for row in rows}
    in_place = len(labels) == len({(row["label"], row["x"]) for row in rows})
    columns = _columns(chart) if in_place else []
    listed = list(_column_list(columns))
    space = len(listed) * TEXT_HEIGHT
    height = DECADE * math.log10(high / low) + space  # the list of the configs is below the marks
    bottom = low * (low / high) ** (space / (height - space))
    tall = (bottom, high)
    axes = {
        "x": _log("X", "x", chart.x_title or "FLOP per byte", ends=ends),
        "y": _log("Y", "y", chart.y_title or FLOPS, ends=tall),
    }
    roof_base = alt.Chart(alt.Data(values=roofs)).encode(**axes)
    lines = roof_base.mark_line(color=INK, strokeDash=[5, 3], aria=False).encode(detail="roof:N")
    texts = (
        alt.Chart(alt.Data(values=roofs[2::3]))
        .mark_text(align="right", dx=-4, dy=-7, color=INK, aria=False)
        .encode(**axes, text="roof:N")
    )
    shape = _backend_shape(chart) if in_place else _config_shape(chart)
    points = _points(chart, alt.Chart(DATA).encode(**axes), 60, growth=25, shape=shape)
    numbers = _column_numbers(columns, axes, ends)
    names = _list_layers(listed, height - space)
    drawn = alt.layer(lines, texts, *names, points, *numbers)
    return drawn.properties(width=WIDTH, height=round(height))


def _columns(chart: Chart) -> list[tuple[float, float, list[str]]]:
    """Return the intensity, the highest rate and the configs of each column of marks in a roofline.

    Return an empty list if there are too many columns for numbers.
    """
    columns: dict[float, list[dict[str, Any]]] = {}
    for row in sorted(chart.plain_rows(), key=lambda row: row["x"]):
        if row["label"]:
            columns.setdefault(row["x"], []).append(row)
    if len(columns) > MOST_COLUMNS:
        return []
    return [
        (x, max(row["y"] for row in rows), list(dict.fromkeys(row["label"] for row in rows)))
        for x, rows in columns.items()
    ]


def _column_list(columns: Sequence[tuple[float, float, list[str]]]) -> Iterator[str]:
    """Yield the lines of a list that gives each config of the columns a number."""
    configs = [config for *_, own in columns for config in own]
    for number, config in enumerate(configs, 1):
        yield from wrapped_label(f"{number}: {config}", LIST_LETTERS).split("\n")


def _list_layers(lines: Sequence[str], top: float) -> Iterator[Any]:
    """Yield the lines of a list at the left edge of a chart, below the height `top`."""
    for place, line in enumerate(lines):
        base = alt.Chart(alt.Data(values=[{"line": line}]))
        text = base.mark_text(color=INK, align="left", fontSize=11, aria=False)
        yield text.encode(
            x=alt.value(5), y=alt.value(top + (place + 0.5) * TEXT_HEIGHT), text="line:N"
        )


def _column_numbers(
    columns: Sequence[tuple[float, float, list[str]]],
    axes: Mapping[str, Any],
    ends: tuple[float, float],
) -> Iterator[Any]:
    """Yield the numbers of the configs of each column of marks above the marks.

    Of columns side by side, the numbers of the first are to the left of it, and the numbers of the
    others to the right and at different heights. A line leads from them to their column. `ends`
    contains the start and the end of the x axis.
    """
    near = (ends[1] / ends[0]) ** NEAR
    number = 0
    for group in _side_by_side(columns, near):
        highest = max(top for _, top, _ in group)
        for place, (x, top, configs) in enumerate(group):
            text = ", ".join(str(number + each) for each in range(1, len(configs) + 1))
            number += len(configs)
            row = {"x": x, "y": highest, "top": top, "number": text}
            base = alt.Chart(alt.Data(values=[row])).encode(**axes)
            # Numbers further to the right are lower, so that no line crosses a number.
            shift = -TEXT_HEIGHT * (len(group) - 1 - place) if place else 0
            if shift or top < highest:
                line = base.mark_rule(
                    color=INK,
                    opacity=0.5,
                    yOffset=shift - MARK_ROOM,
                    y2Offset=-MARK_ROOM,
                    aria=False,
                )
                yield line.encode(y2="top:Q")
            align, dx = ("left", 2) if place else ("right", -2) if group[1:] else ("center", 0)
            style = {"fontSize": 11, "fontWeight": "bold", "align": align, "dx": dx}
            drawn = base.mark_text(color=INK, dy=shift - TEXT_HEIGHT, aria=False, **style)
            yield drawn.encode(text="number:N")


def _side_by_side(
    columns: Sequence[tuple[float, float, list[str]]], near: float
) -> list[list[tuple[float, float, list[str]]]]:
    """Group the columns of which each has less than `near` times the intensity of the previous one."""
    groups: list[list[tuple[float, float, list[str]]]] = []
    for column in columns:
        if not groups or column[0] >= near * groups[-1][-1][0]:
            groups.append([])
        groups[-1].append(column)
    return groups


def _config_shape(chart: Chart) -> Any:
    """Return a shape for each config, or for each backend if there are more configs than shapes."""
    configs = list(dict.fromkeys(row["label"] for row in chart.plain_rows()))
    if len(configs) > len(SHAPES) or not all(configs):
        return _backend_shape(chart)
    scale = alt.Scale(domain=configs, range=_shapes(configs))
    legend = alt.Legend(orient="bottom", columns=1, labelLimit=0)
    return alt.Shape("label:N", title=None, scale=scale, legend=legend)


def _backend_shape(chart: Chart) -> Any:
    names = _names(chart)
    shapes = _shapes(names)
    if chart.kind in OF_BACKENDS:
        shapes = [shape for _, shape in backend_styles(names)]
    return alt.Shape("series:N", title=None, scale=alt.Scale(domain=names, range=shapes))


def _shapes(names: Sequence[str]) -> list[str]:
    return [SHAPES[n % len(SHAPES)] for n in range(len(names))]


def _dumbbell(chart: Chart) -> Any:
    labels, height = _label_axis(chart)
    base = alt.Chart(DATA).encode(
        x=_log("X", "x", chart.x_title, shown=_shown(chart, "x")), y=labels
    )
    bars = base.mark_line(color=INK, strokeWidth=2, opacity=0.5, aria=False).encode(detail="y:N")
    return (bars + _points(chart, base, 80)).properties(width=WIDTH, height=height)


DRAWERS: dict[str, Callable[[Chart], Any]] = {
    "lines": _lines,
    "dots": _dots,
    "stack": _stack,
    "map": _map,
    "roofline": _roofline,
    "dumbbell": _dumbbell,
}
