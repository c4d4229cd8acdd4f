"""`profharness layers`: the attention of a program, layer by layer."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.answers.layers import find_layers, replay_lines
from profharness.cli._options import complete_runs, emit, output_options, store_option
from profharness.errors import NotFoundError
from profharness.store import Selection, open_store
from profharness.views.layers import layers_document


@click.command()
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option("--step", type=click.IntRange(0), help="Only this step, counted from 0.")
@click.option(
    "--torch",
    metavar="RELEASE",
    help="The program's PyTorch, for the reasons, where its trace does not tell it: 2.11.",
)
@click.option(
    "--configs",
    "only_configs",
    is_flag=True,
    help="Print the configs that replay the calls, for `capture --configs`.",
)
@click.option("--full", is_flag=True, help="Whole module names, kernels, and where the GPU waited.")
@output_options
@store_option
def command(
    run: str | None,
    step: int | None,
    torch: str | None,
    only_configs: bool,
    full: bool,
    format_: str | None,
    output: Path | None,
    force: bool,
    store: Path,
) -> None:
    """Show the attention of a program, layer by layer: what ran, why, what it cost.

    Answers from a trace of any program that PyTorch's profiler recorded, once `ingest` took it in.
    Shapes are told by a trace recorded with record_shapes=True, modules by with_stack=True. A line
    stands for the like calls of like layers; times are of kernels, per step: a step is a
    ProfilerStep, else it ends with an optimizer's step, else a call of the outermost module begins it.

    \b
    mode   eager, compile (inside torch.compile), fast path (nn.TransformerEncoder's own op)
    phase  prefill, decode (one query), cross (unlike lengths), train, recompute (checkpointing)
    ran    flash, efficient, cudnn, math; eager: matrix products and a softmax; flex

    \b
    Examples:
      profharness ingest trace.json.gz && profharness layers
      profharness layers --torch 2.11 --full
      profharness layers --configs > calls.txt; profharness capture --configs calls.txt
    """
    with open_store(store) as opened:
        name = opened.find_run(Selection(run), "attention calls")
        layers = find_layers(opened, name, step=step, torch=torch)
    if only_configs:
        lines = replay_lines(layers)
        if not lines:
            reasons = dict.fromkeys(text for row in layers.rows for text in row.reasons)
            raise NotFoundError(f"no config replays a call of run {name}: {'; '.join(reasons)}")
        click.echo("\n".join(lines))
        return
    emit(layers_document(layers, full=full), format_, output, force=force)
