"""`profharness explain-kernel`: describe a kernel's name in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from profharness.columns import pick
from profharness.commands._command import command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._types import Names
from profharness.errors import UsageError, join_few
from profharness.render.document import Block, Document, Heading, Note, Table, record
from profharness.store import frame
from profharness.traces.kernel_names import ATTENTION_FAMILIES, canonical
from profharness.traces.kernel_names.by_source import fact_texts
from profharness.traces.kernel_names.parts import FACTS, Description, NamePart, describe

if TYPE_CHECKING:
    import pandas as pd


SCHEMA = "profharness.kernel_name/1"
ELLIPSIS = "…"
SHORTENED = (
    "parts of the name are missing where it contains …; to get the whole name, show the kernel with "
    "--full or --format json"
)
FIELDS = (
    *("name", "kernel", "short", "family", "library", "meaning"),
    *FACTS,
    *("parts", "unknown", "untold", "by_source"),
)


def _record(description: Description) -> dict[str, Any]:
    kernel = description.kernel
    return {
        "name": kernel.name,
        "kernel": canonical(kernel.name),
        **{name: getattr(kernel, name) for name in ("short", "family")},
        "library": description.library,
        "meaning": description.meaning,
        **{name: getattr(kernel, name) for name in FACTS},
        "parts": [record(part) for part in description.parts],
        "unknown": list(description.unknown),
        "untold": list(description.untold),
        "by_source": [record(fact) for fact in description.by_source],
    }


KernelNames = Annotated[
    Names,
    Option(
        metavar="NAME...",
        click={"nargs": -1},
        tool="One or more kernel names, one per line.",
        tool_examples=("flash_fwd_splitkv_kernel<64,64x256,w4>",),
        tool_value=str.splitlines,
    ),
]


def _to_frame(descriptions: list[Description]) -> pd.DataFrame:
    return frame([_record(description) for description in descriptions])


@command(
    "explain-kernel",
    frame=_to_frame,
    tool="Use this tool to describe a kernel, given its full or short name from any profiler. The "
    "tool reads only the name.",
)
def explain_kernel(names: KernelNames) -> list[Description]:
    """Explain a kernel's name in words.

    The output says which library the kernel belongs to, what each part of the name means, and what
    the name does not reveal.

    NAME is a full name, mangled or demangled, as spelled by any profiler, or a short name as
    printed by `kernels`. Quote it. Only the name is read; no GPU, torch or store is needed. Unknown
    names and undocumented parts are reported as unknown. A short name shows only those
    FlashAttention flags that are set; a full name (`kernels --full`) shows them all.

    \b
    Examples:
      profharness explain-kernel 'flash_fwd_splitkv_kernel<64,64x256,w4>'
      profharness explain-kernel cudnn_sdpa_sm90_fprop_wgmma_knob_7_64x128x64
      profharness explain-kernel fmha_cutlassF_f16_aligned_64x64_rf_sm80 --format json
    """
    given = [names] if isinstance(names, str) else names
    if not all(name.strip() for name in given):
        raise UsageError("NAME is empty; give a kernel name as shown by `profharness kernels`")
    return [describe(name) for name in given]


@document(explain_kernel)
def show(descriptions: list[Description]) -> Document:
    """Return a document with the parts of each name, and the properties that the name lacks."""
    blocks: list[Block] = []
    for description in descriptions:
        kernel = description.kernel
        blocks.append(Heading(kernel.short, f"family {kernel.family}"))
        is_shortened = ELLIPSIS in kernel.name
        if is_shortened:
            blocks.append(Note(SHORTENED, "shortened", "warning"))
        if not description.is_known:
            if len(descriptions) > 1:
                blocks.append(Note(description.meaning, "unknown", "warning"))
            continue
        if len(descriptions) > 1:
            blocks.append(Note(description.meaning))
        parts = [replace(part, meaning=part.meaning or "unknown") for part in description.parts]
        if parts:
            blocks.append(Table.of(pick(NamePart), parts))
        blocks += map(Note, fact_texts(description.by_source))
        if (
            not description.by_source
            and kernel.family in ATTENTION_FAMILIES
            and kernel.stages is None
        ):
            text = "neither the name nor any published source shows the stages or the warp roles"
            blocks.append(Note(text, "open"))
        if description.untold and not is_shortened:
            text = (
                f"the name does not contain {join_few(description.untold, len(description.untold))}"
            )
            blocks.append(Note(text, "open"))
    records = tuple(map(_record, descriptions))
    title, told = "Kernel names in words", kernel_name_answer(descriptions)
    return Document(SCHEMA, title, tuple(blocks), FIELDS, records, answer=told)


def kernel_name_answer(descriptions: Sequence[Description]) -> tuple[str, ...]:
    """Return what a kernel is, or how many of several names are known."""
    if len(descriptions) == 1:
        text = descriptions[0].meaning.rstrip(".")
        return (f"A{text[1:]}." if text.startswith(("a ", "an ")) else f"{text}.",)
    known = sum(description.is_known for description in descriptions)
    return (f"{known} of {len(descriptions)} names are known.",)


DECLARATION = declaration_of(explain_kernel)
