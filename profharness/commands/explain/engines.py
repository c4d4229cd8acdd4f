"""Show which attention backend a serving engine selects, why not the others, and what to set."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from profharness.attention.config import Config
from profharness.attention.dispatch.rocm import AmdGpu
from profharness.attention.engines import ENGINES, Candidate, Selection, select
from profharness.columns import column, pick
from profharness.devices import Gpu, with_article
from profharness.errors import join_and
from profharness.render.document import Block, Document, Heading, Note, Table

SCHEMA = "profharness.engine/1"
RUNS, ACCEPTED, REFUSED, NOT_TRIED = "runs", "accepted", "refused", "not tried"
# SGLang's source says which backend is the default, not which others would work.
NOT_DEFAULT = "not default"
DEFAULTS_ONLY = frozenset({"sglang"})
SELECT = "--attention-backend"
# What a user can set for a layer: the field of Config, its values, and the option of the engine.
SETTINGS: dict[str, tuple[tuple[str, tuple[Any, ...], str], ...]] = {
    "vllm": (
        ("kv_dtype", (None, "fp8_e4m3"), "--kv-cache-dtype"),
        ("page", (None, 16, 32, 64, 128), "--block-size"),
        ("dtype", ("bf16", "fp16"), "--dtype"),
    ),
    "sglang": (),
}
OTHERS_UNKNOWN = (
    "SGLang's rules cover only its default backend; whether another backend works on this GPU is "
    "unknown until SGLang starts with that backend"
)
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "fp8"}


@dataclass(frozen=True)
class CandidateRow:
    """One candidate of one selection, as `explain --engine` shows it."""

    config: Annotated[str, column(meaning="the config")]
    engine: Annotated[str, column(meaning="vllm or sglang")]
    release: Annotated[str, column(meaning="the release of the engine")]
    gpu: Annotated[str, column(meaning="the GPU")]
    place: Annotated[
        int,
        column(
            "#",
            "count",
            importance="key",
            meaning="the backend's position in the order in which the engine tries backends",
        ),
    ]
    backend: Annotated[str, column("backend", importance="key", meaning="the engine's backend")]
    verdict: Annotated[
        str,
        column(
            "verdict",
            importance="answer",
            meaning="`runs`, `accepted` or `refused`; for SGLang `runs`, `not default`, or `not tried` "
            "after the one that runs",
        ),
    ]
    reason: Annotated[
        str, column("first reason against it", wrap=True, meaning="in the engine's words")
    ]
    setting: Annotated[
        str, column("options that select this backend", wrap=True, meaning="options of the engine")
    ]
    since: Annotated[
        str,
        column(
            "rules since",
            importance="detail",
            meaning="the first engine release to which these rules apply",
        ),
    ]
    reasons: Annotated[tuple[str, ...], column(meaning="all reasons against it")]


@dataclass(frozen=True)
class ReleaseRow:
    """Consecutive releases that make the same choice."""

    releases: Annotated[
        str, column("releases", importance="key", meaning="the releases that agree")
    ]
    choice: Annotated[str, column("runs", importance="answer", meaning="the selected backend")]
    accepted: Annotated[str, column("would also run", wrap=True, meaning="other accepted backends")]
    refused: Annotated[
        str,
        column(
            "not selected (first reason)",
            wrap=True,
            meaning="backends that the engine refuses, or that are not its default",
        ),
    ]


def _place(gpu: Gpu | AmdGpu) -> tuple[int, int] | str:
    """Return the key of a GPU in the rules: its compute capability, or an AMD GPU's architecture."""
    return gpu.architecture if isinstance(gpu, AmdGpu) else gpu.capability


FIELDS = tuple(CandidateRow.__dataclass_fields__)


def selections_of(
    engine: str, releases: Sequence[str], configs: Sequence[Config], gpu: Gpu | AmdGpu
) -> list[Selection]:
    """Return the selection for each config and release. Raise UsageError if no rule covers the GPU."""
    return [
        select(engine, release, config, gpu.name, _place(gpu))
        for config in configs
        for release in releases
    ]


def candidate_rows(selection: Selection, config: Config, gpu: Gpu | AmdGpu) -> list[CandidateRow]:
    """Return a row for each candidate, in the order in which the engine tries them."""
    return [
        CandidateRow(
            config=selection.config,
            engine=selection.engine,
            release=selection.release,
            gpu=selection.gpu,
            place=place,
            backend=each.backend,
            verdict=_verdict(selection, each),
            reason=each.reasons[0] if each.reasons else "",
            setting=_setting(selection, each, config, gpu),
            since=each.since,
            reasons=each.reasons,
        )
        for place, each in enumerate(selection.candidates, 1)
    ]


def _verdict(selection: Selection, candidate: Candidate) -> str:
    if candidate.backend == selection.chosen:
        return RUNS
    if selection.engine in DEFAULTS_ONLY:
        return NOT_DEFAULT if candidate.reasons else NOT_TRIED
    return REFUSED if candidate.reasons else ACCEPTED


def _setting(selection: Selection, candidate: Candidate, config: Config, gpu: Gpu | AmdGpu) -> str:
    """Return the engine's options with which the candidate runs. Return "" if none are known."""
    if candidate.backend == selection.chosen:
        return ""
    if not candidate.reasons or selection.engine in DEFAULTS_ONLY:
        return f"{SELECT} {candidate.backend}"
    for field, values, option in SETTINGS[selection.engine]:
        for value in values:
            changed = replace(config, **{field: value})
            other = select(selection.engine, selection.release, changed, gpu.name, _place(gpu))
            found = next((e for e in other.candidates if e.backend == candidate.backend), None)
            if found is not None and not found.reasons:
                text = "auto" if value is None else DTYPE_NAMES.get(value, str(value))
                # No value of the option leaves the page size unset.
                first = f"no {option}" if field == "page" and value is None else f"{option} {text}"
                more = "" if other.chosen == candidate.backend else f" {SELECT} {candidate.backend}"
                return f"{first}{more}"
    return ""


def engine_document(
    selections: Sequence[Selection],
    configs: Sequence[Config],
    gpu: Gpu | AmdGpu,
    *,
    full: bool = False,
) -> Document:
    """Return the document of `explain --engine`.

    `selections` contains those of all releases for the first config, then for the second, and so
    on. For one release, the document lists the candidates. For several, it has a table in which
    releases with equal choices share a row.
    """
    blocks: list[Block] = []
    records: list[dict[str, Any]] = []
    told: list[str] = []
    groups = itertools.groupby(selections, key=lambda each: each.config)
    for config, (_, group) in zip(configs, groups, strict=True):
        found = list(group)
        rows = [candidate_rows(each, config, gpu) for each in found]
        records += [asdict(row) for each in rows for row in each]
        name = ENGINES[found[0].engine]
        if len(found) == 1:
            told.append(_sentence(found[0]))
            blocks += [Heading(config.label, f"{name} {found[0].release}, {gpu.name}")]
            blocks += _candidates(rows[0], full=full)
        else:
            spans = list(_spans(found))
            told.append(_history(spans))
            blocks += [Heading(config.label, f"{name} by release, {gpu.name}")]
            blocks.append(Table(pick(ReleaseRow), tuple(_history_row(span) for span in spans)))
        doubts = dict.fromkeys(text for each in found for text in each.doubts)
        blocks += [Note(text, level="warning") for text in doubts]
    if selections[0].engine in DEFAULTS_ONLY:
        blocks.append(Note(OTHERS_UNKNOWN, level="warning"))
    answer = tuple(told) if len(told) <= 2 else (_several(selections),)
    return Document(
        SCHEMA, "Backend of a serving engine", tuple(blocks), FIELDS, tuple(records), answer=answer
    )


def _candidates(rows: Sequence[CandidateRow], *, full: bool) -> Iterator[Block]:
    yield Table.of(
        pick(CandidateRow, "place", "backend", "verdict", "reason", "setting", "since"), rows
    )
    if full:
        for row in rows:
            if len(row.reasons) > 1:
                yield Note("; ".join(row.reasons), row.backend)


def _named(selection: Selection) -> str:
    if selection.chosen is None:
        return "no backend"
    return f"{selection.chosen} ({selection.variant})" if selection.variant else selection.chosen


def _sentence(selection: Selection) -> str:
    """Return the sentence for one release, such as `vLLM 0.25.1 runs FLASH_ATTN on an H100`."""
    name = f"{ENGINES[selection.engine]} {selection.release}"
    named = not selection.gpu.startswith("sm")
    where = f"on {with_article(selection.gpu) if named else f'SM {selection.capability}'}"
    if selection.chosen is None:
        if selection.engine in DEFAULTS_ONLY:
            return f"{name} has no default backend for this config {where}."
        return f"{name} refuses this config {where}: no candidate can run it."
    told = f"{name} runs {_named(selection)} {where}"
    before = list(
        itertools.takewhile(lambda e: e.backend != selection.chosen, selection.candidates)
    )
    if before:
        reasons = join_and([f"{each.backend} ({each.reasons[0]})" for each in before[:3]])
        if selection.engine in DEFAULTS_ONLY:
            return f"{told}, its default there. {name} does not select {reasons}."
        told += f", because it refuses {reasons}"
    return f"{told}."


def _spans(selections: Sequence[Selection]) -> Iterator[list[Selection]]:
    """Yield groups of selections of consecutive releases whose table rows are equal."""
    for _, group in itertools.groupby(selections, key=lambda each: _history_row([each])[1:]):
        yield list(group)


def _span_text(span: Sequence[Selection]) -> str:
    first, last = span[0].release, span[-1].release
    return first if first == last else f"{first} to {last}"


def _history_row(span: Sequence[Selection]) -> tuple[str, ...]:
    last = span[-1]
    accepted = [each.backend for each in last.candidates if _verdict(last, each) == ACCEPTED]
    refused = [f"{each.backend} ({each.reasons[0]})" for each in last.candidates if each.reasons]
    return _span_text(span), _named(last), ", ".join(accepted), "; ".join(refused)


def _history(spans: Sequence[Sequence[Selection]]) -> str:
    """Return a sentence on the releases between which the choice changed."""
    first, last = spans[0][0], spans[-1][-1]
    name = ENGINES[first.engine]
    runs = [list(group) for _, group in itertools.groupby(spans, key=lambda span: _named(span[0]))]
    if len(runs) == 1:
        return f"{name} {first.release} to {last.release} all run {_named(first)}."
    texts = []
    for group in runs:
        start, end = group[0][0].release, group[-1][-1].release
        span = f"in {start}" if start == end else f"from {start} to {end}"
        texts.append(f"{_named(group[0][0])} {f'from {start} on' if group is runs[-1] else span}")
    return f"{name} runs {join_and(texts)}."


def _several(selections: Sequence[Selection]) -> str:
    counts = Counter(map(_named, selections))
    texts = [f"{name} for {count:,}" for name, count in counts.items()]
    return f"{ENGINES[selections[0].engine]} runs {join_and(texts)} of {len(selections):,} cases."
