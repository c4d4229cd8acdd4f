"""Draw charts with the real libraries, and check marks, colours, labels and the lack of external
references.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from chart_samples import BACKENDS, NASTY, SAMPLES
from hypothesis import example, given, settings
from hypothesis import strategies as st

from profharness.attention.backends import BACKENDS as REGISTRY
from profharness.commands.bench.tables import latency_charts
from profharness.render.charts import (
    DRAWERS,
    OF_BACKENDS,
    _round_ends,
    _ticks,
    altair_chart,
    draw_png,
    draw_svg,
    wrapped_label,
)
from profharness.render.colors import (
    DARK,
    LIGHT,
    PALETTE,
    STYLES,
    backend_styles,
    luminance,
    series_colors,
)
from profharness.render.document import KINDS, Chart

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
SVG = "{http://www.w3.org/2000/svg}"
WHITE = "#ffffff"  # text on the tiles of a map


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_kind_has_a_drawer_and_a_sample() -> None:
    assert set(KINDS) == set(DRAWERS) == set(SAMPLES)


@pytest.mark.parametrize("kind", list(KINDS))
def test_chart_is_valid_and_has_one_mark_per_row(kind: str) -> None:
    chart = SAMPLES[kind]
    altair_chart(chart).to_dict(validate=True)
    tree = ElementTree.fromstring(draw_svg(chart, 3))
    marks = [each for each in tree.iter(f"{SVG}path") if each.find(f"{SVG}title") is not None]
    assert len(marks) == len(chart.rows)
    for mark in marks:
        assert mark.get("aria-label") == mark.findtext(f"{SVG}title")
    titles = " ".join(mark.findtext(f"{SVG}title") or "" for mark in marks)
    assert NASTY in titles


@pytest.mark.parametrize("kind", list(KINDS))
def test_svg_loads_nothing_and_runs_nothing(kind: str) -> None:
    svg = draw_svg(SAMPLES[kind])
    tree = ElementTree.fromstring(svg)
    assert {each.tag for each in tree.iter()} <= {
        *(
            f"{SVG}{name}"
            for name in ("svg", "g", "path", "text", "tspan", "line", "rect", "title")
        ),
        *(f"{SVG}{name}" for name in ("defs", "clipPath")),
    }
    for each in tree.iter():
        for name, value in each.attrib.items():
            assert not name.startswith("on") and "href" not in name
            assert "url(" not in value or value.startswith("url(#chart")
    assert "currentColor" in svg


@pytest.mark.parametrize("kind", ["lines", "dots", "roofline", "dumbbell"])
def test_marks_at_one_place_show_inside_each_other(kind: str) -> None:
    sample = SAMPLES[kind]
    row = sample.rows[0]
    rows = tuple(row | {sample.series: name} for name in ("auto", "cudnn", "all-disabled"))
    chart = Chart(kind, "t", rows, sample.x, sample.y, sample.series, roofs=sample.roofs)
    tree = ElementTree.fromstring(draw_svg(chart))
    marks = [each for each in tree.iter(f"{SVG}path") if each.find(f"{SVG}title") is not None]
    assert {mark.get("fill") for mark in marks} <= {None, "none", "transparent"}
    assert len({mark.get("d") for mark in marks}) == 3


def test_intervals_are_drawn_and_marks_show_their_config() -> None:
    medians = [(f"b2-h8-s{s}-d64-fp16", "flash", 1000.0 * s) for s in (128, 256)]
    known = {(label, name): (0.9 * ns, 1.2 * ns) for label, name, ns in medians}
    (without,) = latency_charts(medians, "event")
    (chart,) = latency_charts(medians, "event", known)
    rules = [draw_svg(each).count("mark-rule") for each in (without, chart)]
    assert rules[1] > rules[0]
    svg = draw_svg(chart)
    assert "flash at b2-h8-s256-d64-fp16: 256 µs, 256, 230 µs to 307 µs" in svg
    assert "b2-h8-s128-d64-fp16" in svg


def test_equal_times_of_a_config_have_lanes_of_their_own() -> None:
    """Bug: the marks of backends with nearly equal times covered each other."""
    rows = tuple(
        {"µs": 12.0, "config": "b2", "backend": name} for name in ("auto", "flash", "math")
    )
    chart = Chart("dots", "", rows, "µs", "config", "backend", "µs")
    tree = ElementTree.fromstring(draw_svg(chart))
    marks = [each for each in tree.iter(f"{SVG}path") if each.find(f"{SVG}title") is not None]
    heights = sorted(float(re.findall(r"[\d.]+", mark.attrib["transform"])[1]) for mark in marks)
    assert len(heights) == 3
    assert all(after - before > 8 for before, after in pairwise(heights))


def test_lines_of_the_grid_separate_the_configs() -> None:
    """Bug: the mark of the last backend of a config was next to the first mark of the next config."""
    names = ("auto", "flash", "math")
    rows = tuple(
        {"µs": 12.0, "config": config, "backend": name} for config in ("b1", "b2") for name in names
    )
    tree = ElementTree.fromstring(
        draw_svg(Chart("dots", "", rows, "µs", "config", "backend", "µs"))
    )
    marks = [each for each in tree.iter(f"{SVG}path") if each.find(f"{SVG}title") is not None]
    heights = sorted(float(re.findall(r"[\d.]+", mark.attrib["transform"])[1]) for mark in marks)
    rules = [
        float(re.findall(r"[\d.]+", line.attrib["transform"])[1])
        for group in tree.iter(f"{SVG}g")
        if "role-axis-grid" in group.get("class", "")
        for line in group.iter(f"{SVG}line")
        if line.get("y2", "0") == "0"
    ]
    assert any(heights[2] < rule < heights[3] for rule in rules), (heights, rules)
    # Later bug: the label of a config seemed to belong to the last mark of the config above.
    (band,) = [each for each in tree.iter(f"{SVG}path") if each.get("opacity") == "0.06"]
    length = float(re.findall(r"v([\d.]+)", band.attrib["d"])[0])
    assert heights[2] < length < heights[3]


def test_map_is_sorted_by_number() -> None:
    lengths = ("1024", "128", "64", "1×4096", "256")
    rows = tuple({"s": s, "d": d, "took": "math"} for s in lengths for d in ("b2-d128", "b2-d64"))
    spec = altair_chart(Chart("map", "Map", rows, "s", "d", "took")).to_dict()
    axes = spec["layer"][0]["encoding"]
    assert axes["x"]["sort"] == ["1×4096", "64", "128", "256", "1024"]
    assert axes["y"]["sort"] == ["b2-d64", "b2-d128"]


def test_chart_has_its_title_as_accessible_name() -> None:
    chart = SAMPLES["lines"]
    named = Chart(chart.kind, NASTY, chart.rows, chart.x, chart.y, chart.series, caption="rising")
    tree = ElementTree.fromstring(draw_svg(named))
    assert tree.get("role") == "img"
    assert tree.get("aria-label") == f"{NASTY}. rising"


def test_standalone_svg_follows_the_theme() -> None:
    tree = ElementTree.fromstring(draw_svg(SAMPLES["map"], alone=True))
    style = tree.findtext(f"{SVG}style") or ""
    assert "prefers-color-scheme:dark" in style and LIGHT[0] in style and DARK[1] in style


def test_png_size_follows_the_scale() -> None:
    small, large = (draw_png(SAMPLES["map"], scale) for scale in (1.0, 2.0))
    for content in (small, large):
        assert content.startswith(b"\x89PNG\r\n")
    width = [int.from_bytes(content[16:20], "big") for content in (small, large)]
    assert width[1] == pytest.approx(2 * width[0], abs=2)


@pytest.mark.parametrize("color", PALETTE)
def test_colors_contrast_with_both_backgrounds(color: str) -> None:
    for background, _ in (LIGHT, DARK):
        assert contrast(color, background) >= 3
    assert contrast(color, WHITE) >= 3  # text on a tile of a map


def test_text_contrasts_with_its_background() -> None:
    for background, ink in (LIGHT, DARK):
        assert contrast(ink, background) >= 7


def test_backend_keeps_its_color() -> None:
    alone = series_colors(["math"])
    assert series_colors(["flash", "mine", "math"])[2] == alone[0]


@given(st.lists(st.sampled_from(["auto", "math", "mine", "yours", "third"]), unique=True))
def test_few_series_have_different_colors(names: list[str]) -> None:
    assert len(set(series_colors(names))) == len(names)


@given(
    st.lists(st.one_of(st.sampled_from([*STYLES]), st.text(max_size=3)), unique=True, max_size=30)
)
def test_backends_of_a_chart_look_different(names: list[str]) -> None:
    assert len(set(backend_styles(names))) == len(names)


def test_backends_of_a_family_have_one_color() -> None:
    """Bug: flashinfer and cudnn were both orange."""
    colors = {name: color for name, (color, _) in STYLES.items()}
    others = {color for name, color in colors.items() if name != "cudnn"}
    assert colors["cudnn"] not in others
    for family in ("flashinfer", "flex", "fa"):
        assert len({color for name, color in colors.items() if name.startswith(family)}) == 1


def test_backends_of_one_color_have_at_most_one_triangle() -> None:
    """Bug: flashinfer-fa2 and flashinfer-fa3 were brown triangles, one of them rotated."""
    triangles = [color for color, shape in STYLES.values() if shape.startswith("triangle")]
    assert len(set(triangles)) == len(triangles)


def test_backend_looks_the_same_in_every_chart() -> None:
    every = dict(zip([*STYLES, "mine"], backend_styles([*STYLES, "mine"]), strict=True))
    for name, style in every.items():
        assert backend_styles(["math", name])[-1] == style
    implementations = {path.stem for path in KERNELS.glob("[!_]*.py")}
    assert {*REGISTRY, *implementations} <= {*STYLES}


@pytest.mark.parametrize("kind", OF_BACKENDS)
def test_chart_of_backends_uses_their_colors(kind: str) -> None:
    names = dict.fromkeys(str(row[SAMPLES[kind].series]) for row in SAMPLES[kind].rows)
    svg = draw_svg(SAMPLES[kind])
    for color, _ in backend_styles([*names]):
        assert f'stroke="{color}"' in svg


def test_each_mark_has_a_line_above_all_points() -> None:
    sample = SAMPLES["lines"]
    texts = ("math overtakes flash between 128 and 256", "flash does 3.1x less work at 512")
    marks = ((181.0, texts[0]), (512, texts[1]))
    svg = draw_svg(replace(sample, marks=marks))
    tree = ElementTree.fromstring(svg)
    shown = [each for each in tree.iter(f"{SVG}text") if (each.text or "") in texts]
    assert sorted(each.text or "" for each in shown) == sorted(texts)
    assert "NaN" not in svg
    lanes = {float(re.findall(r"[-\d.]+", each.get("transform") or "")[1]) for each in shown}
    assert len(lanes) == 2
    heights = [
        float(re.findall(r"[-\d.]+", mark.get("transform") or "")[1])
        for mark in tree.iter(f"{SVG}path")
        if mark.find(f"{SVG}title") is not None
    ]
    assert min(heights) > max(lanes)


def test_invalid_chart_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 'pie'"):
        Chart("pie", "", (), "x", "y", "s")
    with pytest.raises(ValueError, match="has no s"):
        Chart("lines", "t", ({"x": 1, "y": 2},), "x", "y", "s")


@example("a\x00b\x1b[31m\x0b")
@example("0\U00018cd6\U0001f000\x1b\U0001b2fc\U0001b2fc\U0002ebe1")
@example("\U0001f600" * 60)
@settings(max_examples=15)
@given(st.text(min_size=1, max_size=30))
def test_any_name_stays_text(name: str) -> None:
    rows = tuple({"x": x, "y": f"row {name}", "s": name} for x in (1.0, 2.0))
    svg = draw_svg(Chart("dots", name, rows, "x", "y", "s"))
    assert not re.search(r"<(script|img|a|foreignObject)\b", svg)


def test_importing_the_block_draws_nothing() -> None:
    code = (
        "import sys, profharness.render.renderers\n"
        "assert not {'altair', 'vl_convert', 'jsonschema'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_backends_of_the_samples_differ() -> None:
    assert len(set(series_colors(BACKENDS))) == len(BACKENDS)


@pytest.mark.parametrize(
    ("ends", "ticks"),
    [
        ((50.0, 80.0), []),
        ((12.0, 815.0), [10, 20, 50, 100, 200, 500, 1000, 2000, 5000]),
        ((2e-1, 9e4), [0.1, 1, 10, 100, 1000, 10_000, 100_000]),
    ],
)
def test_ticks_of_logarithmic_axes_are_few_and_round(
    ends: tuple[float, float], ticks: list[float]
) -> None:
    """Bug: the labels of neighbouring ticks collided: `60 µs70 µs`."""
    assert _ticks(*ends) == ticks


def test_a_roofline_shows_tflops() -> None:
    """Bug: the axis had the ticks 200G, 1T and 1P, without a unit."""
    chart = replace(SAMPLES["roofline"], y_title="FLOP/s")
    svg = draw_svg(chart)
    assert ">TFLOP/s</text>" in svg and ">100</text>" in svg
    assert "100 TFLOP/s" in svg  # in the text of a mark


def test_the_ticks_of_a_roofline_are_written_like_numbers_in_tables() -> None:
    """Bug: the ticks said `1000`, and the tables `1,000`."""
    rows = tuple({"x": x, "y": y, "b": "flash"} for x, y in ((2.0, 1e12), (3e3, 1e15)))
    svg = draw_svg(Chart("roofline", "t", rows, "x", "y", "b", y_title="FLOP/s"))
    assert svg.count(">1,000</text>") == 2 and ">1000</text>" not in svg


def test_numbers_of_columns_side_by_side_are_linked_to_their_columns() -> None:
    """Bug: a number floated above its column, and was nearer to the marks of another config."""
    rows = tuple(
        {"x": x, "y": y, "backend": "flash", "config": f"{x}"}
        for x, y in ((4.0, 1e13), (250.0, 1e14), (270.0, 5e13), (290.0, 2e14))
    )
    chart = Chart("roofline", "t", rows, "x", "y", "backend", label="config")
    svg = draw_svg(replace(chart, roofs=SAMPLES["roofline"].roofs))
    bold = r'<text[^>]*translate\(([\d.]+),([\d.]+)\)"[^>]*font-weight="bold"[^>]*>(\d)</text>'
    numbers = {number: (float(x), float(y)) for x, y, number in re.findall(bold, svg)}
    assert numbers["3"][1] < numbers["4"][1] == numbers["2"][1]
    line = r'<line transform="translate\(([\d.]+),([\d.]+)\)"[^>]* y2="([\d.]+)"[^>]* opacity="0.5"'
    lines = [tuple(map(float, each)) for each in re.findall(line, svg)]
    assert len(lines) == 2  # the number of the last column is on top of its marks
    for number, (x, y, _) in zip("23", lines, strict=True):
        assert abs(x - numbers[number][0]) < 4
        assert 0 < y - numbers[number][1] < 8


def test_labels_are_broken_instead_of_cut() -> None:
    """Bug: on a phone, a config was shown as `b1-h32-kv8-sq1-skv4…`."""
    label = "b1-h32-kv8-sq1-skv4096-d128-bf16"
    assert wrapped_label(label, 20) == "b1-h32-kv8-sq1-\nskv4096-d128-bf16"
    assert wrapped_label(label, 46) == label
    rows = tuple({"µs": time, "config": label, "backend": "flash"} for time in (1.0, 2.0))
    chart = Chart("dots", "t", rows, "µs", "config", "backend", "µs")
    svg = draw_svg(chart, narrow=True)
    assert "…" not in svg and "skv4096-d128-bf16</tspan>" in svg
    assert f"flash: {label}" in svg  # the text of a mark is one line


def test_a_roofline_shows_the_backends_of_a_config_at_their_intensity() -> None:
    """Bug: marks at 280 FLOP/byte were drawn at 230 to 340 FLOP/byte."""
    rows = tuple(
        {"x": 100.0, "y": 1e13, "backend": name, "config": config}
        for config in ("a", "b")
        for name in ("auto", "cudnn", "flash")
    )
    chart = Chart("roofline", "t", rows, "x", "y", "backend", label="config")
    chart = replace(chart, roofs=SAMPLES["roofline"].roofs)
    svg = draw_svg(chart)
    mark = r'<path aria-label="([^"]*) at [ab]: [^"]*"[^>]*translate\(([\d.]+)[^>]* d="([^"]*)"'
    marks = re.findall(mark, svg)
    assert len(marks) == 6
    assert len({place for _, place, _ in marks}) == 1
    assert len({shape for *_, shape in marks}) == 3  # one shape per backend


@pytest.mark.parametrize("kind", ["lines", "dots"])
@pytest.mark.parametrize("marks", [(), ((256.0, "crossover"),)])
def test_an_interval_below_0_is_not_drawn(kind: str, marks: tuple[tuple[float, str], ...]) -> None:
    """Bug: `math domain error` for times that differ so much that their interval begins below 0."""
    rows = tuple(
        {"s": s, "µs": float(s), "b": "flash", "low": low, "high": 900.0}
        for s, low in ((128, -5.0), (256, 100.0))
    )
    axes = ("s", "µs") if kind == "lines" else ("µs", "s")
    chart = Chart(kind, "t", rows, *axes, "b", *(("", "µs") if kind == "lines" else ("µs",)))
    svg = draw_svg(replace(chart, low="low", high="high", marks=marks))
    assert "NaN" not in svg and svg.count("<path aria-label") == 2


def test_a_roofline_names_its_configs_and_is_as_tall_as_its_data() -> None:
    """Bug: configs were only in tooltips, and a chart of any range was 400 pixels tall."""
    rows = tuple(
        {"x": x, "y": y, "backend": "flash", "config": config}
        for config, x, y in (("b1-s1", 4.0, 1e13), ("b1-s512", 256.0, 2e14), ("b1-s9", 256.0, 1e14))
    )
    chart = Chart("roofline", "t", rows, "x", "y", "backend", label="config")
    chart = replace(chart, roofs=SAMPLES["roofline"].roofs)
    for narrow in (False, True):
        svg = draw_svg(chart, narrow=narrow)
        for line in ("1: b1-s1", "2: b1-s512", "3: b1-s9", "2, 3"):
            assert f">{line}</text>" in svg
    low, tall = (
        altair_chart(replace(chart, rows=(*rows, {**rows[0], "y": y}))).to_dict(validate=False)
        for y in (1e13, 1e10)
    )
    assert low["height"] < 250 and low["height"] + 150 < tall["height"]


@pytest.mark.parametrize(
    ("low", "high", "ends"),
    [(9.25, 33.9, (5, 50)), (11.7, 815, (10, 1000)), (10, 10, (10, 20)), (0.3, 0.4, (0.2, 0.5))],
)
def test_an_axis_ends_at_the_nearest_round_values(
    low: float, high: float, ends: tuple[float, float]
) -> None:
    """Bug: times of 9 to 34 µs were drawn in the middle third of an axis from 1 to 100 µs."""
    assert _round_ends(low, high) == ends


def test_labels_of_three_lines_keep_apart() -> None:
    """Bug: on a phone, the labels of two configs read like one text of six lines."""
    configs = (
        "b4-h32-kv8-s362-d128-bf16-causal-page=16",
        "b4-h32-kv8-sq1-skv364-d128-bf16-page=16",
    )
    rows = tuple({"config": name, "µs": 9.0, "backend": "flash"} for name in configs)
    chart = Chart("dots", "", rows, "µs", "config", "backend", "µs")
    height = altair_chart(chart, narrow=True).to_dict(validate=False)["height"]
    assert height / len(configs) >= 3 * 15 + 12  # a line is 15 pixels high
