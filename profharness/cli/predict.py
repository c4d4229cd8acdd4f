"""`profharness predict`: what a GPU would do with configs, by its atlas."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.answers.atlas.catalog import predicted
from profharness.cli._options import (
    atlas_option,
    backend_option,
    chosen_format,
    config_options,
    driver_option,
    emit,
    hint,
    output_options,
    read_configs,
)
from profharness.config import split_names
from profharness.views.predict import predict_document


@click.command()
@config_options
@backend_option
@click.option(
    "--gpu",
    metavar="NAME",
    help="The GPU that is asked about: H200, or any that `explain --gpu` knows.  [default: the one here "
    "where it has an atlas, else the only one that has]",
)
@click.option(
    "--torch",
    metavar="RELEASE",
    help="The PyTorch release, 2.11 or 2.11.0.  [default: the newest that has an atlas of this GPU; "
    "without one the newest whose rules are known]",
)
@driver_option
@atlas_option
@click.option("--full", is_flag=True, help="Each config by itself too, where there are several.")
@output_options
def command(
    config: tuple[str, ...],
    configs_file: Path | None,
    backend: tuple[str, ...],
    gpu: str | None,
    torch: str | None,
    driver: str | None,
    atlas: Path | None,
    full: bool,
    format_: str | None,
    output: Path | None,
    force: bool,
) -> None:
    """Predict what a GPU does with configs, without that GPU: choice, kernels, time, the best backend.

    Answers come from an atlas: thousands of cells that were measured on such a GPU, and a model
    between them. `source` says how each figure is known: `measured` in the atlas, by the `model`,
    whose 90 % interval stands beside it, or `floor`: then nothing but the choice by rule and the
    roofline bound is told, because the GPU or the release has no atlas or the config lies outside
    of what one sampled. Several configs give maps of choice, time and loss. No torch and no store is
    read.

    \b
    Examples:
      profharness predict --config 16,32,1,128,bf16,seq_kv=4096,kv_heads=8 --gpu H200
      profharness predict --config '2,16,{512:8192:*2},{64,128,256},bf16' --gpu H200 -o maps.html
      profharness predict --configs FILE --gpu H200 --format csv
    """
    configs = read_configs(config, configs_file)
    found = predicted(configs, split_names(backend), gpu, torch, atlas, driver)
    if gpu is None:
        hint(f"answering for {found.place.text}")
    if found.doubt:
        hint(found.doubt)
    charts = chosen_format(format_, output) in ("html", "md")
    document = predict_document(
        found.answers, found.place, found.backends, full=full, charts=charts
    )
    emit(document, format_, output, force=force, about=found.place.text)
