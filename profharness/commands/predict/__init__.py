"""`profharness predict`: predict backend and time of configs on a GPU, from its atlas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from profharness.atlas.predictions import Asked, flat_record, predicted
from profharness.attention.config import split_names
from profharness.commands._command import command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._output import chosen_format, hint
from profharness.commands._types import (
    RELEASE_OPTION,
    AtlasFolder,
    Backends,
    Configs,
    Driver,
    Format,
    OutputFile,
    config_list,
)
from profharness.commands.predict.tables import predict_document
from profharness.render.document import Document
from profharness.store import frame

if TYPE_CHECKING:
    import pandas as pd

GpuName = Annotated[
    str | None,
    Option(
        ("--gpu",),
        metavar="NAME",
        help="The GPU: H200, or any that `explain --gpu` knows.  [default: the local GPU if it has an atlas, "
        "else the only one with an atlas]",
        tool="A GPU by name. Default: the only one with an atlas.",
        tool_examples=("H200",),
    ),
]
Release = Annotated[
    str | None,
    replace(
        RELEASE_OPTION,
        help="The PyTorch release, 2.11 or 2.11.0.  [default: the newest with an atlas of this GPU, else "
        "the newest with known rules]",
    ),
]
Full = Annotated[bool, Option(("--full",), help="Also show each config by itself.")]


def _to_frame(found: Asked) -> pd.DataFrame:
    rows = [row for answer in found.answers for row in found.of(answer)]
    made = frame(list(map(flat_record, rows)))
    made.attrs |= {"answers": rows, "place": found.place.text, "doubt": found.doubt}
    return made


@command(
    "predict",
    frame=_to_frame,
    tool="Use it for the time of a config or its fastest backend on a GPU; explain gives reasons.",
)
def predict(
    configs: Configs,
    backends: Backends = None,
    *,
    gpu: GpuName = None,
    torch: Release = None,
    driver: Driver = None,
    atlas: AtlasFolder = None,
) -> Asked:
    """Predict PyTorch's choice, kernels, time and the best backend for configs on a GPU you do not have.

    Predictions come from an atlas: thousands of cells measured on such a GPU, and a model fitted to
    them. `source` is `measured` if the atlas has the cell; `model` if the model predicts it, with a
    90 % interval; or `floor` if the GPU or the release has no atlas, or the config lies outside its
    samples. A floor has only the choice by the dispatch rules and the roofline bound. Several configs
    give maps of choice, time and loss. Neither torch nor a store is needed.

    \b
    Examples:
      profharness predict --config 16,32,1,128,bf16,seq_kv=4096,kv_heads=8 --gpu H200
      profharness predict --config '2,16,{512:8192:*2},{64,128,256},bf16' --gpu H200 -o maps.html
      profharness predict --configs FILE --gpu H200 --format csv

    In Python the result has one row per config and backend, times in ns. A row with the source `floor`
    has no time, and low_ns is the roofline bound. Kernels are short names. `attrs["answers"]` has the
    full rows, `attrs["place"]` the machine, and `attrs["doubt"]` any doubts.
    """
    found = predicted(config_list(configs), split_names(backends), gpu, torch, atlas, driver)
    if gpu is None:
        hint(f"answering for {found.place.text}")
    if found.doubt:
        hint(found.doubt)
    return found


@document(predict)
def show(
    found: Asked, *, full: Full = False, format: Format = None, output: OutputFile = None
) -> Document:
    """Return the document, with charts if the format shows them."""
    path = None if output is None else Path(output)
    charts = chosen_format(format, path) in ("html", "md")
    return predict_document(found.answers, found.place, found.backends, full=full, charts=charts)


DECLARATION = declaration_of(predict)
