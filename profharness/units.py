"""Format times, shares and ratios. Tables, sentences and charts show a value with the same digits."""

from __future__ import annotations

import math
from collections.abc import Iterable

UNITS = {"µs": 1e3, "ms": 1e6, "s": 1e9}
"""Maps each unit of time to its length in ns. A time has the largest unit in which it is 1 or more."""
KIB, MIB = 1 << 10, 1 << 20


def time_unit(ns: float) -> str:
    """Return the unit in which a time is shown: µs below 1,000 µs, ms below 1,000 ms, or else s."""
    # Round first, so that 999.9 µs becomes 1.00 ms.
    size = abs(float(f"{ns:.3g}"))
    return "s" if size >= UNITS["s"] else "ms" if size >= UNITS["ms"] else "µs"


def common_unit(times: Iterable[float]) -> str:
    """Return the unit for all times of a column, in ns: the smallest unit that suits half of them.

    Most times then read as in sentences. Times of 0 suit any unit and do not count.
    """
    sizes = sorted(abs(time) for time in times if time) or [0.0]
    return time_unit(sizes[(len(sizes) - 1) // 2])


def time_figure(ns: float, unit: str = "") -> str:
    """Format a time with three significant figures, but not finer than 1 ns: `7.44`.

    The unit is a key of UNITS, by default the time's own unit.
    """
    if not ns or not math.isfinite(ns):
        return f"{ns:g}"
    size = UNITS[unit or time_unit(ns)]
    value = float(f"{ns:.3g}") / size
    most = round(math.log10(size))  # decimals of a nanosecond
    if abs(ns) < 0.5:
        return f"<{10.0**-most:.{most}f}"
    digits = min(max(2 - math.floor(math.log10(abs(value))), 0), most)
    return f"{value:,.{digits}f}"


def time_text(ns: float) -> str:
    """Format a time with its unit: `7.44 µs`, `724 µs` or `9.63 ms`."""
    return f"{time_figure(ns)} {time_unit(ns)}"


def share_figure(share: float) -> str:
    """Format a share in % for a table or a chart, with one decimal: `6.0`."""
    return "<0.1" if 0 < share < 0.0005 else f"{100 * share:.1f}"


def share_text(share: float) -> str:
    """Format a share for a sentence: `6 %`, `0.4 %`. Show a decimal only near 0 and 1."""
    percent = 100 * share
    if 0 < percent < 0.05:
        return "<0.1 %"
    if 99.95 <= percent < 100:
        return ">99.9 %"
    digits = 1 if percent < 1.95 or 99 < percent < 100 else 0
    return f"{percent:.{digits}f}".removesuffix(".0") + " %"


def ratio_figure(ratio: float) -> str:
    """Format a ratio with three significant figures: `1.40`, `0.971`, `0.0442`."""
    rounded = float(f"{ratio:.3g}")
    if rounded < 0.1:
        return f"{ratio:.3g}"
    digits = 3 if rounded < 1 else 2 if rounded < 10 else 1 if rounded < 100 else 0
    return f"{ratio:,.{digits}f}"


def ratio_text(ratio: float) -> str:
    """Format a ratio for a table or a clause: `1.40x`. A smaller ratio than 0.01 is `<0.01x`."""
    return "<0.01x" if 0 < float(f"{ratio:.3g}") < 0.01 else f"{ratio_figure(ratio)}x"


def speed_up_of(ratio: float | None) -> float | None:
    """Return the speed-up of a candidate whose time divided by the baseline's time is `ratio`."""
    return 1 / ratio if ratio else None


def rate_figure(rate: float) -> str:
    """Format a rate with three significant figures, but at most three decimals from 0.0005 on: `3,350`."""
    if not rate or not math.isfinite(rate):
        return f"{rate:g}"
    rounded = float(f"{rate:.3g}")
    digits = max(2 - math.floor(math.log10(rounded)), 0)
    return f"{rounded:,.{digits if rounded < 0.0005 else min(digits, 3)}f}"


def memory_figure(size: float) -> str:
    """Format a size in bytes in MiB with three significant figures: `76.0`."""
    return rate_figure(size / MIB)


def memory_text(size: float) -> str:
    """Format a size in bytes for a sentence: `76.0 MiB`, `64.0 KiB`, `512 B`."""
    if size < KIB:
        return f"{size:.0f} B"
    return f"{memory_figure(size)} MiB" if size >= MIB else f"{rate_figure(size / KIB)} KiB"


def as_fast(speed_up: float, than: str = "", most: float | None = None) -> str:
    """Describe a speed-up of 1 or more: `1.40 times as fast as flash`.

    A speed-up is an old time divided by a new time, and `than` names the side with the old time. If
    `most` is given, describe the speed-ups from `speed_up` to `most`.
    """
    return _times_as("fast", speed_up, than, most)


def as_long(ratio: float, than: str = "", most: float | None = None) -> str:
    """Describe a time divided by the time of `than`: `1.40 times as long as flash`."""
    return _times_as("long", ratio, than, most)


def by_how_much(speed_up: float, than: str = "", most: float | None = None) -> str:
    """Describe a speed-up with `as_fast`, or a slowdown with `as_long`."""
    high = speed_up if most is None else most
    if _is_fast(high):
        return as_fast(speed_up, than, most)
    return as_long(1 / high, than, 1 / speed_up)


def compared(speed_up: float, than: str = "") -> str:
    """Return the predicate `is 1.40 times as fast as flash` or `takes 1.15 times as long as flash`."""
    return f"{'is' if _is_fast(speed_up) else 'takes'} {by_how_much(speed_up, than)}"


def _is_fast(speed_up: float) -> bool:
    return speed_up >= 0.9995  # also 1.00 if rounded


def _times_as(how: str, low: float, than: str, most: float | None) -> str:
    texts = dict.fromkeys(map(ratio_figure, (low, low if most is None else most)))
    return f"{' to '.join(texts)} times as {how}" + (f" as {than}" if than else "")
