"""The help of all commands: its width, its examples and its legends."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from profharness.cli import COMMANDS, cli, find_command
from profharness.commands._help import HelpCommand, legend


def all_commands() -> Iterator[tuple[str, ...]]:
    """Yield the words of each command, and of each subcommand."""
    yield ()
    for name in COMMANDS:
        yield (name,)
        command = find_command(name)
        if isinstance(command, click.Group):
            yield from ((name, child) for child in command.commands)


ALL = [*all_commands()]


def help_of(*words: str, width: int = 80) -> str:
    return CliRunner().invoke(cli, [*words, "--help"], env={"COLUMNS": str(width)}).stdout


@pytest.mark.parametrize("words", ALL, ids=lambda words: " ".join(words) or "cli")
def test_help_fits_into_80_columns(words: tuple[str, ...]) -> None:
    """Bug: legends and examples had lines of up to 107 characters."""
    assert [line for line in help_of(*words).splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("words", ALL, ids=lambda words: " ".join(words) or "cli")
def test_help_has_no_text_on_python(words: tuple[str, ...]) -> None:
    """Bug: paragraphs that begin with "In Python," were also shown in the help."""
    assert "\n  In Python" not in help_of(*words)


def test_a_legend_continues_below_the_meaning() -> None:
    words = {"a-word": "many words " * 9, "b": "few words"}
    command = HelpCommand("any", help=legend(words))
    text = CliRunner().invoke(command, ["--help"], env={"COLUMNS": "60"}).stdout
    lines = text.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("  a-word  many"))
    assert lines[at + 1].startswith(f"{' ' * 10}words") and lines[at + 1][10] != " "
    assert "  b       few words" in lines


@pytest.mark.parametrize("width", [52, 60, 80])
def test_a_long_example_can_be_copied(width: int) -> None:
    example = "profharness bench '1,8,{256:4096:*2},64 and more' --backend all --baseline auto"
    command = HelpCommand("any", help=f"Time.\n\n\b\nExample:\n  {example}\n")
    text = CliRunner().invoke(command, ["--help"], env={"COLUMNS": str(width)}).stdout
    copied = text.partition("Example:\n")[2].partition("\n\n")[0]
    assert shlex.split(copied.replace("\\\n", "")) == shlex.split(example)
    assert "--backend \\" not in copied  # a value stays beside its option


def test_the_help_of_kernels_names_the_columns_of_a_program(tmp_path: Path) -> None:
    """Bug: it said "median µs/launch" for the table of a program, which has means."""
    trace = Path(__file__).parents[2] / "traces" / "models" / "llama_eager.json.gz"
    shown = CliRunner().invoke(cli, ["kernels", str(trace), "--store", str(tmp_path / "s.db")])
    _, _, told = " ".join(help_of("kernels").split()).partition("For a program's trace, ")
    columns = re.findall('"([^"]+)"', told.partition(" instead of ")[0])
    assert len(columns) == 3 and all(f"  {title}" in shown.stdout for title in columns)


def test_the_legend_of_layers_has_the_columns_of_the_table() -> None:
    """Bug: the legend had `self` and `cross` under phase, and no entry for attention."""
    from profharness.commands.layers import WORDS
    from profharness.commands.layers.tables import COLUMNS
    from profharness.program.phases import CROSS, SELF, TRAIN, shown_phase

    titles = [column.title for column in COLUMNS]
    assert list(WORDS) == sorted(WORDS, key=titles.index)
    assert str(shown_phase(TRAIN)) in WORDS["phase"]
    assert SELF not in WORDS["phase"] and CROSS not in WORDS["phase"]
    assert WORDS["attention"].startswith(f"{SELF}, {CROSS}")
