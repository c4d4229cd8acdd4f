"""A chart as a block of a Document: what to draw, free of any drawing library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# kind -> what it is; `chart_draw.DRAWERS` has one function for each.
KINDS: dict[str, str] = {
    "lines": "y over x on two logarithmic axes, a line and a mark a series",
    "dots": "one row a label (y), a mark a series at x on a logarithmic axis",
    "stack": "one bar a label (y), cut into the series by x",
    "map": "a grid of x and y, coloured and lettered by the series",
    "roofline": "FLOP/s (y) over FLOP per byte (x), logarithmic, below the roofs",
    "dumbbell": "one row a label (y) with two marks (series) at x, joined; logarithmic",
}


@dataclass(frozen=True, slots=True)
class Roof:
    """The ceiling of a roofline: bytes a second times intensity, up to FLOP a second."""

    label: str
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Chart:
    """kind is a key of KINDS; x, y and series name keys that every one of rows has.

    Values are in the unit that x_title and y_title say. caption says what is to be seen, for those
    who cannot see it too. roofs belong to the kind `roofline`. A text format leaves a chart out:
    its figures stand in a table of the same Document.
    """

    kind: str
    title: str
    rows: tuple[Mapping[str, Any], ...]
    x: str
    y: str
    series: str
    x_title: str = ""
    y_title: str = ""
    caption: str = ""
    roofs: tuple[Roof, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"chart kind {self.kind!r} is none of {', '.join(KINDS)}")
        for row in self.rows:
            missing = {self.x, self.y, self.series} - set(row)
            if missing:
                raise ValueError(f"a row of chart {self.title!r} has no {', '.join(missing)}")

    def plain_rows(self) -> list[dict[str, Any]]:
        """The rows under the keys x, y and series: field names that no drawing library reads as a
        path or an expression."""
        return [
            {"x": row[self.x], "y": row[self.y], "series": str(row[self.series])}
            for row in self.rows
        ]
