"""Commands that answer for another GPU agree on a release of PyTorch, and print it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from profharness.attention.dispatch import machine
from profharness.attention.dispatch.machine import Release
from profharness.cli import cli

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "traces" / "models" / "llama_prefill.json.gz"
NEWEST = max(machine.RELEASES)


@pytest.mark.parametrize(
    ("gpu", "installed", "release", "why"),
    [
        ("H200", "2.11.0+cu130", (2, 11, 0), ""),
        (
            "H200",
            "2.13.0",
            (2, 11, 0),
            "the newest release with an atlas for H200 (installed: 2.13.0)",
        ),
        ("H200", None, (2, 11, 0), ""),
        ("H100", "2.9.1", (2, 9, 1), ""),
        (
            "H100",
            "2.99.0",
            NEWEST,
            "the newest release whose dispatch rules are known (installed: 2.99.0)",
        ),
        (
            "H100",
            "2.4.1",
            NEWEST,
            "the newest release whose dispatch rules are known (installed: 2.4.1)",
        ),
        ("H100", "2.14.0a0+git1", NEWEST, ""),
        ("H100", None, NEWEST, ""),
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
    ):
        if words[0] != "predict":
            words += ["--store", str(tmp_path / "s.db")]
        done = CliRunner().invoke(cli, [*words, "--gpu", gpu])
        assert done.exit_code == 0, done.stderr
        text = ".".join(map(str, release))
        assert f"torch {text}" in " ".join(done.output.split()), words
        assert (why in " ".join(done.stderr.split())) and bool(why) == (
            "Using PyTorch" in done.stderr
        )
