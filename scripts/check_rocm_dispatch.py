"""Compare the dispatch rules of AMD GPUs with the ops in ROCm traces.

    python scripts/check_rocm_dispatch.py FOLDER [--torch 2.5..2.14]

Each Kineto trace of an AMD GPU in FOLDER is read, plain or gzip. For each call of SDPA whose sizes
the trace contains, the rules predict the backend, and the op inside the call shows the backend that
ran. A trace does not contain the PyTorch release. Therefore every release is tried, and the release
that agrees with most calls is used. The script prints agreed/total for each trace, and exits with 1
if no release agrees with all calls of a trace.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from profharness.attention.dispatch import rocm
from profharness.attention.dispatch.machine import (
    AttentionParams,
    Mask,
    Release,
    known_releases,
    machine_for,
    parse_releases,
    release_text,
)
from profharness.attention.dispatch.predict import predict
from profharness.errors import ProfharnessError

OUTER = "aten::scaled_dot_product_attention"
OPS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
}


class Places(NamedTuple):
    """The positions of arguments of an op. None means that the op does not have the argument."""

    mask: int | None
    dropout: int
    causal: int
    gqa: int | None


# torch.compile calls the op of the chosen backend without the outer op.
PLACES = {
    OUTER: Places(3, 4, 5, 7),
    "aten::_scaled_dot_product_flash_attention": Places(None, 3, 4, None),
    "aten::_scaled_dot_product_efficient_attention": Places(3, 5, 6, None),
    "aten::_scaled_dot_product_cudnn_attention": Places(3, 5, 6, None),
    "aten::_scaled_dot_product_attention_math": Places(3, 4, 5, 8),
}
DTYPES = {
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "float": "fp32",
    "double": "fp64",
    "c10::Float8_e4m3fn": "fp8_e4m3",
}
SHOWN = 3


class Call(NamedTuple):
    """One call of SDPA: its parameters, and the backend whose op ran."""

    params: AttentionParams
    ran: str


def read_trace(path: Path) -> dict[str, Any]:
    """Return the trace in a file, or an empty one if the file is not a Kineto trace."""
    packed = path.suffix == ".gz"
    with gzip.open(path, "rt") if packed else path.open() as file:
        found = json.load(file)
    return found if isinstance(found, dict) and "traceEvents" in found else {}


def gpu_of(trace: dict[str, Any]) -> rocm.AmdGpu | None:
    """Return the AMD GPU of a trace. The names of some are empty, so that only the capability and
    ROCm's versions reveal the architecture.
    """
    devices = trace.get("deviceProperties") or [{}]
    if (amd := rocm.find_amd_gpu(str(devices[0].get("name", "")))) is not None:
        return amd
    digits = f"{devices[0].get('computeMajor')}{devices[0].get('computeMinor')}"
    known = {"90": "gfx90a", "94": "gfx942", "95": "gfx950"}
    return rocm.find_amd_gpu(known.get(digits, "")) if "hip_runtime_version" in trace else None


def calls(trace: dict[str, Any]) -> Iterator[Call]:
    """Yield the calls of SDPA whose sizes and inner op the trace contains."""
    lanes: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and (event.get("name") == OUTER or event.get("name") in OPS):
            lanes[event["pid"], event["tid"]].append(event)
    for events in lanes.values():
        # An op encloses the ops that it calls, which start at the same time or later.
        events.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
        for before, op in pairwise([{"name": "", "ts": 0, "dur": 0}, *events]):
            if op["name"] not in OPS:
                continue
            end = float(before["ts"]) + float(before["dur"])
            inside = before["name"] == OUTER and float(op["ts"]) <= end
            if (params := params_of(before if inside else op)) is not None:
                yield Call(params, OPS[op["name"]])


def params_of(event: dict[str, Any]) -> AttentionParams | None:
    """Return the parameters of a call, or None if the trace does not contain its sizes.

    A trace does not record whether an input requires a gradient.
    """
    args, places = event.get("args", {}), PLACES[event["name"]]
    sizes, types = args.get("Input Dims"), args.get("Input type")
    values, strides = args.get("Concrete Inputs"), args.get("Input Strides") or [[]] * 9
    if not sizes or not types or not values or any(len(each) != 4 for each in sizes[:3]):
        return None
    query, key, value = sizes[:3]
    mask = None
    if (at := places.mask) is not None and sizes[at]:
        kind = "bool" if types[at] in ("bool", "c10::Bool") else "float"
        mask = Mask(tuple(sizes[at]), kind, last_stride=(strides[at] or [1])[-1])
    return AttentionParams(
        batch=query[0],
        heads=query[1],
        kv_heads=key[1],
        seq_q=query[2],
        seq_kv=key[2],
        head_dim=query[3],
        batch_kv=key[0],
        kv_heads_v=value[1],
        head_dim_v=value[3],
        dtype=DTYPES.get(types[0], types[0]),
        enable_gqa=places.gqa is not None and values[places.gqa : places.gqa + 1] == ["True"],
        is_causal=values[places.causal] == "True",
        mask=mask,
        dropout=float(values[places.dropout] or 0),
        last_stride=max((each[-1] for each in strides[:3] if each), default=1),
    )


def compare(made: Sequence[Call], gpu: rocm.AmdGpu, releases: Sequence[Release]) -> tuple[int, str]:
    """Return how many calls agree with the best release, and the releases that agree with all of
    them, or examples of calls that differ.
    """
    agreed: dict[Release, int] = {}
    wrong: dict[Release, Counter[tuple[str, str]]] = {}
    for release in releases:
        machine = machine_for(gpu.architecture, release)
        told = [predict(call.params, machine).choice for call in made]
        pairs = [(ran.ran, choice) for ran, choice in zip(made, told, strict=True)]
        wrong[release] = Counter(pair for pair in pairs if len(set(pair)) > 1)
        agreed[release] = len(made) - wrong[release].total()
    best = max(agreed.values())
    names = [release_text(release) for release in releases if agreed[release] == best]
    if best == len(made):
        return best, f"as in {', '.join(names)}"
    first = next(release for release in releases if agreed[release] == best)
    examples = (
        f"{count} ran {ran} instead of {choice}"
        for (ran, choice), count in wrong[first].most_common(SHOWN)
    )
    return best, f"in {release_text(first)} {'; '.join(examples)}"


def main() -> None:
    """Check the traces that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", help="the releases to try (default: all with known rules)")
    options = parser.parse_args()
    asked = parse_releases(options.torch) if options.torch else sorted(known_releases("gfx942"))
    total = agreed = failed = 0
    for path in sorted([*options.folder.rglob("*.json"), *options.folder.rglob("*.json.gz")]):
        trace = read_trace(path)
        if not trace or (gpu := gpu_of(trace)) is None:
            continue
        made = list(calls(trace))
        if not made:
            print(f"{path.name}: {gpu.name}, no call of SDPA with sizes")
            continue
        count, text = compare(made, gpu, asked)
        ran = ", ".join(f"{name} {n}" for name, n in Counter(c.ran for c in made).items())
        print(f"{path.name}: {gpu.name}, {count}/{len(made)} agree {text} ({ran})")
        total, agreed, failed = total + len(made), agreed + count, failed + (count < len(made))
    print(f"{agreed}/{total} calls agree with the rules")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    try:
        main()
    except (ProfharnessError, OSError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
