"""Every command that reads runs accepts them as files, folders, names of files and ids."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from written_benches import bench_run

import profharness
from profharness.cli import cli
from profharness.errors import NotFoundError, UsageError
from profharness.store import open_store

TRACES = Path(__file__).parents[2] / "traces"
EAGER = TRACES / "models" / "llama_eager.json.gz"
PREFILL = TRACES / "models" / "llama_prefill.json.gz"
RUN = TRACES / "h200-torch2.11"
PROGRAM = (sys.executable, "-m", "profharness")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder without a store, with a trace and a run folder."""
    shutil.copy(EAGER, tmp_path / "trace.json.gz")
    shutil.copytree(RUN, tmp_path / "run")
    return tmp_path


def invoke(folder: Path, *arguments: str) -> Result:
    with contextlib.chdir(folder):
        return CliRunner().invoke(cli, arguments)


def stored(folder: Path) -> list[str]:
    with open_store(folder / "profharness.db") as store:
        return [row.name for row in store.runs()]


def test_a_copy_of_a_stored_benchmark_is_read(tmp_path: Path) -> None:
    name = bench_run(tmp_path / "profharness.db", "1", {("1,1,16,16,fp32", "math"): 1000})
    shutil.copytree(tmp_path / name, tmp_path / "copy")
    result = invoke(tmp_path, "bench", "copy")
    assert result.exit_code == 0, result.stderr
    assert "math takes 1.00 µs" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("layers", "trace.json.gz"),
        ("kernels", "trace.json.gz"),
        ("kernels", "run"),
        ("analyze", "trace.json.gz"),
        ("analyze", "run"),
        ("report", "trace.json.gz", "--format", "md"),
        ("report", "trace.json.gz", "run", "--format", "md"),
        ("export", "trace.json.gz"),
        ("bench", "run"),
        ("repro", "run", "--config", "2,8,512,64", "--backend", "flash"),
        ("diff", "trace.json.gz", str(PREFILL)),
        ("diff", "run:flash", "run:math"),
        ("ranks", "trace.json.gz", str(PREFILL)),
        ("kernels", "--run", "trace.json.gz"),
    ],
)
def test_a_path_is_ingested_once_and_answered(folder: Path, arguments: tuple[str, ...]) -> None:
    first = invoke(folder, *arguments)
    assert first.exit_code == 0, (first.output, first.exception)
    assert "reading " in first.stderr and "reading " not in first.stdout
    created = f"Created the store {folder / 'profharness.db'}; to choose another, use --store"
    assert first.stderr.count("Created the store") == 1 and created in first.stderr
    again = invoke(folder, *arguments)
    assert again.exit_code == 0 and "reading " not in again.stderr
    assert "Created" not in again.stderr
    assert again.stdout == first.stdout


def test_a_name_works_after_the_file_was_deleted(folder: Path) -> None:
    invoke(folder, "layers", "trace.json.gz")
    (folder / "trace.json.gz").unlink()
    rows = json.loads(invoke(folder, "layers", "trace.json.gz", "--format", "json").stdout)["rows"]
    shown = invoke(folder, "kernels", "trace.json.gz", "--format", "json")
    assert {row["run"] for row in json.loads(shown.stdout)["rows"]} == {rows[0]["run"]}
    listed = json.loads(invoke(folder, "runs", "--format", "json").stdout)["rows"]
    assert [(row["run"], row["name"]) for row in listed] == [(rows[0]["run"], "trace.json.gz")]


def test_a_path_that_no_longer_exists_says_so(folder: Path) -> None:
    """Bug: `layers PATH` answered from the store without a word about the missing file."""
    path = folder / "trace.json.gz"
    invoke(folder, "layers", str(path))
    path.unlink()
    done = invoke(folder, "layers", str(path))
    assert done.exit_code == 0 and "run trace.json.gz" in done.stdout
    assert done.stderr == (
        f"note: {path}: no such file or folder; the stored run with this name is used instead\n"
    )
    assert invoke(folder, "layers", "trace.json.gz").stderr == ""


def test_equal_file_names_are_told_apart_by_their_folders(folder: Path) -> None:
    for name, source in (("a", EAGER), ("b", PREFILL)):
        (folder / name).mkdir()
        shutil.copy(source, folder / name / "step.json.gz")
    invoke(folder, "layers", "a/step.json.gz")
    assert stored(folder) == ["step.json.gz"]
    invoke(folder, "layers", "b/step.json.gz")
    assert set(stored(folder)) == {"a/step.json.gz", "b/step.json.gz"}
    error = invoke(folder, "layers", "step.json.gz").exception
    assert isinstance(error, NotFoundError)
    assert "is ambiguous; choose from a/step.json.gz, b/step.json.gz" in str(error)
    shutil.rmtree(folder / "a")
    assert invoke(folder, "layers", "a/step.json.gz").exit_code == 0


def test_a_rewritten_file_is_another_run_of_the_same_name(folder: Path) -> None:
    (folder / "trace.json.gz").write_bytes(PREFILL.read_bytes())
    invoke(folder, "layers", "trace.json.gz")
    (folder / "trace.json.gz").write_bytes(EAGER.read_bytes())  # recorded later
    invoke(folder, "layers", "trace.json.gz")
    newest, oldest = stored(folder)
    assert newest == "trace.json.gz" and oldest.startswith("trace-")
    for name in (newest, oldest):
        assert invoke(folder, "layers", name).exit_code == 0


def test_printed_commands_use_the_id_if_the_name_is_another_file(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    shutil.copy(PREFILL, folder / "elsewhere" / "trace.json.gz")
    told = invoke(folder, "ingest", "elsewhere/trace.json.gz").stderr
    assert "To show the run, use: profharness layers trace-" in told
    (folder / "trace.json.gz").unlink()
    told = invoke(folder, "ingest", "elsewhere/trace.json.gz").stderr
    assert "To show the run, use: profharness layers trace.json.gz\n" in told


@pytest.mark.parametrize("command", ["kernels", "analyze", "repro"])
def test_a_config_may_be_an_argument_like_a_run(folder: Path, command: str) -> None:
    invoke(folder, "ingest", "run")
    for run in ((), ("latest",), ("run",)):
        backend = ("--backend", "flash")
        expected = invoke(folder, command, *run, "--config", "2,8,512,64", *backend)
        assert expected.exit_code == 0, expected.stderr
        assert invoke(folder, command, *run, "2,8,512,64", *backend).stdout == expected.stdout
        assert invoke(folder, command, "2,8,512,64", *run, *backend).stdout == expected.stdout


def test_bench_shows_the_times_of_a_config_given_as_an_argument(folder: Path) -> None:
    expected = invoke(folder, "bench", "run", "--config", "2,8,512,64").stdout
    assert expected and invoke(folder, "bench", "2,8,512,64", "run").stdout == expected


def test_a_file_with_the_name_of_a_config_is_a_run(folder: Path) -> None:
    (folder / "trace.json.gz").rename(folder / "2,8,512,64")
    assert "llama" not in invoke(folder, "kernels", "2,8,512,64").stderr
    assert stored(folder) == ["2,8,512,64"]


def test_python_takes_a_run_in_the_place_of_a_config(folder: Path) -> None:
    store = folder / "profharness.db"
    path = str(folder / "run")
    expected = profharness.kernels(run=path, store=store)
    (name,) = stored(folder)
    for given in (path, name, "latest"):
        assert profharness.kernels(given, store=store).equals(expected)
    chosen = profharness.kernels("2,8,512,64", store=store)
    assert 0 < len(chosen) < len(expected)
    assert profharness.kernels(run="2,8,512,64", store=store).equals(chosen)
    with pytest.raises(UsageError, match="'nonsense'"):
        profharness.kernels("nonsense", store=store)


@pytest.mark.parametrize("command", ["layers", "report", "ranks", "diff math"])
def test_a_config_in_the_place_of_a_run_names_other_commands(folder: Path, command: str) -> None:
    error = invoke(folder, *command.split(), "2,8,512,64").exception
    assert isinstance(error, UsageError)
    assert "profharness kernels 2,8,512,64" in str(error)
    assert "profharness explain 2,8,512,64" in str(error)
    assert not (folder / "profharness.db").exists()


def test_a_command_of_one_run_refuses_several(folder: Path) -> None:
    error = invoke(folder, "kernels", "run", "trace.json.gz").exception
    assert isinstance(error, UsageError)
    assert "to compare two runs, use: profharness diff run trace.json.gz" in str(error)
    error = invoke(folder, "kernels", ".").exception
    assert isinstance(error, UsageError) and "contains 2 runs; choose one of them: run" in str(
        error
    )
    assert not (folder / "profharness.db").exists()


def test_a_missing_file_is_named(folder: Path) -> None:
    error = invoke(folder, "layers", "no.json.gz").exception
    assert str(error) == "no.json.gz: no such file or folder"
    invoke(folder, "layers", "trace.json.gz")
    error = invoke(folder, "layers", "no.json.gz").exception
    assert str(error).startswith("no.json.gz: no such file or folder; no run 'no.json.gz' in")


def test_a_stored_backend_comes_before_a_folder_of_its_name(folder: Path) -> None:
    invoke(folder, "kernels", "run")
    shutil.copytree(folder / "run", folder / "flash")
    done = invoke(folder, "diff", "flash", "math", "--format", "json")
    assert json.loads(done.stdout)["baseline"].endswith(":flash")


def test_an_unreadable_trace_of_a_folder_is_left_out_with_a_warning(folder: Path) -> None:
    (folder / "job").mkdir()
    for source in (EAGER, PREFILL):
        shutil.copy(source, folder / "job")
    (folder / "job" / "bad.json").write_text("{")
    done = invoke(folder, "ranks", "job")
    assert done.exit_code == 0, done.exception
    assert "warning: left out: job/bad.json" in done.stderr


def test_python_functions_accept_paths(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "s.db"
    assert len(profharness.kernels(run=EAGER, store=store)) == len(
        profharness.kernels(run=EAGER.name, store=store)
    )
    assert list(profharness.layers(str(EAGER), store=store)["ran"]) == ["eager"]
    assert len(profharness.launches(EAGER, store=store)) == 194
    assert set(profharness.cells(RUN, store=store)["backend"]) >= {"flash", "math"}
    assert capfd.readouterr() == ("", "")


def test_ingest_names_the_command_that_fits(folder: Path) -> None:
    assert "To show the run, use: profharness layers trace.json.gz\n" in (
        invoke(folder, "ingest", "trace.json.gz").stderr
    )
    two = invoke(folder, "ingest", "trace.json.gz", str(PREFILL)).stderr
    command = "profharness diff trace.json.gz llama_prefill.json.gz"
    assert f"To compare the two programs, use: {command}\n" in two
    assert invoke(folder, *command.split()[1:]).exit_code == 0
    assert "profharness kernels run" in invoke(folder, "ingest", "trace.json.gz", "run").stderr


@pytest.mark.parametrize("arguments", ["layers", "kernels", "report --format md", "export"])
def test_a_trace_is_called_by_its_file_in_all_output(folder: Path, arguments: str) -> None:
    invoke(folder, "ingest", "trace.json.gz")
    done = invoke(folder, *arguments.split(), "trace.json.gz")
    assert done.exit_code == 0
    if arguments != "export":
        assert "trace-" not in done.stdout + done.stderr


def test_a_diff_names_both_files(folder: Path) -> None:
    done = invoke(folder, "diff", "trace.json.gz", str(PREFILL))
    assert "trace.json.gz → llama_prefill.json.gz" in done.stdout
    assert "trace-" not in done.stdout + done.stderr
    record = json.loads(
        invoke(folder, "diff", "trace.json.gz", str(PREFILL), "--format", "json").stdout
    )
    assert record["baseline_name"] == "trace.json.gz" and record["baseline"].startswith("trace-")


def test_a_run_is_deleted_by_the_name_of_its_file(folder: Path) -> None:
    invoke(folder, "ingest", "trace.json.gz")
    assert "deleted trace.json.gz" in invoke(folder, "runs", "--delete", "trace.json.gz").stderr
    assert stored(folder) == []


def test_an_mcp_tool_reads_no_file(folder: Path) -> None:
    pytest.importorskip("mcp")
    from profharness.commands._mcp import answer

    store = folder / "s.db"
    with contextlib.chdir(folder):
        invoke(folder, "ingest", str(PREFILL), "--store", str(store))
        for name, arguments in (
            ("layers", {"run": "trace.json.gz"}),
            ("kernels", {"run": str(folder / "run")}),
            ("diff", {"baseline": "trace.json.gz", "candidate": PREFILL.name}),
        ):
            with pytest.raises(NotFoundError, match="no run "):
                answer(name, arguments, store)
        rows = json.loads(answer("layers", {"run": PREFILL.name}, store))["rows"]
    assert rows and len(json.loads(answer("runs", {}, store))["rows"]) == 1


def test_a_mistyped_run_names_the_nearest(folder: Path) -> None:
    invoke(folder, "ingest", "run", "trace.json.gz")
    wrong = invoke(folder, "layers", "trase.json.gz")
    assert "did you mean trace.json.gz?" in str(wrong.exception)


def test_a_failed_gate_says_so(folder: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, "layers", "trace.json.gz", "--fail-on", "eager-attention"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(TRACES.parent)},
    )
    assert done.returncode == 3
    assert "\ngate failed: --fail-on eager-attention in trace.json.gz:\n  " in done.stderr


def test_a_copy_of_a_stored_trace_is_shown_under_the_name_that_was_given(folder: Path) -> None:
    """Bug: the second name of a file was ignored, and headings named the first."""
    shutil.copy(folder / "trace.json.gz", folder / "rank3.json.gz")
    assert "run trace.json.gz" in invoke(folder, "layers", "trace.json.gz").stdout
    copied = invoke(folder, "layers", "rank3.json.gz")
    assert "run rank3.json.gz" in copied.stdout
    assert "rank3" not in copied.stderr and "trace.json.gz" not in copied.stdout + copied.stderr
    assert "run trace.json.gz" in invoke(folder, "layers").stdout
    assert stored(folder) == ["trace.json.gz"]
    done = invoke(folder, "diff", "trace.json.gz", "rank3.json.gz")
    assert done.stderr.endswith("warning: both sides have the same content: rank3.json.gz\n")
    (folder / "trace.json.gz").unlink()
    assert "run rank3.json.gz" in invoke(folder, "layers", "rank3.json.gz").stdout
    with open_store(folder / "profharness.db") as store:
        (run,) = store.runs()
        assert run.rank == 3 and store.run_name(run.run) == "trace.json.gz"


def test_the_file_of_a_folder_does_not_rename_the_run(folder: Path) -> None:
    """Bug: each reading renamed the stored run to the folder or to the file, and printed a note."""
    both = "graph", "graph/decode.json.gz"
    shutil.copytree(TRACES / "serving/graph", folder / "graph")
    for text in (*both, *both):
        done = invoke(folder, "layers", text)
        assert f"run {Path(text).name} " in done.stdout
        assert "note" not in done.stderr and stored(folder) == ["graph"]
        (row, *_) = json.loads(invoke(folder, "layers", text, "--format", "json").stdout)["rows"]
        assert row["run_name"] == Path(text).name
    shutil.rmtree(folder / "graph")
    for name in ("graph", "decode.json.gz"):
        assert "run graph " in invoke(folder, "layers", name).stdout


def test_an_error_names_the_configs_of_the_run(folder: Path) -> None:
    """Bug: the error sent users to `runs`, which does not list configs."""
    error = invoke(folder, "kernels", "3,8,512,64", "run").exception
    assert isinstance(error, NotFoundError)
    assert "did you mean b2-h8-s512-d64-fp16? it also has b2-h8-s1024-d64" in str(error)
