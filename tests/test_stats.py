"""Statistics: summaries against hand-computed values, and verdicts that say cannot tell when they
cannot."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profharness.stats import beyond, compare, is_bimodal, median_ci, summarize

TIMES = st.lists(st.integers(1_000, 10_000_000), min_size=1, max_size=40)


def normal(median: float, n: int = 30, spread: float = 0.01, seed: int = 1) -> list[float]:
    return list(np.random.default_rng(seed).normal(median, spread * median, n))


def test_summary_of_known_samples() -> None:
    summary = summarize([5, 1, 4, 2, 3])
    assert (summary.n, summary.median, summary.mean, summary.min, summary.max) == (5, 3, 3, 1, 5)
    assert summary.iqr == 2
    assert summary.std == pytest.approx(2.5**0.5)
    assert (summary.p10, summary.p90) == pytest.approx((1.4, 4.6))
    assert summarize([7]).std == 0
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


@given(TIMES)
def test_summary_is_ordered(samples: list[int]) -> None:
    s = summarize(samples)
    assert s.min <= s.p10 <= s.median <= s.p90 <= s.max
    assert s.iqr >= 0
    assert s.std >= 0


def test_median_interval_is_deterministic_and_holds_the_median() -> None:
    samples = normal(1000)
    interval = median_ci(samples)
    assert interval == median_ci(samples)
    assert interval is not None
    low, high = interval
    assert low < summarize(samples).median < high
    assert high - low < 30
    wider = median_ci(samples, confidence=0.999)
    assert wider is not None
    assert wider[0] <= low
    assert wider[1] >= high
    assert median_ci([1, 2]) is None
    assert median_ci([4, 4, 4]) == (4, 4)


def test_clear_differences() -> None:
    slower = compare(normal(1000), normal(1100, seed=2))
    assert slower.verdict == "slower"
    assert slower.ratio == pytest.approx(1.1, abs=0.02)
    assert slower.p_value is not None
    assert slower.p_value < 1e-6
    assert compare(normal(1000), normal(900, seed=2)).verdict == "faster"


def test_a_significant_but_small_difference_is_same() -> None:
    result = compare(normal(1000, 200, 0.002), normal(1010, 200, 0.002, seed=2))
    assert result.p_value is not None
    assert result.p_value < 1e-6
    assert result.verdict == "same"
    assert "within the 3 % threshold" in result.reason
    assert (
        compare(normal(1000, 200, 0.002), normal(1010, 200, 0.002, seed=2), threshold=0.005).verdict
        == "slower"
    )


def test_cannot_tell() -> None:
    few = compare([100, 100, 100, 100], [200] * 30)
    assert (few.verdict, few.p_value, few.ratio) == ("unknown", None, 2)
    assert "too few samples (4 and 30" in few.reason
    assert compare([], [1.0]).ratio is None
    overlapping = compare([100, 300, 110, 290, 105, 280], [400, 100, 105, 290, 310, 300])
    assert overlapping.verdict == "unknown"
    assert "not significantly" in overlapping.reason
    assert "noisy" in overlapping.reason


def test_two_modes_are_told() -> None:
    modes = normal(1000, 15) + normal(1500, 15)
    assert is_bimodal(modes)
    assert "baseline's samples are bimodal" in compare(modes, normal(1200)).reason
    assert not is_bimodal(normal(1000))
    assert not is_bimodal(list(np.linspace(900, 1100, 50)))
    assert not is_bimodal([1000.0] * 29 + [5000.0])
    assert not is_bimodal([5.0] * 30)


@given(TIMES)
def test_samples_are_the_same_as_themselves(samples: list[int]) -> None:
    expected = "same" if len(samples) >= 5 else "unknown"
    assert compare(samples, samples).verdict == expected


@settings(max_examples=50)
@given(TIMES, TIMES)
def test_swapping_turns_the_verdict_around(a: list[int], b: list[int]) -> None:
    there, back = compare(a, b), compare(b, a)
    opposite = {"faster": "slower", "slower": "faster"}
    assert back.verdict == opposite.get(there.verdict, there.verdict)
    assert there.ratio is not None
    assert back.ratio is not None
    assert there.ratio * back.ratio == pytest.approx(1)


def test_threshold_is_symmetric() -> None:
    assert beyond(1.031, 0.03)
    assert beyond(1 / 1.031, 0.03)
    assert not beyond(1.029, 0.03)
    assert not beyond(1 / 1.029, 0.03)


def test_importing_is_light() -> None:
    code = (
        "import sys, profharness.stats, profharness.answers.diff.answer, profharness.answers.roles;"
    )
    code += "print(sorted({'numpy','scipy','pandas','torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
