"""`profharness explain`: why PyTorch takes the backend that it takes, and what would change that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from profharness.answers.explain.answer import (
    explain_all,
    require_answer,
    to_measure,
    with_store,
)
from profharness.answers.explain.maps import bisect_all, draw_maps, numeric_name
from profharness.answers.explain.rules import (
    Explanation,
    Place,
    asked_about,
    choices_by_rule,
    chosen,
    environment_text,
    matrix,
    named_places,
    skipped_text,
)
from profharness.cli._options import (
    FiniteRange,
    backend_option,
    capture_progress,
    config_options,
    emit,
    hint,
    output_options,
    read_configs,
    store_option,
)
from profharness.config import AUTO, Config, parse_config, split_names
from profharness.dispatch.machine import release_text, skipped_releases
from profharness.errors import UsageError
from profharness.run import CaptureOptions, Protocol
from profharness.views.document import Document
from profharness.views.explain import (
    bisect_document,
    explain_document,
    map_document,
    matrix_document,
)


@dataclass(frozen=True)
class Question:
    """What is asked, in the words of the command line. places is empty where PyTorch itself is asked;
    torch is the text that named them.
    """

    configs: list[Config]
    asked: str
    backends: tuple[str, ...]
    places: list[Place]
    store: Path
    torch: str | None = None
    bisect: str | None = None
    full: bool = False
    measure: bool = False
    device: str = "auto"
    timeout_s: float = 120.0


@click.command()
@config_options
@backend_option
@click.option(
    "--torch",
    metavar="RELEASES",
    help="Answer by rule for a release: 2.8, 2.9.1, 2.8,2.10 or a range 2.0..2.15.",
)
@click.option(
    "--gpu",
    metavar="NAME",
    help='Answer by rule for a GPU: "RTX A6000", H100, sm90, or cpu.  [default: the one here]',
)
@click.option("--cudnn", metavar="VERSION", help="cuDNN's version.  [default: the PyPI wheel's]")
@click.option("--cuda", metavar="VERSION", help="PyTorch's CUDA.  [default: the PyPI wheel's]")
@click.option(
    "--cudnn-compiled",
    metavar="VERSION",
    help="The cuDNN that PyTorch was compiled with; decides the order in 2.9.  [default: as known]",
)
@click.option("--bisect", metavar="PROPERTY", help="Find the values where the choice flips.")
@click.option("--full", is_flag=True, help="Every config's own answer, and messages whole.")
@click.option("--measure", is_flag=True, help="Capture what the advice changes, and say the gain.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    show_default=True,
    help="Where PyTorch is asked.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="How long PyTorch may take to answer.",
)
@output_options
@store_option
def command(
    config: tuple[str, ...],
    configs_file: Path | None,
    backend: tuple[str, ...],
    torch: str | None,
    gpu: str | None,
    cudnn: str | None,
    cuda: str | None,
    cudnn_compiled: str | None,
    bisect: str | None,
    full: bool,
    measure: bool,
    device: str,
    timeout_s: float,
    format_: str | None,
    output: Path | None,
    force: bool,
    store: Path,
) -> None:
    """Say why PyTorch takes the backend that it takes, why not the others, and what to change.

    PyTorch on this machine is asked, and nothing is launched. With --torch or --gpu the rules of
    that release answer instead, without torch and without a GPU; where they do not know, the answer
    is `unknown`. Exits 1 if PyTorch was asked and answered no config at all. Several configs give a map; several
    releases a table that marks where the choice changes. Where the GPU and the release have an atlas, one
    config has its kernel time and the best backend too. --backend limits the advice, and the
    columns of that table; a set (flash+math) or an order (cudnn-then-flash) is asked about instead
    of auto.

    \b
    Examples:
      profharness explain --config 2,8,512,100,fp32,mask=bool
      profharness explain --config 2,8,512,64,bf16,causal --torch 2.8 --gpu "RTX A6000"
      profharness explain --config 2,8,512,64,bf16 --torch 2.0..2.15 --gpu H100
      profharness explain --config 2,8,512,64,bf16 --backend flash+math --torch 2.11 --gpu H100
      profharness explain --config '2,8,{64:8192:*2},{64,80,96,128,256}' --torch 2.11 --gpu H200
      profharness explain --config 2,8,512,64,fp16 --bisect head_dim --torch 2.11 --gpu H200
    """
    asked, backends = asked_about(split_names(backend))
    configs = read_configs(config, configs_file)
    if not configs:
        raise UsageError("explain needs a config: --config 2,8,512,64,bf16, or --configs FILE")
    _check(torch is not None or gpu is not None, bisect, full, measure, device)
    places = named_places(torch, gpu, cudnn, cuda, cudnn_compiled)
    question = Question(
        configs, asked, backends, places, store, torch, bisect, full, measure, device, timeout_s
    )
    document, answers = answer_question(question)
    if unknown := document.extra.get("unknown_releases"):
        hint(skipped_text(unknown))
    # where PyTorch answers nothing, what the rules say is shown before the error
    emit(document, format_, output, force=force)
    if not places:
        require_answer(answers)


def _check(by_rule: bool, bisect: str | None, full: bool, measure: bool, device: str) -> None:
    """Raise UsageError for options that contradict each other."""
    if measure and by_rule:
        raise UsageError(
            "--measure runs on this machine, --torch and --gpu mean another; choose one"
        )
    if device != "auto" and by_rule:
        raise UsageError(
            "--device is where PyTorch is asked; with --torch or --gpu write --gpu cpu"
        )
    if bisect is not None:
        if measure or full:
            raise UsageError("--bisect asks for choices only; leave --measure and --full out")
        numeric_name(bisect)


def answer_question(question: Question) -> tuple[Document, list[Explanation]]:
    """The result, and the answers that it is made of where PyTorch was asked one by one. Raises
    UsageError.
    """
    document, answers = _answered(question)
    if unknown := [release_text(release) for release in skipped_releases(question.torch or "")]:
        document = replace(document, extra={**document.extra, "unknown_releases": unknown})
    return document, answers


def _answered(question: Question) -> tuple[Document, list[Explanation]]:
    configs, places = question.configs, question.places
    full, backends = question.full, question.backends
    if question.bisect is not None:
        return _bisected(question, question.bisect), []
    if len(places) > 1:
        matrices = [matrix(config, places, question.asked) for config in configs]
        return matrix_document(matrices, full=full, backends=backends), []
    single = len(configs) == 1
    if not places and not single:
        hint(f"asking PyTorch about {len(configs):,} configs")
    answers = explain_all(
        configs,
        places,
        backends=backends,
        advice=single or full or question.measure,  # a map wants none
        device=question.device,
        timeout_s=question.timeout_s,
        asked=question.asked,
    )
    if question.measure:
        _measure(answers, question)
    answers = with_store(answers, question.store)
    if single and places and places[0].device == "cuda" and question.asked == AUTO:
        answers = [replace(answers[0], prediction=_prediction(configs[0], places[0]))]
    if single:
        return explain_document(answers, full=full, named=backends), answers
    maps = draw_maps(
        [parse_config(answer.config) for answer in answers], list(map(chosen, answers))
    )
    return map_document(maps, answers, where=environment_text(answers[0]), full=full), answers


def _prediction(config: Config, place: Place) -> dict[str, Any] | None:
    """Time and best backend by the place's atlas; None without one, which is told of a GPU that has another."""
    from profharness.answers.atlas.catalog import timed  # loads numpy

    prediction, doubt = timed(config, str(place.gpu), place.machine)
    if doubt:
        hint(doubt)
    return prediction


def _bisected(question: Question, name: str) -> Document:
    places = question.places
    if len(places) > 1:
        raise UsageError("--bisect takes one release; give --torch a single one")
    asked = "" if question.asked == AUTO else f", {question.asked}"
    where = f"{places[0].text}, by rule{asked}" if places else "live"

    def choose(configs: Sequence[Config]) -> list[str]:
        nonlocal where
        if places:
            return choices_by_rule(configs, places[0], question.asked)
        hint(f"asking PyTorch about {len(configs):,} configs")
        answers = explain_all(
            configs,
            advice=False,
            device=question.device,
            timeout_s=question.timeout_s,
            asked=question.asked,
        )
        # which environment it is shows with the first answers only
        if where == "live":
            require_answer(answers)
            where = environment_text(answers[0])
        return list(map(chosen, answers))

    bisections = bisect_all(question.configs, name, choose)
    return bisect_document(bisections, where=where)


def _measure(answers: Sequence[Explanation], question: Question) -> None:
    """Capture the asked configs on `auto` and the advised ones on their backends."""
    # loads what runs workers, which only --measure needs
    from profharness.jobs import capture_into_store

    options = CaptureOptions(protocol=Protocol(device=question.device), kind="explain")
    jobs = to_measure(answers)
    if not jobs:
        hint("--measure: there is no advice to measure")
    for backends, configs in jobs.items():
        with capture_progress() as progress:
            capture_into_store(configs, backends, question.store, options, progress)
