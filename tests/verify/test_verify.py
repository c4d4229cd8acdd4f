"""Real workers on the CPU: correct backends pass, each mistake fails under its own name, and a
backend that dies fails only its own check.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

from profharness.attention.cases import CASES, VerificationRow, failures
from profharness.attention.config import expand_configs
from profharness.commands.verify import verify_answer, verify_document
from profharness.errors import NotFoundError, UsageError
from profharness.jobs.into_store import verify_into_store
from profharness.recording.capture import capture
from profharness.render.document import Table
from profharness.run import CaptureOptions, Protocol, read_run
from profharness.store import Selection, ingest_path, open_store

# its fixtures are slow, so one process creates them once
pytestmark = pytest.mark.xdist_group("verify")

WRONG = Path(__file__).parent / "wrong.py"
# a CPU is slow for 1000 rows in half precision
QUICK = ",".join(name for name in CASES if name != "seq_1000")
PROTOCOL = Protocol(0, 0, 0, timeout_s=PATIENCE_S, device="cpu")


def rows_of(
    folder: Path,
    config: str,
    backends: list[str],
    cases: str = "none",
    *,
    grad: bool = False,
) -> list[VerificationRow]:
    options = CaptureOptions(
        out=folder / "runs", protocol=PROTOCOL, cases=tuple(cases.split(",")), grad=grad
    )
    names = [name if name in ("auto", "flash", "math", "naive") else f"{WRONG}:{name}"
             for name in backends]  # fmt: skip
    store = folder / "store.db"
    return verify_into_store(expand_configs(config), names, store, options)


def named(rows: list[VerificationRow], backend: str) -> dict[str, VerificationRow]:
    return {row.what: row for row in rows if row.backend.endswith(f":{backend}")}


@pytest.mark.parametrize(("dtypes", "cases"), [(("fp32",), "standard"), (("fp16", "bf16"), QUICK)])
def test_right_ones_pass_every_case(tmp_path: Path, dtypes: tuple[str, ...], cases: str) -> None:
    config = f"1,2,60,40,{{{','.join(dtypes)}}},causal"
    rows = rows_of(tmp_path, config, ["flash", "math", "naive"], cases, grad=True)
    assert not failures(rows), failures(rows)[0]
    for dtype in dtypes:
        own = [row for row in rows if f"-{dtype}-" in row.asked]
        assert {row.what for row in own} == {"inputs", "out", "dq", "dk", "dv"}
        assert len({row.case for row in own}) >= 14
        told = [row for row in own if row.what == "out" and row.passed]
        assert len(told) > 40
        assert all(row.error is not None and row.allowance for row in told)


# the error that a forward and backward call on this config leaves: (which result, a word in its
# message)
MISTAKES = {
    "no_scale": ("out", "no scale is applied (scale=1)"),
    "given_scale_ignored": ("out", "1/sqrt(head_dim) is used instead of the given scale"),
    "causal_off_by_one": ("out", "causal mask is one column too far right"),
    "kv_mapping": ("out", "query head h uses key head h % Hkv"),
    "last_row_unwritten": ("out", "not written: 256 of 25600 elements"),
    "nan_row": ("out", "NaN at [0, 0, 3, 0]"),
    "tail_of_keys": ("out", "the last 4 of 100 keys are left out"),
    "writes_input": ("inputs", "overwrites element 65 in the storage of the input key"),
    "stale": ("out", "the result is that of the previous call, although the inputs differ"),
    "accumulates": ("out", "two calls with the same inputs differ"),
    "shared_buffer": ("out", "a later call overwrote the result of an earlier call"),
    "unstable": ("out", "two calls with the same inputs differ"),
    "wrong_gradient": ("dk", "the result is 5.657 times the expected value"),
    "wrong_shape": ("out", "returned shape [2, 100, 4, 32]"),
}


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[VerificationRow]]:
    folder = tmp_path_factory.mktemp("mistakes")
    config = "2,4,100,32,fp32,causal,kv_heads=2,scale=0.3,bwd"
    others = ["right", "no_gradient", "refuses", "random_bits"]
    return folder, rows_of(folder, config, [*MISTAKES, *others])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_fails_under_its_name(
    mistaken: tuple[Path, list[VerificationRow]], mistake: str
) -> None:
    what, words = MISTAKES[mistake]
    told = named(mistaken[1], mistake)
    first = failures(told.values())[0]
    assert first.what == what
    assert words in str(first.message)


def test_a_wrong_gradient_leaves_the_rest_right(
    mistaken: tuple[Path, list[VerificationRow]],
) -> None:
    told = named(mistaken[1], "wrong_gradient")
    assert {what: row.passed for what, row in told.items()} == {
        "inputs": True, "out": True, "dq": True, "dk": False, "dv": True,
    }  # fmt: skip


def test_one_mistake_does_not_spill_over(mistaken: tuple[Path, list[VerificationRow]]) -> None:
    for name in ("right", "random_bits"):
        assert all(row.passed for row in named(mistaken[1], name).values())
    assert "not deterministic" in str(named(mistaken[1], "random_bits")["out"].message)
    assert named(mistaken[1], "writes_input")["out"].passed


def test_refusals_and_missing_gradients_are_skipped_with_their_reason(
    mistaken: tuple[Path, list[VerificationRow]],
) -> None:
    refused = named(mistaken[1], "refuses")["out"]
    assert (refused.passed, refused.status) == (None, "refused")
    assert "only on Tuesdays" in str(refused.message)
    told = named(mistaken[1], "no_gradient")
    assert told["out"].passed
    assert told["dk"].passed is None
    assert "has no gradient" in str(told["dk"].message)


def test_a_failure_says_where_and_by_how_much(
    mistaken: tuple[Path, list[VerificationRow]],
) -> None:
    row = named(mistaken[1], "no_scale")["out"]
    for words in (
        "at [",
        "expected ",
        "got ",
        "times the allowance of ",
        "elements exceed the allowance",
    ):
        assert words in str(row.message)
    assert row.error is not None and row.allowance is not None and row.error > row.allowance


def test_the_store_tells_who_is_wrong_and_a_new_ingest_the_same(
    mistaken: tuple[Path, list[VerificationRow]],
) -> None:
    folder, rows = mistaken
    (run,) = (folder / "runs").iterdir()
    ingest_path(folder / "again.db", run)
    with open_store(folder / "store.db") as store, open_store(folder / "again.db") as again:
        assert again.verifications(run.name) == rows
        wrong = store.wrong(run.name)
        assert again.wrong(run.name) == wrong
    names = {backend.rpartition(":")[2] for _, backend in wrong}
    assert names == set(MISTAKES)
    assert {label for label, _ in wrong} == {rows[0].config}


@pytest.mark.usefixtures("hanging")
def test_a_dying_and_a_hanging_one_cost_only_their_own_check(tmp_path: Path) -> None:
    backends = ["crashes", "hangs", "right"]
    rows = rows_of(tmp_path, "1,1,16,16,fp32", backends)
    assert [(row.what, row.passed, row.status) for row in rows] == [
        ("out", False, "crashed"),
        ("out", False, "timeout"),
        ("inputs", True, "ok"),
        ("out", True, "ok"),
    ]
    assert "SIGSEGV" in str(rows[0].message)
    assert {row.config for row in rows} == {"b1-h1-s16-d16-fp32"}


def test_an_odd_length_is_only_wrong_where_it_is_odd(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "1,2,64,16,{fp32,fp16,bf16}", ["tail_of_keys"], QUICK)
    with open_store(tmp_path / "store.db") as store:
        (run,) = (row.run for row in store.runs())
        named_wrong = store.wrong(run)
    for dtype in ("fp32", "fp16", "bf16"):
        asked = f"b1-h2-s64-d16-{dtype}"
        wrong = {row.case for row in failures(rows) if row.asked == asked}
        assert wrong == {"seq_127", "seq_129", "fewer_queries", "more_queries"}
        assert (asked, rows[0].backend) in named_wrong


def test_a_result_that_no_input_reaches_is_not_called_state(tmp_path: Path) -> None:
    """It reads the zeros before its inputs, so it returns the same zeros for any input."""
    rows = rows_of(tmp_path, "1,2,32,16,fp32", ["ignores_offset"], "large_offset")
    (wrong,) = failures(rows)
    assert wrong.case == "large_offset"
    told = str(wrong.message)
    assert "every element is 0, even for other inputs, so the inputs are ignored; expected " in told
    assert "state" not in told


def test_masked_rows_and_masks(tmp_path: Path) -> None:
    config = "2,2,40,16,fp32,mask={bool,float_bh},bwd"
    rows = rows_of(tmp_path, config, ["math", "flash", "right"], "masked_row")
    assert {row.case for row in rows} == {"as_given", "masked_row"}
    assert not failures(rows), failures(rows)[0]
    assert {row.passed for row in rows if row.backend == "math"} == {True}
    skipped = [row for row in rows if row.backend.endswith("right")]
    assert {(row.passed, row.status) for row in skipped} == {(None, "refused")}


def test_what_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"unknown case 'sqe_1'; choose from standard, none, as_given"
    ):
        rows_of(tmp_path, "1,1,16,16", ["math"], "sqe_1")
    with pytest.raises(UsageError, match="no config"):
        capture([], ["math"], CaptureOptions(out=tmp_path, protocol=PROTOCOL, cases=("none",)))
    assert not list(tmp_path.glob("runs/*"))


def test_a_verification_is_no_run_that_latest_means(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "1,1,16,16,fp32", ["math"])
    (folder,) = (tmp_path / "runs").iterdir()
    record = read_run(folder)
    assert [cell.status for cell in record.cells] == ["ok"]
    with open_store(tmp_path / "store.db") as store:
        for needs in ("run", "times", "kernels"):
            for configs in ([], expand_configs("1,1,16,16,fp32")):
                with pytest.raises(NotFoundError, match=r"^no stored run"):
                    store.find_run(Selection("latest", configs), needs)
        with pytest.raises(NotFoundError, match=f"profharness report {rows[0].run}"):
            store.resolve("latest")  # there is no other
        assert store.resolve(rows[0].run) == rows[0].run


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = ["--device", "cpu", "--cases", "none", *arguments]
    return subprocess.run(
        [sys.executable, "-m", "profharness", "verify", "--config", "1,2,20,16,fp32", *words],
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_the_command_exits_with_3_if_anything_is_wrong(tmp_path: Path) -> None:
    right = command(tmp_path, "--backend", "math", "--format", "json")
    assert right.returncode == 0, right.stderr
    told = json.loads(right.stdout)
    assert told["schema"] == "profharness.verify/1"
    assert [(row["what"], row["passed"]) for row in told["rows"]] == [
        ("inputs", True),
        ("out", True),
    ]
    (tmp_path / "mine.py").write_text(WRONG.read_text())
    wrong = command(tmp_path, "--backend", "math,mine.py:no_scale")
    assert wrong.returncode == 3
    assert "1 of 2 cases failed; wrong: mine.py:no_scale" in wrong.stderr
    assert "no scale is applied" in " ".join(wrong.stdout.split())


def test_answer_and_table_count_cases() -> None:
    """Bug: "All 136 checks pass. 51 checks could not run" counted checks and cases."""
    rows = [
        verification("cudnn", "standard", "out", True),
        verification("cudnn", "standard", "inputs", True),
        verification("flash", "standard", "out", None),
    ]
    assert verify_answer(rows) == (
        "The only case passes (2 checks).",
        "1 case of flash was refused.",
    )
    (table,) = [each for each in verify_document(rows).blocks if isinstance(each, Table)]
    assert [row[2:5] for row in table.rows] == [(1, 0, 0), (0, 0, 1)]
    rows.append(verification("math", "standard", "out", False))
    rows.append(verification("math", "standard", "inputs", True))
    assert verify_answer(rows)[0].startswith("1 of 2 cases failed; wrong: math.")


def verification(backend: str, case: str, what: str, passed: bool | None) -> VerificationRow:
    config = "b1-h4-s64-d64-fp16"
    status = "refused" if passed is None else "ok"
    return VerificationRow(
        *("r", config, config, case, backend, what, None, None, None, None, passed, None, status)
    )
