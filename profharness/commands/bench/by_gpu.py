"""Compare benchmarks of the same cells on several kinds of GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from profharness.columns import Column
from profharness.commands.bench.tables import bench_document
from profharness.device_types import device_name
from profharness.measurements.evaluation import BenchResult
from profharness.render.document import Block, Document, Heading, Note, Table, record

SHOWN = 3


def benches_by_gpu_document(
    answers: Sequence[BenchResult], *, explain: bool = False, raw: bool = False
) -> Document:
    """Return the document of `bench` for each GPU, and a table with one column per GPU.

    The rows are those of all runs. Further JSON keys are those of the first run, and `classes`. A
    single answer has its usual document.
    """
    documents = [bench_document(answer, explain=explain, raw=raw) for answer in answers]
    first = documents[0]
    if len(answers) < 2:
        return first
    blocks = [*chain.from_iterable(document.blocks for document in documents)]
    return Document(
        first.schema,
        f"Bench of runs {', '.join(answer.run for answer in answers)}",
        (*blocks, *gpu_blocks(answers)),
        first.fields,
        tuple(chain.from_iterable(document.records for document in documents)),
        {**first.extra, "classes": [gpu_record(answer) for answer in answers]},
    )


def on_several_gpus(answers: Sequence[BenchResult]) -> bool:
    """Return whether the answers have several devices, and some cell in common."""
    cells = [{(row.config, row.backend) for row in answer.rows} for answer in answers]
    alike = sum(map(len, cells)) > len(set(chain.from_iterable(cells)))
    return alike and len({_device(answer) for answer in answers}) > 1


def gpu_record(answer: BenchResult) -> dict[str, object]:
    """Return the JSON record of one GPU."""
    return {
        "run": answer.run,
        "device": _device(answer),
        "environment": answer.environment,
        "winners": [record(winner) for winner in answer.winners],
    }


def _device(answer: BenchResult) -> str:
    environment = answer.environment
    return device_name(environment) or answer.run


def gpu_blocks(answers: Sequence[BenchResult]) -> list[Block]:
    """Return the medians on each GPU, and speed-ups against the first one."""
    names = [_device(answer) for answer in answers]
    columns = [Column("config", "config", repeat=False), Column("backend", "backend")]
    columns += [Column(f"us{at}", f"{name} µs", "us") for at, name in enumerate(names)]
    columns += [
        Column(f"times{at}", f"speed-up of {name}", "ratio") for at, name in enumerate(names[1:], 1)
    ]
    medians = [
        {(row.config, row.backend): row.median_ns for row in answer.ranking_rows()}
        for answer in answers
    ]
    rows = []
    for cell in dict.fromkeys(chain.from_iterable(medians)):
        figures = [each.get(cell) for each in medians]
        base = figures[0]
        times = [base / other if base and other else None for other in figures[1:]]
        rows.append((*cell, *figures, *times))
    return [
        Heading("classes", f"{len(answers)} of them, medians of {answers[0].ranking}"),
        Table(tuple(columns), tuple(rows)),
        *(Note(text) for text in _other_winners(answers)),
    ]


def _other_winners(answers: Sequence[BenchResult]) -> list[str]:
    """Return sentences on the configs for which another backend is fastest than on the first GPU."""
    best = [{winner.config: winner for winner in answer.winners} for answer in answers]
    texts = []
    for answer, each in zip(answers[1:], best[1:], strict=True):
        both = [config for config in best[0] if config in each]
        # a backend without a significant difference from the fastest is not another choice
        apart = [
            config
            for config in both
            if each[config].backend != best[0][config].backend
            and best[0][config].backend not in (*each[config].ties, *each[config].open)
        ]
        examples = ", ".join(
            f"{config} ({best[0][config].backend}, there {each[config].backend})"
            for config in apart[:SHOWN]
        )
        texts.append(
            f"on {_device(answer)} another backend than on {_device(answers[0])} is the fastest for "
            f"{len(apart)} of {len(both)} configs{f': {examples}' if examples else ''}"
        )
    return texts
