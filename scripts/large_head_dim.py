"""The path of the study docs/studies/large-head-dim.md: its steps, what is measured of them, and the
commands that tell it from the store. scripts/make_studies.py runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench_kernels import PEERS

NAME = "large-head-dim"
SHAPE = "1,4,64,8192,fp32"  # told step by step
CAPTURED = (SHAPE, "4,4,128,4096,fp16")
TIMED = ("1,1,16,8192,{fp32,fp16}", "1,4,64,{512,2048,4096,8192},fp32", *CAPTURED[1:])
METRICS = "l1tex__t_bytes.sum,lts__t_bytes.sum"  # what the caches moved, in a second pass of ncu
SEEN = ("naive", "naive-compiled", "auto")  # of the peers, those that are captured too


@dataclass(frozen=True)
class Step:
    """One step of the path: the backend that took it, a heading, and what was changed."""

    backend: str
    heading: str
    text: str


# kernels/NAME, or kernels/FILE.py:FUNCTION for a variant that stands for one step of the path.
PATH = (
    Step(
        "single_query",
        "A block for each query",
        "Where the path starts: every block reads all of K and V for one row of Q.",
    ),
    Step(
        "kernels/tiled.py:one_block",
        "Tiles of queries",
        "A block has a tile of queries and all of head_dim: K and V are read once a tile, not once "
        "a query. There are as few blocks as there are tiles.",
    ),
    Step(
        "kernels/tiled.py:one_cluster",
        "head_dim split over a cluster",
        "The blocks of a cluster have a part of head_dim each. They add up their parts of the "
        "scores through distributed shared memory.",
    ),
    Step(
        "tiled",
        "As many parts as there are SMs",
        "A cluster has at most 16 blocks, and clusters leave SMs over. Where that is too few, the "
        "parts are blocks of a cooperative launch that exchange through L2; the plan says which.",
    ),
)


@dataclass(frozen=True)
class Section:
    """One generated part: a heading, a sentence, and the command that answers. {capture} and
    {bench} in it stand for the two runs.
    """

    heading: str
    text: str
    words: tuple[str, ...]


def configs(*texts: str) -> tuple[str, ...]:
    """--config for each text."""
    return tuple(word for text in texts for word in ("--config", text))


def capture_words(path: Sequence[Step] = PATH) -> tuple[str, ...]:
    """The one capture: kernels, ncu's counters, latency."""
    backends = dict.fromkeys([*(step.backend for step in path), *SEEN])
    return (
        *("capture", *configs(*CAPTURED), "--profiler", "torch,ncu", "--metrics", METRICS),
        *("--backend", ",".join(backends)),
    )


def bench_words(path: Sequence[Step] = PATH) -> tuple[str, ...]:
    """The one bench: steps and peers in turns."""
    backends = dict.fromkeys([*(step.backend for step in path), *PEERS])
    return (
        *("bench", *configs(*TIMED), "--backend", ",".join(backends)),
        *("--measurement", "graph,event,kernel", "--max-time", "1s"),
    )


def sections(path: Sequence[Step] = PATH) -> list[Section]:
    """The parts in order: for each step what ran, what holds it back, and what changed since the
    step before; at the end what PyTorch does, and all the times.
    """
    found = []
    shape, run = ("--config", SHAPE), ("--run", "{capture}")
    for number, step in enumerate(path, start=1):
        heading, backend = f"{number}. {step.heading}", ("--backend", step.backend)
        found.append(Section(heading, step.text, ("kernels", *run, *shape, *backend)))
        found.append(Section("", "", ("analyze", *run, *shape, *backend)))
        if number > 1:
            sides = tuple(f"{{capture}}:{each.backend}" for each in path[number - 2 : number])
            text = f"Against step {number - 1}:"
            found.append(Section("", text, ("diff", *sides, *shape)))
    peers = ("--backend", ",".join(SEEN))
    found.append(
        Section(
            "What PyTorch runs there",
            "Where torch.compile put scaled_dot_product_attention in the place of the plain form, "
            "the kernels of naive-compiled are those of a backend of PyTorch.",
            ("kernels", *run, *shape, *peers),
        )
    )
    found.append(
        Section("All steps and peers", "Times of all of them:", ("bench", "--run", "{bench}"))
    )
    return found
