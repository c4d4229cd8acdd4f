"""scripts/make_pictures.py: it draws what a command prints to a terminal, in fonts of the reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from make_pictures import CELL, draw_terminal

ROOT = Path(__file__).resolve().parents[1]
SVG = "{http://www.w3.org/2000/svg}"


def test_a_command_becomes_a_picture_that_fetches_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.svg"
    argv = [sys.executable, str(ROOT / "scripts" / "make_pictures.py"), "terminal", str(out)]
    subprocess.run([*argv, "--width", "80", "--", "--help"], check=True, cwd=ROOT)
    text = out.read_text(encoding="utf-8")
    tree = ElementTree.fromstring(text)
    assert not any(word in text for word in ("url(", "href", "@font-face", "@import"))
    assert len(text) < 20_000
    drawn = "".join(tree.itertext())
    assert "profharness --help" in drawn
    assert "layers" in drawn
    ends = [
        float(part.get("x", "")) + float(part.get("textLength", ""))
        for part in tree.iter(f"{SVG}tspan")
    ]
    assert 0 < max(ends) <= 80 * CELL + 0.1


def test_columns_stay_where_the_terminal_had_them() -> None:
    svg = draw_terminal("\x1b[1mname\x1b[0m   µs\n日本 <a>  1\n", "show", 40)
    rows = list(ElementTree.fromstring(svg).iter(f"{SVG}text"))
    places = [[(part.text, round(float(part.get("x", "")) / CELL)) for part in row] for row in rows]
    assert places == [
        [("$", 0), ("show", 2)],
        [("name", 0), ("µs", 7)],
        [("日本 <a>", 0), ("1", 10)],
    ]


def test_a_line_wraps_at_the_edge_of_the_terminal() -> None:
    svg = draw_terminal("x" * 50, "show", 40)
    lines = ["".join(row.itertext()) for row in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert lines == ["$show", "x" * 40, "x" * 10]
