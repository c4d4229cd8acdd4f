"""The comparison of a job's ranks: one row a rank, and findings."""

from __future__ import annotations

from dataclasses import dataclass

from profharness.stats import THRESHOLD

SLOW_GPU, SLOW_KERNELS = "slow-gpu", "slow-kernels"
OTHER_ATTENTION, OTHER_KERNELS = "other-attention", "other-kernels"
OTHER_SOFTWARE, OTHER_GPU = "other-software", "other-gpu"
WAITS, LATE, MISSING = "waits", "late", "missing-ranks"
CODES = {
    SLOW_GPU: "its kernels take longer than the same kernels of the others",
    SLOW_KERNELS: "some of its kernels do, and most do not",
    OTHER_ATTENTION: "other families of attention kernels than most ranks, in a range",
    OTHER_KERNELS: "kernels that most ranks do not have, or not as often; or it lacks some",
    OTHER_SOFTWARE: "another value of an environment's key than most ranks",
    OTHER_GPU: "another model of GPU than most ranks",
    WAITS: "its GPU is idle for longer than those of the others",
    LATE: "it spends the least time in collectives: the others wait for it there",
    MISSING: "ranks of the job that are not stored",
}
"""What a finding says of a rank."""
SIGMAS = 3.5  # outside of the spread of the other ranks
WAIT_SHARE = 0.05  # of the span


@dataclass(frozen=True, slots=True)
class Finding:
    """What some ranks have in common and most have not. ranks are their labels."""

    code: str
    ranks: tuple[str, ...]
    sentence: str


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank. ratio is the time of its compute kernels over that of the same kernels on the median
    of the other ranks, each weighted by its time; compute_ns is theirs, collectives left out.

    span_ns is from the first launch to the end of the last, added up over its devices; idle_ns,
    collective_ns and exposed_ns (collectives alone) are parts of it. None is not known.
    """

    rank: int | None
    label: str
    run: str
    device: str | None
    host_key: str | None
    gpu_key: str | None
    launches: int
    ratio: float | None
    compute_ns: int
    span_ns: int | None
    idle_ns: int | None
    collective_ns: int | None
    exposed_ns: int | None
    attention: tuple[str, ...]
    findings: tuple[str, ...] = ()

    @property
    def idle_share(self) -> float | None:
        """Of the span."""
        return self._share(self.idle_ns)

    @property
    def collective_share(self) -> float | None:
        """Of the span."""
        return self._share(self.collective_ns)

    @property
    def exposed_share(self) -> float | None:
        """Of the span."""
        return self._share(self.exposed_ns)

    def _share(self, part: int | None) -> float | None:
        return part / self.span_ns if part is not None and self.span_ns else None


@dataclass(frozen=True, slots=True)
class RankComparison:
    """The ranks of one job. world_size is what its traces tell; spread is the standard deviation of the
    ratios, without what lies outside. caveats say what was not compared.
    """

    rows: tuple[RankFigures, ...]
    findings: tuple[Finding, ...]
    world_size: int | None
    hosts: int | None
    spread: float | None
    threshold: float = THRESHOLD
    caveats: tuple[str, ...] = ()
