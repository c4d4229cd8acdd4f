"""Write a timeline as a canvas with JSON data. `assets/timeline.js` draws on the canvas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from profharness.errors import one_line
from profharness.render.bars import legend
from profharness.render.colors import ink_on, series_colors
from profharness.render.document import Span, Timeline
from profharness.render.html_text import plain, prose

MOST_SPANS = 40_000  # maximum number of spans in a page; this number needs about 1 MB
NO_NAMES: Mapping[str, Sequence[str]] = {}
KEYS = (
    "Drag to move. Zoom with + and −, by pinching, or with Ctrl and the mouse wheel. After you "
    "click the timeline, you can also use the arrow keys, +, − and 0, and press N to go to the next "
    "attention kernel."
)


def draw_timeline(
    timeline: Timeline, number: int, full_names: Mapping[str, Sequence[str]] = NO_NAMES
) -> str:
    """Return a figure with buttons, a canvas, the data of the canvas and a legend.

    `number` must be unique on a page. `full_names` maps shortened names to full names.
    """
    spans, left_out = _longest(span for lane in timeline.lanes for span in lane.spans)
    series = list(dict.fromkeys(span.series for lane in timeline.lanes for span in lane.spans))
    colors = dict(zip(series, series_colors(series), strict=True))
    texts: dict[str, int] = {}
    lanes = []
    for lane in timeline.lanes:
        flat: list[int] = []
        last = 0
        for span in lane.spans:
            if span not in spans:
                continue
            # Store starts as differences, because these need fewer digits.
            flat += (span.start_ns - last, span.duration_ns)
            flat += (texts.setdefault(text, len(texts)) for text in (span.name, span.detail))
            flat.append(series.index(span.series))
            last = span.start_ns
        lanes.append({"name": one_line(lane.name), "spans": flat, "visited": lane.visited})
    data = {
        "length": timeline.duration_ns,
        "lanes": lanes,
        "texts": [one_line(text) for text in texts],
        "full": [one_line(full_names[text][0]) if _is_cut(text, full_names) else "" for text in texts],
        "series": [
            {"name": one_line(name), "color": color, "ink": ink_on(color), "marked": name in timeline.marked}
            for name, color in colors.items()
        ],
    }  # fmt: skip
    # `</script>` must not occur in the data.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    caption = " ".join(
        filter(
            None,
            [
                timeline.caption,
                f"The {left_out:,} shortest marks are not shown." if left_out else "",
            ],
        )
    )
    buttons = "".join(
        f'<button type="button" data-do="{action}" aria-label="{label}" title="{label}">{sign}</button>'
        for action, sign, label in (
            ("in", "+", "Zoom in"),
            ("out", "−", "Zoom out"),
            ("reset", "Whole step", "Show the whole step"),
            *([("next", "Next attention", "Zoom to the next attention kernel")] if timeline.marked else []),
        )
    )  # fmt: skip
    return (
        f'<figure class="timeline" id="timeline{number}"><div class="tools">{buttons}'
        f'<output aria-live="polite"></output></div><div class="stage">'
        f'<canvas tabindex="0" role="img" aria-label="{plain(timeline.title)}. '
        f'The table below lists the same kernels."></canvas><div class="tip" hidden></div></div>'
        f'<script type="application/json">{text}</script>{legend(colors)}'
        f'<figcaption>{prose(caption)} <span class="keys">{KEYS}</span></figcaption></figure>'
    )


def _is_cut(text: str, full_names: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a name is shortened and has only one full name."""
    return "…" in text and len(full_names.get(text, ())) == 1


def _longest(spans: Iterable[Span]) -> tuple[set[Span], int]:
    """Return the MOST_SPANS longest spans, and the number of other spans."""
    every = sorted(spans, key=lambda span: -span.duration_ns)
    return set(every[:MOST_SPANS]), max(len(every) - MOST_SPANS, 0)
