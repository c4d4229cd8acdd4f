"""`profharness explain`: why PyTorch takes the backend that it takes, and what would change that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from profharness.cli._options import (
    backend_option,
    capture_progress,
    config_options,
    emit,
    hint,
    output_options,
    read_configs,
    split_names,
    store_option,
)
from profharness.files import check_output

if TYPE_CHECKING:
    from profharness.answers.explain.model import Explanation
    from profharness.answers.explain.rules import Place
    from profharness.config import Config
    from profharness.views.document import Document


NAMED = ("flash", "efficient", "cudnn", "math")


@dataclass(frozen=True)
class _Asked:
    """What the command line asks for. places is empty where PyTorch itself is asked."""

    configs: list[Config]
    backends: tuple[str, ...]
    places: list[Place]
    bisect: str | None
    full: bool
    measure: bool
    device: str
    timeout_s: float
    store: Path


@click.command()
@config_options
@backend_option
@click.option(
    "--torch",
    metavar="RELEASES",
    help="Answer by rule for a release: 2.8, 2.9.1, 2.8,2.10 or a range 2.5..2.15.",
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
    type=click.FloatRange(min=0, min_open=True),
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
    releases a table that marks where the choice changes. --backend limits the advice.

    \b
    Examples:
      profharness explain --config 2,8,512,100,fp32,mask=bool
      profharness explain --config 2,8,512,64,bf16,causal --torch 2.8 --gpu "RTX A6000"
      profharness explain --config 2,8,512,64,bf16 --torch 2.5..2.15 --gpu H100
      profharness explain --config '2,8,{64:8192:*2},{64,80,96,128,256}' --torch 2.11 --gpu H200
      profharness explain --config 2,8,512,64,fp16 --bisect head_dim --torch 2.11 --gpu H200
    """
    check_output(output, force=force)
    backends = _backends(split_names(backend))
    configs = _configs(config, configs_file)
    by_rule = torch is not None or gpu is not None
    _check(by_rule, bisect=bisect, full=full, measure=measure, device=device)
    if bisect is not None:
        from profharness.answers.explain.maps import numeric

        numeric(bisect)
    from profharness.answers.explain.rules import named_places

    places = named_places(torch, gpu, cudnn, cuda, cudnn_compiled)
    if len(places) > 1 and bisect is not None:
        raise _usage("--bisect takes one release; give --torch a single one")
    asked = _Asked(configs, backends, places, bisect, full, measure, device, timeout_s, store)
    document, answers = _document(asked)
    emit(document, format_, output, force=force)
    if not places:
        from profharness.answers.explain.live import require_answer

        require_answer(answers)


def _document(asked: _Asked) -> tuple[Document, list[Explanation]]:
    """The result, and the answers that it is made of where PyTorch was asked one by one."""
    if asked.bisect is not None:
        return _bisected(asked), []
    if len(asked.places) > 1:
        from profharness.answers.explain.rules import matrix
        from profharness.views.explain import matrix_document

        found = [matrix(config, asked.places) for config in asked.configs]
        return matrix_document(found, full=asked.full), []
    answers = _answers(asked)
    if len(asked.configs) > 1:
        return _mapped(asked, answers), answers
    from profharness.views.explain import explain_document

    return explain_document(answers, full=asked.full, named=asked.backends), answers


def _answers(asked: _Asked) -> list[Explanation]:
    """One answer a config, with what the store adds; a map wants no advice."""
    from profharness.answers.explain.answer import explain_all, with_store

    if not asked.places and len(asked.configs) > 1:
        hint(f"asking PyTorch about {len(asked.configs):,} configs")
    found = explain_all(
        asked.configs,
        asked.places,
        backends=asked.backends,
        advice=len(asked.configs) == 1 or asked.full or asked.measure,
        device=asked.device,
        timeout_s=asked.timeout_s,
    )
    if asked.measure:
        _measure(found, asked)
    return with_store(found, asked.store)


def _mapped(asked: _Asked, answers: Sequence[Explanation]) -> Document:
    from profharness.answers.explain.maps import draw_maps
    from profharness.answers.explain.model import chosen, environment_text
    from profharness.config import parse_config
    from profharness.views.explain import map_document

    configs = [parse_config(answer.config) for answer in answers]
    maps = draw_maps(configs, [chosen(answer) for answer in answers])
    return map_document(maps, answers, where=environment_text(answers[0]), full=asked.full)


def _bisected(asked: _Asked) -> Document:
    from profharness.answers.explain.maps import bisect_all
    from profharness.views.explain import bisect_document

    assert asked.bisect is not None
    if asked.places:
        from profharness.answers.explain.rules import choices_by_rule

        place = asked.places[0]
        found = bisect_all(asked.configs, asked.bisect, lambda many: choices_by_rule(many, place))
        return bisect_document(found, where=f"{place.text}, by rule")
    from profharness.answers.explain.live import live_choices

    told: list[str] = []

    def choose(many: Sequence[Config]) -> list[str]:
        hint(f"asking PyTorch about {len(many):,} configs")
        choices, where = live_choices(
            many, device=asked.device, timeout_s=asked.timeout_s, required=not told
        )
        told.append(where)
        return choices

    found = bisect_all(asked.configs, asked.bisect, choose)
    return bisect_document(found, where=told[0] if told else "live")


def _measure(answers: Sequence[Explanation], asked: _Asked) -> None:
    """Capture the asked configs on `auto` and the advised ones on their backends."""
    from profharness.answers.explain.answer import to_measure
    from profharness.jobs import capture_into_store
    from profharness.run import Protocol
    from profharness.runner import CaptureOptions

    options = CaptureOptions(protocol=Protocol(device=asked.device))
    jobs = to_measure(answers)
    if not jobs:
        hint("--measure: there is no advice to measure")
    for backends, configs in jobs.items():
        with capture_progress() as progress:
            capture_into_store(configs, backends, asked.store, options, progress)


def _configs(config: Sequence[str], configs_file: Path | None) -> list[Config]:
    configs = read_configs(config, configs_file)
    if not configs:
        raise _usage("explain needs a config: --config 2,8,512,64,bf16, or --configs FILE")
    return configs


def _backends(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in NAMED:
            known = ", ".join(NAMED)
            raise _usage(f"--backend {name!r}: advice is on PyTorch's own backends: {known}")
    return names


def _check(by_rule: bool, *, bisect: str | None, full: bool, measure: bool, device: str) -> None:
    """Raise UsageError for options that contradict each other."""
    if measure and by_rule:
        raise _usage("--measure runs on this machine, --torch and --gpu mean another; choose one")
    if device != "auto" and by_rule:
        raise _usage("--device is where PyTorch is asked; with --torch or --gpu write --gpu cpu")
    if bisect is not None and (measure or full):
        raise _usage("--bisect asks for choices only; leave --measure and --full out")


def _usage(text: str) -> Exception:
    from profharness.errors import UsageError

    return UsageError(text)
