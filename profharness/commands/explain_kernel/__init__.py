"""`profharness explain-kernel`: describe a kernel's name in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from profharness.commands._command import command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._types import Names
from profharness.commands.explain_kernel.tables import described, name_record, names_document
from profharness.render.document import Document
from profharness.store import frame
from profharness.traces.kernel_names.parts import Description

if TYPE_CHECKING:
    import pandas as pd

KernelNames = Annotated[
    Names,
    Option(
        metavar="NAME...",
        click={"nargs": -1},
        tool="A kernel's name, or several, one per line.",
        tool_examples=("flash_fwd_splitkv_kernel<64,64x256,w4>",),
        tool_value=str.splitlines,
    ),
]


def _to_frame(descriptions: list[Description]) -> pd.DataFrame:
    return frame([name_record(description) for description in descriptions])


@command(
    "explain-kernel",
    frame=_to_frame,
    tool="Use it for a name from any profiler, full or short. Only the name is read.",
)
def explain_kernel(names: KernelNames) -> list[Description]:
    """Describe a kernel's name: its library, the meaning of each part, and what the name leaves open.

    NAME is a full name, mangled or demangled, in the spelling of any profiler, or a short name as
    printed by `kernels`. Quote it. Only the name is read: no GPU, no torch, no store. Unknown names
    and undocumented parts are reported as unknown. Short names show the flags of FlashAttention only
    if they are set; full names (`kernels --full`) show all of them.

    \b
    Examples:
      profharness explain-kernel 'flash_fwd_splitkv_kernel<64,64x256,w4>'
      profharness explain-kernel cudnn_sdpa_sm90_fprop_wgmma_knob_7_64x128x64
      profharness explain-kernel fmha_cutlassF_f16_aligned_64x64_rf_sm80 --format json
    """
    return described([names] if isinstance(names, str) else names)


@document(explain_kernel)
def show(descriptions: list[Description]) -> Document:
    """Return the document."""
    return names_document(descriptions)


DECLARATION = declaration_of(explain_kernel)
