"""List the pipeline stages and the warp roles of kernels, as given by their names or sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from profharness.render.document import Block, Heading, Note
from profharness.rows import KernelRow
from profharness.traces.kernel_names.by_source import fact_texts
from profharness.traces.kernel_names.parts import describe


def source_notes(rows: Iterable[KernelRow], longer: Mapping[str, str]) -> Iterator[Block]:
    """Yield a note for each kernel whose name or source gives its stages or warp roles.

    `longer` maps kernels to the names that tables show instead of ambiguous short names.
    """
    notes = []
    for name, short in dict.fromkeys((row.kernel, row.kernel_short) for row in rows):
        described = describe(name)
        texts = list(fact_texts(described.by_source))
        if described.kernel.stages:
            texts.insert(0, f"Stages: {described.kernel.stages} buffers. By name")
        notes += [Note(". ".join(texts), longer.get(name, short))] if texts else []
    if notes:
        yield Heading("Stages and warp roles", "", 3)
        yield from notes
