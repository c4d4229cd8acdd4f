"""Statistics: summaries against values computed by hand, and verdicts that are `cannot tell` if the
samples do not decide.
"""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profharness.stats import (
    Series,
    beyond,
    compare,
    interval,
    is_bimodal,
    median_ci,
    process_medians,
    summarize,
)

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


def test_median_interval_is_deterministic_and_contains_the_median() -> None:
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
    assert result.reason.startswith("the medians differ by no more than the 3 % threshold")
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
    assert "the medians differ, but not significantly (p = " in overlapping.reason
    assert "noisy" in overlapping.reason


def test_two_modes_are_reported() -> None:
    modes = normal(1000, 15) + normal(1500, 15)
    assert is_bimodal(modes)
    assert "samples of the baseline are bimodal" in compare(modes, normal(1200)).reason
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
    code = "import sys, profharness.stats, profharness.commands.diff.compare, profharness.program.roles;"
    code += "print(sorted({'numpy','scipy','pandas','torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def run_of(
    rng: np.random.Generator, process: float, turn: float, median: float = 1e6, count: int = 3
) -> Series:
    """Return samples of processes with four turns of eight samples each. The standard deviations of
    processes and turns are fractions of the median, that of a sample is 1 % of it.
    """
    samples: list[int] = []
    for shift in rng.normal(0, process, count):
        for more in rng.normal(0, turn, 4):
            samples += map(int, median * (1 + shift + more + rng.normal(0, 0.01, 8)))
    return Series.of(samples, [(each // 4, each % 4, 8) for each in range(4 * count)])


@pytest.mark.parametrize(("process", "turn"), [(0.005, 0.003), (0.0, 0.01)])
def test_an_interval_contains_the_median_of_a_known_spread(process: float, turn: float) -> None:
    """In 95 % of such runs. An interval over samples alone is far from that if turns or processes differ."""
    rng = np.random.default_rng(3)
    found = [interval(run_of(rng, process, turn)) for _ in range(200)]
    assert sum(each is not None and each.low <= 1e6 <= each.high for each in found) >= 0.93 * 200


def test_intervals_of_samples_alone_are_too_narrow() -> None:
    rng = np.random.default_rng(3)
    found = [median_ci(tuple(run_of(rng, 0.01, 0.003))) for _ in range(30)]
    assert sum(each is not None and each[0] <= 1e6 <= each[1] for each in found) < 18


def test_an_interval_has_its_parts() -> None:
    whole = run_of(np.random.default_rng(1), 0.02, 0.001)
    found = interval(whole)
    assert found is not None and found == interval(whole)
    assert found.processes == 3
    assert found.between_processes is not None and found.between_turns is not None
    assert found.between_processes > found.between_turns
    medians = process_medians(whole)
    assert medians == [summarize(whole[place : place + 32]).median for place in (0, 32, 64)]
    spread = np.std(medians, ddof=1) / 3**0.5
    assert found.between_processes == pytest.approx(4.3027 * spread, rel=1e-4)
    assert found.high - found.low >= 2 * found.between_processes


def test_samples_without_turns_are_unchanged() -> None:
    plain = [int(value) for value in normal(1e6)]
    for samples in (plain, Series.of(plain), Series.of(plain, [(0, 0, 30)])):
        found = interval(samples)
        assert found is not None and (found.low, found.high) == median_ci(plain)
        assert found.between_turns is None and found.between_processes is None
    assert Series.of(plain, [(0, 0, 29)]).turns == ()  # they do not add up
    assert interval([1, 2]) is None


def test_turns_without_processes_and_processes_without_turns() -> None:
    whole = run_of(np.random.default_rng(1), 0.0, 0.01, count=1)
    one = interval(whole)
    assert one is not None and one.between_processes is None and one.between_turns is not None
    assert 2 * one.between_turns == pytest.approx(one.high - one.low)
    profiled = Series.of(range(100, 130), [(0, 0, 10), (1, 0, 10), (2, 0, 10)])
    three = interval(profiled)
    assert three is not None and three.between_turns is None
    assert three.between_processes is not None and three.processes == 3


def test_equally_different_processes_are_no_slow_down() -> None:
    """A gate on equal runs. The rank test over the samples alone would find a difference."""
    rng = np.random.default_rng(5)
    pairs = [(run_of(rng, 0.03, 0.0), run_of(rng, 0.03, 0.0)) for _ in range(150)]
    alone = sum(compare(tuple(a), tuple(b)).verdict in ("slower", "faster") for a, b in pairs)
    both = [compare(a, b) for a, b in pairs]
    # 7.5 are expected, more than 13 in one of 50 cases
    assert sum(each.verdict in ("slower", "faster") for each in both) <= 13 < alone / 2
    assert any("over 3 and 3 processes" in each.reason for each in both)


def test_processes_with_equal_medians_are_compared_without_a_warning() -> None:
    alike = Series.of([1_000_003] * 30, [(each, 0, 10) for each in range(3)])
    other = [1_100_000 + 1_000 * (each // 10) + each % 2 for each in range(30)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compared = compare(alike, Series.of(other, [(each, 0, 10) for each in range(3)]))
    assert compared.verdict == "slower"


def test_a_real_slow_down_of_five_percent_is_found() -> None:
    rng = np.random.default_rng(6)
    found = [
        compare(run_of(rng, 0.003, 0.003), run_of(rng, 0.003, 0.003, 1.05e6)).verdict
        for _ in range(60)
    ]
    assert found.count("slower") >= 0.95 * 60
