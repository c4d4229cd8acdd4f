"""The colours and shapes of backends and of other series in all charts."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

LIGHT, DARK = (
    ("#ffffff", "#1b1b1b"),
    ("#14171c", "#e4e6ea"),
)  # (background, text colour) of each theme
# Each colour has a contrast of at least 3 to 1 on the light and on the dark background (tested).
# The hues are those of Okabe and Ito, which people with colour blindness can distinguish.
PALETTE = ("#0080c8", "#d55e00", "#008f68", "#b0609a", "#a37700", "#5d7fd0", "#c04848", "#777777")
BLUE, ORANGE, GREEN, PURPLE, BROWN, INDIGO, RED, GREY = PALETTE
SHAPES = (
    *("circle", "square", "diamond", "triangle-up", "triangle-down", "cross"),
    *("triangle-right", "triangle-left"),
)
STYLES = {
    "auto": (GREY, "circle"),
    "flash": (BLUE, "square"),
    "efficient": (GREEN, "diamond"),
    "cudnn": (ORANGE, "triangle-up"),
    "math": (PURPLE, "triangle-down"),
    "all-disabled": (GREY, "cross"),
    "none": (RED, "circle"),
    "naive": (PURPLE, "circle"),
    "naive-compiled": (PURPLE, "square"),
    "single_query": (INDIGO, "triangle-up"),
    "tiled": (RED, "diamond"),
    "flash_triton": (INDIGO, "cross"),
    "eager": (RED, "square"),
    "flex": (INDIGO, "circle"),
    "flex-flash": (INDIGO, "square"),
    "varlen": (BLUE, "cross"),
    "fa3": (BLUE, "circle"),
    "fa4": (BLUE, "diamond"),
    "flash-attn": (BLUE, "triangle-up"),
    "xformers": (GREEN, "circle"),
    "sage": (RED, "triangle-up"),
    "flashinfer": (BROWN, "diamond"),
    "flashinfer-fa2": (BROWN, "circle"),
    "flashinfer-fa3": (BROWN, "square"),
    "flashinfer-cudnn": (BROWN, "triangle-down"),
    "flashinfer-trtllm": (BROWN, "cross"),
    "flex-paged": (INDIGO, "diamond"),
}
"""The colour and the shape of each backend in all charts. Each combination occurs only once.

The backends of a family, such as flashinfer, have the same colour. Of the backends with the same
colour, at most one is a triangle, because two triangles are hard to tell apart.
"""
LOSS_COLORS = {
    "under 1.01x": GREEN,
    "1.01x to 1.10x": BLUE,
    "1.10x to 1.50x": BROWN,
    "1.50x to 2.00x": ORANGE,
    "over 2.00x": RED,
    "unknown": GREY,
}
"""The colour of each class of losses in the maps of `predict`."""
OTHER_STYLES = tuple(
    style for style in itertools.product(PALETTE, SHAPES) if style not in STYLES.values()
)
IDLE = "idle"
TIMES = {
    "matrix products": "#4f6d8a",
    "optimizer": "#9a6b5e",
    "other kernels": "#8b8f97",
    "communication": "#a37700",
    "memory copies": "#6b7d3a",
    IDLE: "#c4c8ce",
    "range": "#9fb3c8",
}
"""The colours of work other than attention. These colours are duller than the backends' colours."""
ATTENTION = "attention: "  # prefix of a backend in the name of a series in charts of a step


def fixed_color(name: str) -> str | None:
    """Return the colour of a series that has the same colour in every chart, otherwise None."""
    style = STYLES.get(name.removeprefix(ATTENTION))
    return style[0] if style else TIMES.get(name)


def series_colors(names: Sequence[str]) -> list[str]:
    """Return a colour for each name. Use the same colour for a backend in every chart."""
    # Do not use the colour of a backend in this chart for another series.
    fixed = {name: color for name in names if (color := LOSS_COLORS.get(name) or fixed_color(name))}
    free = [color for color in PALETTE if color not in fixed.values()] or PALETTE
    rest = [name for name in names if name not in fixed]
    given = {name: free[n % len(free)] for n, name in enumerate(rest)}
    return [(fixed | given)[name] for name in names]


def backend_styles(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return a colour and a shape for each backend, distinct within a chart.

    A backend in STYLES has the same style in every chart. The style of any other backend is derived
    from its name.
    """
    styles: dict[str, tuple[str, str]] = {}
    for name in names:
        place = zlib.crc32(name.encode()) % len(OTHER_STYLES)
        choices = (*OTHER_STYLES[place:], *OTHER_STYLES[:place])
        free = (style for style in choices if style not in styles.values())
        styles[name] = STYLES.get(name) or next(free, choices[0])
    return list(styles.values())


def luminance(color: str) -> float:
    """Return the relative luminance of a colour such as `#0080c8`, as WCAG 2 defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(color: str) -> str:
    """Return black or white, whichever has the higher contrast on a colour."""
    return "#000000" if luminance(color) > 0.179 else "#ffffff"
