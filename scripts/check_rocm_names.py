"""Check that profharness recognizes the kernels of ROCm traces.

`check_rocm_names.py FOLDER` prints a line for each trace of AMD's profilers, and each Kineto trace
of ROCm, in a folder: the share of the kernel time that belongs to the family `other`, and the
largest such kernels. The script ends with exit code 1 if this share exceeds 2 % in a trace with
attention.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from check_rocm import check_all, form_of, open_unpacked, read_kineto

from profharness.traces.demangle import canonical_names
from profharness.traces.kernel_names import ATTENTION_FAMILIES, parse_kernel_name

LIMIT = 0.02
SHOWN = 3
WIDTH = 90
ATTENTION = ATTENTION_FAMILIES | {"softmax"}


def _is_rocm(path: Path) -> bool:
    """Return whether a Kineto trace is from ROCm."""
    with open_unpacked(path) as file:
        return b'"Dispatch Kernel"' in file.read()


def kernel_times(path: Path) -> Counter[str] | None:
    """Return the time of each kernel by canonical name, or None if the file is not from ROCm."""
    read = form_of(path)
    # the oldest traces of CUDA have the same form
    if read is None or (read is read_kineto and not _is_rocm(path)):
        return None
    times: Counter[str] = Counter()
    for name, _, duration, *_ in read(path):
        times[str(name)] += duration
    names, _ = canonical_names(set(times))
    merged: Counter[str] = Counter()
    for name, time in times.items():
        merged[names[name]] += time
    return merged


def check(times: Counter[str]) -> tuple[str, bool]:
    """Return lines about a trace, and whether its share of unknown kernels is small enough."""
    families = {name: parse_kernel_name(name).family for name in times}
    total = times.total() or 1
    unknown = Counter({name: times[name] for name in times if families[name] == "other"})
    share = unknown.total() / total
    computes = bool(ATTENTION & set(families.values()))
    kind = "" if computes else ", no attention"
    lines = [f"{share:.2%} of the time of {len(times)} kernels belongs to the family other{kind}"]
    lines += [f"  {time / total:.2%} {name[:WIDTH]}" for name, time in unknown.most_common(SHOWN)]
    return "\n".join(lines), not computes or share <= LIMIT


def check_file(path: Path) -> tuple[str, bool] | None:
    """Return lines about a file and whether it passes. None means that it is not a ROCm trace."""
    times = kernel_times(path)
    return check(times) if times else None


def main(folder: Path) -> int:
    """Check all files in a folder. Return the exit code."""
    return check_all(folder, check_file, "traces pass")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
