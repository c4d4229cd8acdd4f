"""The result of comparing the ranks of a job, with one row per rank and findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from profharness.columns import column
from profharness.stats import THRESHOLD

SLOW_GPU, SLOW_KERNELS = "slow-gpu", "slow-kernels"
OTHER_ATTENTION, OTHER_KERNELS = "other-attention", "other-kernels"
OTHER_SOFTWARE, OTHER_GPU = "other-software", "other-gpu"
WAITS, LATE, MISSING = "waits", "late", "missing-ranks"
CODES = {
    SLOW_GPU: "the rank's kernels take longer than the same kernels on the other ranks",
    SLOW_KERNELS: "some of the rank's kernels take longer than on the other ranks, but most do not",
    OTHER_ATTENTION: "the rank runs different families of attention kernels than most ranks do",
    OTHER_KERNELS: (
        "the rank launches different kernels than most ranks do, or a different number of kernels"
    ),
    OTHER_SOFTWARE: "a value in the rank's environment differs from the value on most ranks",
    OTHER_GPU: "the rank runs on a different GPU model than most ranks do",
    WAITS: "the rank's GPU is idle for longer than the GPUs of the other ranks",
    LATE: "the rank spends the least time in collectives, because the other ranks wait for it",
    MISSING: "some ranks of the job are not stored",
}
"""Maps the code of each kind of finding to its description."""
SIGMAS = 3.5  # minimum distance of an outlier from the other ranks, in standard deviations
WAIT_SHARE = 0.05  # minimum difference that is reported, as a share of the span
Share = float | None


def usual_ranks(labels: Sequence[str]) -> str:
    """Return the name of the ranks with which a rank is compared.

    In a job of two ranks, this is the first rank.
    """
    return labels[0] if len(labels) == 2 else "most ranks"


@dataclass(frozen=True, slots=True)
class RankFinding:
    """A property that some ranks have and most ranks do not have."""

    code: str
    ranks: tuple[str, ...]  # labels of the ranks
    sentence: str


@dataclass(frozen=True, slots=True)
class RankFigures:
    """The figures of one rank. None means that a figure is unknown."""

    rank: int | None
    label: Annotated[str, column("rank", meaning="`rank 3`, or the trace's file name")]
    run: Annotated[str, column(meaning="id of the run")]
    name: Annotated[str, column("run", importance="detail", meaning="name of the run")]
    device: Annotated[
        str | None, column("device", importance="detail", shrink=True, meaning="model of the GPU")
    ]
    host_key: str | None
    gpu_key: str | None
    launches: int
    ratio: Annotated[
        float | None,
        column(
            "vs others",
            "ratio",
            importance="answer",
            meaning="kernel time, divided by the median time of the same kernels on the other ranks",
        ),
    ]
    """Collectives are excluded. Kernels are weighted by time."""
    compute_ns: Annotated[
        int,
        column(
            "compute µs",
            "time",
            importance="answer",
            scale="rank",
            meaning="kernel time, excluding collectives",
        ),
    ]
    span_ns: Annotated[
        int | None,
        column(
            "span µs",
            "time",
            scale="rank",
            meaning="time from the start of the first launch to the end of the last launch",
        ),
    ]
    """The sum over the devices of the rank."""
    idle_ns: int | None  # time in the span without a kernel
    collective_ns: int | None  # time in which collectives run
    exposed_ns: int | None  # time in which only collectives run and no other kernels
    attention: Annotated[
        tuple[str, ...],
        column(
            "attention",
            "names",
            importance="detail",
            shrink=True,
            meaning="families of the rank's attention kernels",
        ),
    ]
    findings: Annotated[
        tuple[str, ...],
        column("findings", "names", importance="answer", meaning="codes of the findings"),
    ] = ()

    @property
    def idle_share(
        self,
    ) -> Annotated[
        Share,
        column("% idle of span", "percent", meaning="share of the span in which no kernel runs"),
    ]:
        """Share of the span in which no kernel runs."""
        return self._share(self.idle_ns)

    @property
    def collective_share(
        self,
    ) -> Annotated[
        Share,
        column("% collectives", "percent", meaning="share of the span in which collectives run"),
    ]:
        """Share of the span in which collectives run."""
        return self._share(self.collective_ns)

    @property
    def exposed_share(
        self,
    ) -> Annotated[
        Share,
        column("% exposed", "percent", meaning="share of the span in which only collectives run"),
    ]:
        """Share of the span in which only collectives run."""
        return self._share(self.exposed_ns)

    def _share(self, part: int | None) -> float | None:
        return part / self.span_ns if part is not None and self.span_ns else None


@dataclass(frozen=True, slots=True)
class RankComparison:
    """The comparison of the ranks of one job."""

    rows: tuple[RankFigures, ...]
    findings: tuple[RankFinding, ...]
    world_size: int | None  # number of ranks of the job, according to its traces
    hosts: int | None
    spread: float | None  # standard deviation of the ratios, hardly affected by outliers
    threshold: float = THRESHOLD
    caveats: tuple[str, ...] = ()  # sentences about properties that could not be compared
