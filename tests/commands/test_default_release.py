"""Commands that answer for another GPU agree on a release of PyTorch, and print it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from profharness.atlas.predictions import known_atlases, release_for
from profharness.attention.dispatch import machine
from profharness.attention.dispatch.machine import Release
from profharness.cli import cli

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "traces" / "models" / "llama_prefill.json.gz"
NEWEST = max(machine.RELEASES)


@pytest.mark.parametrize(
    ("gpu", "installed", "release", "why"),
    [
        ("H200", "2.11.0+cu130", (2, 11, 0), "which is installed"),
        (
            "H200",
            "2.13.0",
            (2, 11, 0),
            "the newest release with an atlas for H200 (installed: PyTorch 2.13)",
        ),
        ("H200", None, (2, 11, 0), "the newest release with an atlas for H200; "),
        # Bug: nothing said that the installed release was only a default.
        ("H100", "2.9.1", (2, 9, 1), "which is installed"),
        (
            "H100",
            "2.99.0",
            NEWEST,
            "the newest release whose dispatch rules are known (installed: PyTorch 2.99)",
        ),
        (
            "H100",
            "2.4.1",
            NEWEST,
            "the newest release whose dispatch rules are known (installed: PyTorch 2.4.1)",
        ),
        ("H100", "2.14.0a0+git1", NEWEST, "the newest release whose dispatch rules are known; "),
        ("H100", None, NEWEST, "the newest release whose dispatch rules are known; "),
    ],
)
def test_commands_agree_on_a_release_and_print_it(
    gpu: str,
    installed: str | None,
    release: Release,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise machine.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(machine.metadata, "version", version)
    config = "2,8,512,64,bf16"
    for words in (
        ["explain", config],
        ["predict", config],
        ["kernels", "--config", config],
        ["layers", str(TRACE)],
        ["explain", str(TRACE)],
    ):
        if words[0] != "predict":
            words += ["--store", str(tmp_path / "s.db")]
        done = CliRunner().invoke(cli, [*words, "--gpu", gpu])
        assert done.exit_code == 0, done.stderr
        text = ".".join(map(str, release))
        shown = " ".join(done.output.split())
        assert f"torch {text}" in shown or f"PyTorch {text.removesuffix('.0')}" in shown, words
        reason = f"Using PyTorch {text.removesuffix('.0')}, {why}"
        told = " ".join(done.stderr.split())
        assert reason in told and "; specify another with --torch." in told, words
        # The output contains stderr and stdout, in the order in which they were written.
        before, _, _ = done.output.partition("Using PyTorch")
        assert before in ("", f"reading {TRACE}\n"), words


@pytest.mark.parametrize("gpus", ["H200,H100", "H100,H200"])
def test_all_gpus_of_a_call_get_one_release(
    gpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `predict` and `layers` used PyTorch 2.11 for the H200, and the installed 2.13 for the H100."""
    monkeypatch.setattr(machine.metadata, "version", lambda _: "2.13.0")
    stored = ["--store", str(tmp_path / "s.db")]
    for words in (
        ["explain", "2,8,512,64,bf16", *stored],
        ["predict", "2,8,512,64,bf16"],
        ["layers", str(TRACE), *stored],
    ):
        done = CliRunner().invoke(cli, [*words, "--gpu", gpus])
        assert done.exit_code == 0, done.stderr
        assert "Using PyTorch 2.11, the newest release with an atlas for H200" in done.stderr
        assert "2.11.0" in done.stdout and "2.13.0" not in done.stdout, words


def test_the_release_of_an_atlas_needs_no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a user's atlas of a newer release was not the default for its GPU."""
    monkeypatch.setattr(machine.metadata, "version", lambda _: "2.13.0")
    (entry,) = known_atlases()
    newer = replace(entry.atlas.machine, torch="2.99.0")
    own = replace(entry, atlas=replace(entry.atlas, machine=newer))
    assert release_for([own], ["H200"])[0] == (2, 99, 0)


def test_a_release_without_rules_for_one_gpu_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.metadata, "version", lambda _: "2.13.0")
    release, _ = release_for(known_atlases(), ["H200", "MI300X"])
    assert release in machine.known_releases("gfx942")
