"""The glossary of pages. Meanings of tokens in kernel names are in kernel_names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from profharness.columns import pick
from profharness.commands.bench.tables import MEANS
from profharness.render.document import Block, Chart, Heading, Note, Table
from profharness.rows import CALL_MEASUREMENTS, KernelRow


def _terms(*names: str) -> dict[str, str]:
    return {column.title: column.meaning for column in pick(KernelRow, *names)}


GLOSSARY = {
    **{name: f"{MEANS[name]}; no profiler running" for name in CALL_MEASUREMENTS},
    "kernel": "a function that runs on the GPU; on a CPU an ATen op stands for it. Kernel times come from "
    "the profiler and leave the gaps between kernels out",
    "launch": "one execution of a kernel",
    **_terms("launches_per_call"),
    "cell": "one config on one backend",
    "refused": "the backend does not take this config; that is an answer, not an error",
    "ran": "the backend whose op and kernels the trace shows",
    "rules say": "what PyTorch's dispatch rules, as tables, say of this config and machine",
    "role": "what a kernel computes within its call: attention, softmax, dQ, …",
    "regret%": "how much longer auto took than the fastest correct other backend",
    "waves": "blocks of a launch over the blocks that the GPU holds at once; a part of a wave leaves SMs idle",
    **_terms("grid", "block", "shared_bytes", "registers_per_thread", "occupancy", "share"),
    "peak KiB": "memory that a call holds at its peak, inputs left out",
    "median": "the median over all samples; p10 and p90 hold the middle 80 % of them",
    "to fastest": "the median over that of the fastest backend of the same config",
    "±%": "half the 95 % interval of the median; busy: that is more than the median",
    "eff%": "the rate over the peak that binds first",
    "speed-up": "the baseline's time over this one",
    "ratio": "the candidate's time over the baseline's",
    "roofline": "the rate that bandwidth allows at an intensity, up to the peak rate",
    "intensity": "FLOPs a byte that has to be moved",
    "-": "what a profiler cannot know; it is never a zero",
}


def glossary_blocks(blocks: Sequence[Block]) -> list[Block]:
    """Return the terms that the blocks use, with their meanings. Empty if they use none."""
    words = words_of("\n".join(_texts(blocks)))
    notes = [Note(meaning, word) for word, meaning in words.items()]
    return [Heading("What the words mean"), *notes] if notes else []


def words_of(text: str) -> dict[str, str]:
    """Return the terms of the glossary that a text uses, with their meanings."""
    return {
        word: meaning
        for word, meaning in GLOSSARY.items()
        if re.search(rf"(?<![\w%]){re.escape(word)}(?![\w%])", text)
    }


def _texts(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield the texts that people read, except code."""
    for block in blocks:
        if isinstance(block, Heading):
            yield f"{block.text}\n{block.detail}"
        elif isinstance(block, Note):
            yield f"{block.label}\n{block.text}"
        elif isinstance(block, Chart):
            yield f"{block.title}\n{block.x_title}\n{block.y_title}\n{block.kind}"
        elif isinstance(block, Table):
            yield "\n".join(column.title for column in block.columns)
            yield "\n".join(
                "-" if value is None else value
                for row in block.rows
                for value in row
                if value is None or isinstance(value, str)
            )
