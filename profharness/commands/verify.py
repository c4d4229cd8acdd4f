"""`profharness verify`: compare the results of backends with an fp64 reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from profharness.attention.cases import (
    CASES,
    NO_CASES,
    STANDARD,
    VerificationRow,
    by_case,
    case_verdict,
    failures,
)
from profharness.attention.config import require_configs, split_names
from profharness.columns import Column, pick
from profharness.commands._command import command, declaration_of, document, gate
from profharness.commands._options import Option
from profharness.commands._output import keep_measured, run_listener
from profharness.commands._types import (
    SEVERAL_VALUES,
    ConfigArguments,
    Device,
    GpuClasses,
    Insecure,
    Names,
    OutFolder,
    Scheduler,
    Seed,
    ShowProgress,
    Store,
    backend_names,
    backends_option,
    complete_names,
    config_list,
    fleet,
    store_path,
    timeout_option,
)
from profharness.errors import GateResult, counted, join_and
from profharness.files import RUNS_FOLDER
from profharness.render.document import (
    Block,
    Document,
    Heading,
    More,
    Note,
    Table,
    field_names,
    record,
)
from profharness.run import CaptureOptions, Protocol
from profharness.store import to_frame

if TYPE_CHECKING:
    import pandas as pd


SCHEMA = "profharness.verify/1"
FIELDS = field_names(VerificationRow)
SUMMARY = (
    Column("backend", "backend"),
    Column("verdict", "verdict", importance="answer"),
    *(Column(name, name, "count") for name in ("passed", "failed", "refused")),
    Column("other", "not run", "count", optional=True, meaning="cases that ran out of memory"),
    Column("worst", "error/allowance", "short"),
    Column("case", "largest in", shrink=True),
)
REFUSED = "refused"
NOT_CHECKED = {"oom": "out of memory", "ok": "not checked"}
"""Maps the status of a case to why a check has no verdict. All others were refused."""
SHOWN = 3  # maximum number of failed cases that are shown per backend without --full
VERDICTS = {True: "passed", False: "FAILED"}


def verify_document(rows: Sequence[VerificationRow], *, full: bool = False) -> Document:
    """Return the document of `verify`, with one table per config.

    If `full` is set, the document also has a table with a row for every check.
    """
    blocks: list[Block] = []
    for config, group in groupby(rows, key=lambda row: row.asked):
        checks = list(group)
        cases = len({row.case for row in checks})
        blocks.append(Heading(config, f"{counted(cases, 'case')} per backend, against fp64"))
        backends: dict[str, list[VerificationRow]] = {}
        for row in checks:
            backends.setdefault(row.backend, []).append(row)
        blocks.append(Table.of(SUMMARY, [_summary(*each) for each in backends.items()]))
        if full:
            lines = [({"passed": _verdict(row)}, row) for row in checks]
            blocks.append(Table.of(pick(VerificationRow), lines))
        for name, own in backends.items():
            blocks += _faults(name, failures(own), full)
        blocks += _remarks(checks)
    records = tuple(map(record, rows))
    told = verify_answer(rows)
    return Document(SCHEMA, "Verification", tuple(blocks), FIELDS, records, answer=told)


def verify_answer(rows: Sequence[VerificationRow]) -> tuple[str, ...]:
    """Return sentences on how many cases passed, which backends are wrong, and what did not run."""
    cases = by_case(rows)
    verdicts = {key: case_verdict(checks) for key, checks in cases.items()}
    done = sum(verdict is not None for verdict in verdicts.values())
    sentences = []
    if not done:
        sentences.append("Nothing was checked: all calls were refused or could not run.")
    elif failures(rows):
        first = failures(rows)[0]
        sentences.append(
            f"{failed_text(rows)}. The first: {first.case}, {first.what}: "
            f"{(first.message or '').rstrip('.')}."
        )
    else:
        checks = counted(sum(row.passed is not None for row in rows), "check")
        all_of = "The only case passes" if done == 1 else f"All {done:,} cases pass"
        sentences.append(f"{all_of} ({checks}).")
    others = [key for key, verdict in verdicts.items() if verdict is None]
    if done and others:
        names = join_and([*dict.fromkeys(backend for *_, backend in others)])
        refused = all(row.status == REFUSED for key in others for row in cases[key])
        verb = (
            "could not run"
            if not refused
            else "was refused"
            if len(others) == 1
            else "were refused"
        )
        sentences.append(f"{counted(len(others), 'case')} of {names} {verb}.")
    return tuple(sentences)


def failed_text(rows: Sequence[VerificationRow]) -> str:
    """Return how many cases failed, and on which backends: `1 of 4 cases failed; wrong: half.py`."""
    verdicts = {key: case_verdict(checks) for key, checks in by_case(rows).items()}
    wrong = [backend for (*_, backend), verdict in verdicts.items() if verdict is False]
    done = sum(verdict is not None for verdict in verdicts.values())
    names = join_and([*dict.fromkeys(wrong)])
    return f"{len(wrong)} of {counted(done, 'case')} failed; wrong: {names}"


def _faults(backend: str, rows: list[VerificationRow], full: bool) -> Iterator[Note | More]:
    cases = [(case, list(group)) for case, group in groupby(rows, key=lambda row: row.case)]
    shown = cases if full else cases[:SHOWN]
    for case, (first, *others) in shown:
        also = f"; also {', '.join(row.what for row in others)}" if others and not full else ""
        text = f"{case} ({first.config}), {first.what}: {first.message}{also}"
        yield Note(text, backend, "error")
        if full:
            for row in others:
                yield Note(f"{case}, {row.what}: {row.message}", backend, "error")
    if len(cases) > len(shown):
        more = ", ".join(case for case, _ in cases[len(shown) :])
        yield Note(f"also wrong in these cases: {more}", backend, "error")
        yield More("how these cases are wrong")


def _verdict(row: VerificationRow) -> str:
    """Return the verdict on a check, or why nothing was checked."""
    if row.passed is not None:
        return VERDICTS[row.passed]
    return NOT_CHECKED.get(row.status, REFUSED)


def _summary(backend: str, rows: list[VerificationRow]) -> dict[str, object]:
    cases = list(by_case(rows).values())
    verdicts = [case_verdict(checks) for checks in cases]
    passed, failed = verdicts.count(True), verdicts.count(False)
    refused = sum(
        verdict is None and _verdict(checks[0]) == REFUSED
        for verdict, checks in zip(verdicts, cases, strict=True)
    )
    other = len(cases) - passed - failed - refused
    verdict = "WRONG" if failed else "right" if passed else _verdict(rows[0])
    ratios = [
        (row.error / row.allowance, row.case)
        for row in rows
        if row.error is not None and row.allowance
    ]
    worst, case = max(ratios, default=(None, ""), key=lambda pair: pair[0])
    return {
        "backend": backend,
        "verdict": verdict,
        "passed": passed,
        "failed": failed,
        "refused": refused,
        "other": other or None,
        "worst": worst,
        "case": case,
    }


def _remarks(rows: list[VerificationRow]) -> Iterator[Note]:
    """Yield notes with the reasons for refused cases and the messages of passed checks.

    Cases with the same message share a note.
    """
    cases: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        if row.passed is None and row.message:
            key = f"{_verdict(row)}: ", row.message.removeprefix("skipped: ")
        elif row.passed and row.message:
            # Remove the number from the message, so that cases with the same message are merged.
            text = row.message.partition(" differ by up to")[0]
            key = "", f"passed, but {text.removesuffix(': two calls on the same inputs')}"
        else:
            continue
        cases.setdefault((row.backend, *key), {}).setdefault(row.case)
    every = {row.case for row in rows}
    for (backend, word, text), names in cases.items():
        listed = f"all {len(every)} cases" if len(every) > 1 and names.keys() == every else None
        yield Note(f"{word}{listed or ', '.join(names)}: {text}", backend)


Grad = Annotated[
    bool, Option(("--grad",), help="Also verify the gradients, as is done for configs with bwd.")
]
Cases = Annotated[
    Names | None,
    Option(
        ("--cases",),
        complete=complete_names(lambda: (STANDARD, NO_CASES, *CASES)),
        multiple=True,
        metavar="NAME",
        help="The cases to verify: standard, none (only the config itself) or names of cases. "
        f"{SEVERAL_VALUES}  [default: standard]",
    ),
]
VerifiedBackends = Annotated[Names | None, backends_option("all,kernels")]
Timeout = Annotated[float, timeout_option("Time limit of one case on one backend.")]
Full = Annotated[bool, Option(("--full",), help="Show every check, with its figures.")]


def _to_frame(rows: list[VerificationRow]) -> pd.DataFrame:
    return to_frame(rows, VerificationRow)


@command("verify", frame=_to_frame)
def verify(
    configs: ConfigArguments,
    backends: VerifiedBackends = None,
    *,
    grad: Grad = False,
    cases: Cases = None,
    timeout_s: Timeout = Protocol.timeout_s,
    seed: Seed = Protocol.seed,
    device: Device = Protocol.device,
    scheduler: Scheduler = None,
    gpu: GpuClasses = (),
    insecure: Insecure = False,
    out: OutFolder = RUNS_FOLDER,
    store: Store = None,
    progress: ShowProgress = None,
) -> list[VerificationRow]:
    """Check backends against an fp64 reference.

    The allowed error of a result is twice the error of plain attention in the same dtype on the
    same inputs. Each result is computed twice, once in memory filled with NaN and once in memory
    filled with other values. --cases standard also tests each config with odd lengths, different
    head counts, different layouts and extreme values. Wrong results are stored, but bench does not rank
    them.

    The exit code is 3 if any result is wrong. Refused calls are not failures.

    \b
    Example:
      profharness verify 1,4,256,64,causal --backend all,my.py:attention --grad
      profharness verify 2,8,512,64 --cases seq_1,large --format json

    In Python, the result has one row per check. `passed` is False for a wrong result and None for a
    refused check. Raise CaptureError if no worker starts.
    """
    # Imported here because --help does not need the code that runs workers.
    from profharness.jobs.into_store import verify_into_store

    chosen = config_list(configs)
    require_configs(chosen)
    protocol = Protocol(timeout_s=timeout_s, seed=seed, device=device)
    options = CaptureOptions(
        out=Path(out),
        protocol=protocol,
        fleet=fleet(scheduler, gpu, insecure, device),
        cases=split_names(cases) or ("standard",),
        grad=grad,
    )
    with run_listener(progress).progress() as show_progress:
        return verify_into_store(
            chosen, backend_names(backends), store_path(store), options, show_progress
        )


@document(verify)
def show(rows: list[VerificationRow], *, full: Full = False) -> Document:
    """Return the document that shows the results of the checks."""
    if rows:
        keep_measured("report", rows[0].run)
    return verify_document(rows, full=full)


@gate(verify)
def check(rows: list[VerificationRow]) -> list[GateResult]:
    """Return one result, which failed if a check found a wrong result."""
    done = sum(case_verdict(checks) is not None for checks in by_case(rows).values())
    passed = f"{counted(done, 'case')} checked, none is wrong"
    wrong = (failed_text(rows),) if failures(rows) else ()
    return [GateResult("verify", rows[0].run if rows else "", wrong, passed)]


DECLARATION = declaration_of(verify)
