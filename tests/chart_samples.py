"""One chart of every kind, with names that are markup unless they are escaped."""

from __future__ import annotations

from profharness.render.document import Chart, Roof

NASTY = "<script>alert(1)</script>&'\""
BACKENDS = ("flash", "math", NASTY)
_SWEEP = tuple(
    {"s": s, "µs": s**1.5 / speed, "backend": name, "config": f"b2-h8-s{s}-d64-fp16"}
    for speed, name in enumerate(BACKENDS, start=1)
    for s in (128, 256, 512)
)

SAMPLES = {
    "lines": Chart("lines", "Latency", _SWEEP, "s", "µs", "backend", "sequence length", "µs"),
    "dots": Chart("dots", "By config", _SWEEP, "µs", "config", "backend", "µs"),
    "stack": Chart("stack", "Steps", _SWEEP, "µs", "config", "backend", "µs"),
    "map": Chart(
        "map",
        "Map",
        tuple(
            {"s": f"{s}", "d": f"d{d}", "took": "math" if d > 64 else NASTY}
            for s in (128, 1024)
            for d in (64, 256)
        ),
        *("s", "d", "took"),
    ),
    "roofline": Chart(
        "roofline",
        "Roofline",
        tuple({"i": row["s"], "f": 1e14 / (n + 1), "b": row["backend"]} for n, row in enumerate(_SWEEP)),
        *("i", "f", "b"),
        roofs=(Roof("fp16, data sheet", 4.8e12, 9.9e14),),
    ),
    "dumbbell": Chart(
        "dumbbell",
        "Both sides",
        tuple(
            {"call": f"call {n}", "µs": n * factor, "side": side}
            for n in (1, 2)
            for side, factor in (("baseline", 1.0), (NASTY, 1.5))
        ),
        *("µs", "call", "side"),
    ),
}  # fmt: skip
