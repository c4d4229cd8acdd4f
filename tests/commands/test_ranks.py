"""`profharness ranks` on jobs made from a real training step: it reports what is uneven, and
nothing else.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from make_ranks import Fleet, make_ranks, read

import profharness
from profharness.cli import cli
from profharness.commands.ranks import FIELDS
from profharness.commands.ranks.answer import ranks_answer
from profharness.commands.ranks.comparison import RankComparison
from profharness.commands.ranks.outliers import compare_ranks
from profharness.errors import GateError, NotFoundError, UsageError
from profharness.store import ingest_path, open_store
from profharness.store.ranks import rank_rows

MODELS = Path(__file__).parents[2] / "traces" / "models"
UNEVEN = Fleet(8, 1, slow={5: 1.05}, flash=(3,), fewer=(1,), driver=(6, 7))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store of two jobs: `uneven`, and `even`, the newest."""
    folder = tmp_path_factory.mktemp("jobs")
    trace = read()
    for name, fleet in (("uneven", UNEVEN), ("even", Fleet(6, 2))):
        make_ranks(trace, folder / name, fleet)
        ingest_path(folder / "s.db", folder / name)
    return folder


def compared(jobs: Path, name: str) -> RankComparison:
    with open_store(jobs / "s.db") as store:
        return compare_ranks(store, [str(jobs / name)])


def test_each_rank_that_is_uneven_is_named_for_what_it_is(jobs: Path) -> None:
    answer = compared(jobs, "uneven")
    assert {(each.code, each.ranks) for each in answer.findings} == {
        ("slow-gpu", ("rank 5",)),
        ("other-attention", ("rank 3",)),
        ("other-kernels", ("rank 1",)),
        ("other-software", ("rank 6", "rank 7")),
    }
    told = {each.code: each.sentence for each in answer.findings}
    assert (
        "kernels cudnn_bwd + flash, but 7 of 8 ranks ran cudnn + cudnn_bwd"
        in told["other-attention"]
    )
    assert "cuda_driver_version is 12080, but 13000 on most ranks" in told["other-software"]
    (slow,) = [row for row in answer.rows if row.findings == ("slow-gpu",)]
    assert slow.ratio == pytest.approx(1.05, abs=0.015)
    assert answer.world_size == 8 and answer.spread is not None and answer.spread < 0.02


def test_an_even_job_sets_no_rank_apart(jobs: Path) -> None:
    answer = compared(jobs, "even")
    assert [each.code for each in answer.findings] == []
    assert all(abs((row.ratio or 0) - 1) < 0.03 for row in answer.rows)


def test_the_answer_names_the_slow_rank_and_not_the_spread_of_the_others(
    jobs: Path, tmp_path: Path
) -> None:
    """Bug: four ranks, one 12 % slower, had a line "compute times spread by 0.0%"."""
    make_ranks(read(), tmp_path / "four", Fleet(4, 3, slow={2: 1.12}))
    store = ["--store", str(tmp_path / "s.db")]
    CliRunner().invoke(cli, ["ingest", str(tmp_path / "four"), *store])
    done = CliRunner().invoke(cli, ["ranks", *store])
    # Bug: `% idle` was of the span here, and of the steps in `layers`.
    assert "% idle of span" in done.stdout
    text = " ".join(done.stdout.split())
    slow = r"Rank 2 is slow: its kernels take 1\.1[123] times as long as on the other ranks; "
    assert re.match(slow + r"all 3 other ranks agree within [0-9.]+ %\. Ranks", text), text
    assert "spread" not in text
    even = CliRunner().invoke(cli, ["ranks", "--fail-on", "any", "--store", str(jobs / "s.db")])
    agree = r"All 6 ranks agree within [0-9.]+ %; no rank is slow\. All ranks ran the same kernels"
    assert re.match(agree, " ".join(even.stdout.split())), even.stdout
    passed = "gate passed: --fail-on any in 6 ranks: 6 ranks checked, none has this finding\n"
    assert even.stderr == passed
    uneven = ranks_answer(compared(jobs, "uneven"))
    assert uneven[0].startswith("Rank 5 is slow: its kernels take ")
    assert uneven[1] == (
        "Unlike most ranks, rank 3 ran other attention kernels, rank 1 launched other kernels and "
        "rank 6, rank 7 ran other software."
    )


def test_two_ranks_are_compared_with_each_other_and_not_with_most_ranks(tmp_path: Path) -> None:
    """Bugs: "unlike most ranks" of two ranks, "1 times", and one idle share as that of both."""
    for at, name in enumerate(("llama_eager", "llama_prefill")):
        shutil.copy(MODELS / f"{name}.json.gz", tmp_path / f"rank{at}.json.gz")
    shutil.copy(tmp_path / "rank1.json.gz", tmp_path / "rank2.json.gz")
    store = ["--store", str(tmp_path / "s.db")]
    done = CliRunner().invoke(cli, ["ranks", str(tmp_path), *store])
    text = " ".join(done.stdout.split())
    assert text.startswith("Both ranks agree within ")
    assert (
        "Unlike rank 0, rank 1 ran other attention kernels, launched other kernels and left the "
        "GPU idle for longer. Ranks 2 ranks; the GPUs are idle for a median of 66 % of their spans"
    ) in text
    assert "but rank 0 ran no attention kernel (in" in text
    assert "most ranks" not in text and "1 times" not in text and "1 time, not 5" in text
    assert (
        f"warning: {tmp_path / 'rank2.json.gz'} has the same content as "
        f"{tmp_path / 'rank1.json.gz'}, so it is used only once\n"
    ) in done.stderr


def test_the_answer_about_slow_ranks_counts_them_and_what_is_slow(jobs: Path) -> None:
    """Bugs: `1 other ranks are slow too`, and a rank with a slow kernel that `takes -2 % longer`."""
    even = compared(jobs, "even")

    def asked(ratios: Sequence[float], code: str, count: int) -> tuple[str, ...]:
        rows = [
            replace(row, ratio=ratio, findings=(code,) if at < count else ())
            for at, (row, ratio) in enumerate(zip(even.rows, ratios, strict=False))
        ]
        return ranks_answer(replace(even, rows=tuple(rows), findings=()))

    assert asked((1.1, 1.09, 1, 1), "slow-gpu", 2)[0] == (
        "Rank 0 is slow: its kernels take 1.10 times as long as on the other ranks, 1 other rank is slow too; all 2 "
        "other ranks agree within 0 %."
    )
    assert asked((0.98, 1, 1), "slow-kernels", 1)[0].startswith(
        "Rank 0 is slow: some of its kernels take longer than on the other ranks, and all together 1.00 times as long;"
    )
    assert asked((1,), "slow-gpu", 0) == ("The times of these ranks cannot be compared.",)


def test_shares_are_parts_of_the_span_and_ranks_that_wait_are_told(jobs: Path) -> None:
    """One rank is idle for a fifth longer, another reaches the all-reduce late."""
    with open_store(jobs / "s.db", write=True) as store:
        for row in compared(jobs, "even").rows:
            assert row.span_ns and row.idle_ns and row.collective_ns and row.exposed_ns
            assert row.idle_ns < row.span_ns and row.exposed_ns == row.collective_ns
        store.connection.execute("BEGIN")
        change = (
            "UPDATE device_times SET {} WHERE trace_id IN (SELECT t.id FROM traces t "
            "JOIN runs r ON r.id = t.run_id WHERE r.rank = ? AND r.path LIKE '%/even/%')"
        )
        store.connection.execute(change.format("busy_ns = busy_ns - (end_ns - start_ns) / 5"), (2,))
        for rank in range(6):
            taken = "collective_ns = (end_ns - start_ns) / ?2"
            store.connection.execute(
                change.format(taken).replace("= ? ", "= ?1 "), (rank, 50 if rank == 4 else 4)
            )
        answer = compare_ranks(store, [str(jobs / "even")])
        store.connection.execute("ROLLBACK")
    assert {(each.code, each.ranks) for each in answer.findings} == {
        ("waits", ("rank 2",)),
        ("late", ("rank 4",)),
    }


def test_a_single_slow_kernel_is_no_slow_gpu(jobs: Path) -> None:
    with open_store(jobs / "s.db", write=True) as store:
        store.connection.execute("BEGIN")
        store.connection.execute(
            "UPDATE launch_groups SET total_ns = total_ns * 5 WHERE by_op = 0 AND kernel_id IN "
            "(SELECT id FROM kernels WHERE family = 'cudnn_bwd') AND trace_id IN (SELECT t.id "
            "FROM traces t JOIN runs r ON r.id = t.run_id WHERE r.rank = 1 AND r.path LIKE '%/even/%')"
        )
        answer = compare_ranks(store, [str(jobs / "even")])
        store.connection.execute("ROLLBACK")
    (finding,) = answer.findings
    assert (finding.code, finding.ranks) == ("slow-kernels", ("rank 1",))
    assert "cudnn" in finding.sentence and "times as long" in finding.sentence


def test_the_command_takes_the_newest_job_and_gates_on_findings(jobs: Path) -> None:
    store = ["--store", str(jobs / "s.db")]
    run = CliRunner().invoke
    shown = run(cli, ["ranks", "--format", "json", *store])
    document = json.loads(shown.stdout)
    assert document["schema"] == "profharness.ranks/1" and document["findings"] == []
    assert [row["rank"] for row in document["rows"]] == list(range(6))
    assert set(document["rows"][0]) == set(FIELDS)
    for form in ("table", "csv", "md", "html"):
        assert (
            "rank 5" in run(cli, ["ranks", str(jobs / "uneven"), "--format", form, *store]).stdout
        )
    failed = run(cli, ["ranks", str(jobs / "uneven"), "--fail-on", "slow-gpu,late", *store])
    assert isinstance(failed.exception, GateError) and "rank 5" in str(failed.exception)
    assert run(cli, ["ranks", "--fail-on", "any", *store]).exit_code == 0
    assert isinstance(run(cli, ["ranks", "--fail-on", "slow", *store]).exception, UsageError)


def test_the_function_has_the_findings_beside_its_rows(jobs: Path) -> None:
    frame = profharness.ranks(jobs / "uneven", store=jobs / "s.db")
    assert list(frame.columns) == list(FIELDS) and len(frame) == 8
    assert {each["code"] for each in frame.attrs["findings"]} >= {"slow-gpu", "other-attention"}


def test_a_store_without_a_job_says_what_makes_one(jobs: Path, tmp_path: Path) -> None:
    with open_store(jobs / "s.db") as store:
        some = [row.run for row in rank_rows(store, [str(jobs / "uneven")])][:2]
        answer = compare_ranks(store, some)
        assert [row.label for row in answer.rows] == ["rank 0", "rank 1"]
        assert "the store lacks 6 of 8 ranks: 2, 3, 4, 5, 6, 7" in answer.findings[-1].sentence
    ingest_path(tmp_path / "s.db", jobs / "even" / "rank0.json")
    with (
        open_store(tmp_path / "s.db") as store,
        pytest.raises(
            NotFoundError, match="the only rank of its job in the store; `profharness ranks FOLDER"
        ),
    ):
        compare_ranks(store)


@pytest.mark.parametrize(
    "names",
    [
        ("unet", "llama_eager"),
        # Bug: most kernels of these models run in more than one of them, so one "rank was slow".
        ("llama_eager", "llama_prefill", "bert_fp32", "bert_autocast", "unet", "vit"),
    ],
)
def test_traces_of_unrelated_programs_are_not_ranks_of_one_job(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    for name in names:
        shutil.copy(MODELS / f"{name}.json.gz", tmp_path)
    done = CliRunner().invoke(
        cli, ["ranks", str(tmp_path), "--fail-on", "any", "--store", str(tmp_path / "s.db")]
    )
    assert isinstance(done.exception, UsageError) and not done.stdout
    told = str(done.exception)
    assert "probably do not come from the ranks of one job: no trace records its rank" in told
    assert "or use file names such as rank3.json" in told


def test_ranks_of_one_job_need_no_rank_numbers(tmp_path: Path) -> None:
    for path in make_ranks(read(), tmp_path, Fleet(4, 3, slow={2: 1.12})):
        trace = json.loads(path.read_text())
        del trace["distributedInfo"]
        path.with_name(path.name.replace("rank", "worker")).write_text(json.dumps(trace))
        path.unlink()
    ingest_path(tmp_path / "s.db", tmp_path)
    with open_store(tmp_path / "s.db") as store:
        answer = compare_ranks(store, [str(tmp_path)])
    assert ranks_answer(answer)[0].startswith("worker2.json is slow: its kernels take 1.1")
    assert "nothing shows that the traces come from one job" in answer.caveats[-1]


def test_most_ranks_are_not_unlike_most_ranks(tmp_path: Path) -> None:
    """Bug: `Unlike most ranks`, followed by the names of all ranks."""
    names = ("llama_eager", "llama_prefill", "llama_padded", "llama_graph", "llama_train")
    for name in names:
        ingest_path(tmp_path / "s.db", MODELS / f"{name}.json.gz")
    with open_store(tmp_path / "s.db") as store:
        answer = compare_ranks(store, [f"{name}.json.gz" for name in names])
    assert ranks_answer(answer)[1].startswith("Most ranks differ from each other: ")


def test_a_trace_without_ranks_is_no_job_with_its_neighbours(tmp_path: Path) -> None:
    """Bug: unrelated traces in the folder of a trace were taken for the ranks of its job."""
    for name in ("llama_train", "llama_eager", "unet"):
        ingest_path(tmp_path / "s.db", MODELS / f"{name}.json.gz")
    told = pytest.raises(NotFoundError, match=r"run llama_train\.json\.gz contains the only rank")
    with open_store(tmp_path / "s.db") as store, told:
        rank_rows(store, ["llama_train.json.gz"])
