"""`profharness explain-kernel`: a kernel's name in words."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.cli._options import emit, output_options
from profharness.views.explain_kernel import described, names_document


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@output_options
def command(names: tuple[str, ...], format_: str | None, output: Path | None, force: bool) -> None:
    """Say a kernel's name in words: what made it, what each part means, and what it leaves open.

    NAME is whole, mangled or demangled, in the spelling of any profiler, or short as `kernels`
    shows it; quote it. The name alone is read: no GPU, no torch, no store. A name that no rule
    knows is answered as unknown, and so is a part that nobody documents. Short names have the flags
    of FlashAttention only where they are set; whole ones (`kernels --full`) have all.

    \b
    Examples:
      profharness explain-kernel 'flash_fwd_splitkv_kernel<64,64x256,w4>'
      profharness explain-kernel cudnn_sdpa_sm90_fprop_wgmma_knob_7_64x128x64
      profharness explain-kernel fmha_cutlassF_f16_aligned_64x64_rf_sm80 --format json
    """
    emit(names_document(described(names)), format_, output, force=force)
