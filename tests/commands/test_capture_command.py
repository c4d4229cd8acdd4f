"""`profharness capture`: what goes together, a run and its resumption; on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from profharness.cli import cli
from profharness.jobs.into_store import EVERYDAY, everyday_configs
from profharness.run import read_run, write_run

QUICK = ("--device", "cpu", "--samples", "2", "--iterations", "1", "--warmup", "0")


def capture(folder: Path, *arguments: str) -> Result:
    """The command with its run folders and its store below a folder."""
    places = ("--store", str(folder / "s.db"), "--out", str(folder / "runs"))
    return CliRunner().invoke(cli, ["capture", *places, *arguments])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("--resume", "x", "--config", "1,1,16,16"),
            "cannot be combined with --config, --configs, --backend or --python",
        ),
        (
            ("--resume", "x", "--backend", "math"),
            "cannot be combined with --config, --configs, --backend or --python",
        ),
        (("--resume", "x"), "cannot find the run folder 'x'"),
        (("--config", "1,1,16,16", "--metrics", "m"), "require --profiler ncu"),
        (
            ("--config", "1,1,16,16", "--section", "S", "--profiler", "nsys"),
            "require --profiler ncu",
        ),
    ],
)
def test_what_does_not_go_together_starts_nothing(
    tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    done = capture(tmp_path, *arguments)
    assert done.exit_code != 0
    assert told in str(done.exception) + done.output
    assert list(tmp_path.iterdir()) == []


def test_without_a_config_it_runs_the_everyday_set(tmp_path: Path) -> None:
    done = capture(tmp_path, "--backend", "auto", "--profiler", "events", *QUICK)
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "runs").iterdir()
    cells = read_run(folder).cells
    assert [str(cell.config) for cell in cells] == [line.split()[-1] for line in told(done)]
    assert {cell.status for cell in cells} == {"ok"}


def told(done: Result) -> list[str]:
    """The lines of the everyday set."""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("No config was given") and "--config" in lines[0]
    return [line for line in lines if line.startswith("  ")]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_everyday_set_has_every_use(device: str) -> None:
    configs = everyday_configs(device).values()
    assert len({*configs}) == len(EVERYDAY)
    assert any(config.bwd for config in configs)
    assert any(config.seq_len_q == 1 for config in configs)
    assert any(config.mask != "none" for config in configs)
    assert any(config.num_kv_heads != config.num_heads for config in configs)


def test_a_run_and_the_rest_of_it(tmp_path: Path) -> None:
    done = capture(tmp_path, "--config", "1,1,16,16", "--backend", "math", "--note", "n", *QUICK)
    assert done.exit_code == 0, done.output
    assert ": 1 cell ran; in " in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    run = read_run(folder)
    assert (run.note, run.profilers, run.protocol.samples) == ("n", ("torch",), 2)

    pending = [type(cell)(cell.cell, cell.config, cell.backend) for cell in run.cells]
    write_run(folder, type(run)(run.run, run.created, run.profilers, run.protocol, tuple(pending)))
    (folder / "journal.jsonl").unlink(missing_ok=True)
    again = capture(tmp_path, "--resume", "latest")
    assert again.exit_code == 0, again.output
    assert [cell.status for cell in read_run(folder).cells] == ["ok"]
