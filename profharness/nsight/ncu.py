"""How ncu is called: to collect metrics of a command's kernels, and to print a report as CSV."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from profharness.nsight.nsys import escape_macros
from profharness.nsight.tools import version_key

SUFFIX = ".ncu-rep"
DOMAIN = "profharness"

# One pass on GH100. launch__* cost no pass; those named here are in every ncu since 2022.3, and
# launch__sm_count (2024 and later) comes along unasked.
DEFAULT_METRICS: tuple[str, ...] = (
    "gpu__time_duration.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "sm__maximum_warps_per_active_cycle_pct",
    "launch__occupancy_limit_blocks",
    "launch__occupancy_limit_registers",
    "launch__occupancy_limit_shared_mem",
    "launch__occupancy_limit_warps",
    "launch__waves_per_multiprocessor",
)

# --import-sass: unknown to 2024.2, known to 2025.3. Without it reports are some fifty times larger.
IMPORT_SASS_SINCE = (2025, 3)

_SPECIAL = re.compile(r"[@,\[\]/*+\\]")


def escape_nvtx(name: str) -> str:
    """A range or domain name in which a filter of ncu finds no operator: `b2/auto` is `b2\\/auto`."""
    return _SPECIAL.sub(lambda match: "\\" + match[0], name)


def nvtx_filter(name: str, *, domain: str | None = DOMAIN, push_pop: bool = False) -> str:
    """The filter for ranges of exactly that name.

    Start/end ranges by default: they hold for the whole process, so that backward kernels count,
    which autograd launches from a thread of its own. A push/pop range holds for its thread alone
    and is told by a slash at the end. domain None: the default domain.
    """
    prefix = "" if domain is None else f"{escape_nvtx(domain)}@"
    return f"{prefix}{escape_nvtx(name)}{'/' if push_pop else ''}"


# The ranges around profiled calls of cells, not those around warm-up.
CELL_FILTER = f"regex:{DOMAIN}@profharness:c[0-9]+"


def profile_argv(
    tool: Path,
    output: Path,
    command: Sequence[str],
    *,
    log: Path,
    metrics: Sequence[str] = (),
    sections: Sequence[str] = (),
    version: str | None = None,
) -> list[str]:
    """The argv that profiles the kernels inside the ranges of cells; output ends in `.ncu-rep`.

    metrics and sections come on top of DEFAULT_METRICS. Clocks are left as they are, so that
    durations compare with other profilers; caches are flushed before each pass (ncu's default).
    Standard input goes to the target. version: that of the tool, to leave out what an
    older one does not know; None means the newest. Raises ValueError for another suffix.
    """
    if output.suffix != SUFFIX:
        raise ValueError(f"{output}: the report of ncu must end in {SUFFIX}")
    knows_sass = version is None or version_key(version) >= IMPORT_SASS_SINCE
    wanted = tuple(dict.fromkeys([*DEFAULT_METRICS, *metrics]))
    return [
        str(tool),
        *("--config-file", "off"),
        *("--target-processes", "all"),
        *("--replay-mode", "kernel"),
        *("--clock-control", "none"),
        *(("--import-sass", "no") if knows_sass else ()),
        "--nvtx",
        *("--nvtx-include", CELL_FILTER),
        *("--metrics", ",".join(wanted)),
        *(word for section in sections for word in ("--section", section)),
        "--disable-extra-suffixes",
        *("--log-file", str(log)),
        "-f",
        *("-o", escape_macros(output)),
        *command,
    ]


def csv_argv(tool: Path, report: Path) -> list[str]:
    """The argv that prints a report, one row a kernel, values in base units; needs no GPU."""
    return [
        str(tool),
        *("--config-file", "off"),
        *("--import", str(report)),
        "--csv",
        *("--page", "raw"),
        *("--print-units", "base"),
    ]


def child_environment(base: Mapping[str, str], tmpdir: Path) -> dict[str, str]:
    """The environment for ncu and its target.

    LC_ALL=C, because CSV numbers have thousands separators in other locales; a TMPDIR of its own,
    because another user's lock file may lie in the common one; sections are read where they are
    installed, not copied into the home folder; another tool's injection must not be there.
    """
    kept = {name: value for name, value in base.items() if name != "CUDA_INJECTION64_PATH"}
    return {
        **kept,
        "TMPDIR": str(tmpdir),
        "LC_ALL": "C",
        "NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT": "1",
    }
