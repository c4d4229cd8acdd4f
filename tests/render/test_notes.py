"""Check that notes are sentences, and that all hints name commands in the same way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from profharness.cli import cli
from profharness.commands._answers import WARM_KERNELS
from profharness.render import terminal
from profharness.render.colors import STYLES
from profharness.render.document import Note, shown_note
from profharness.store import ingest_path

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "traces"
SOURCES = (
    *("models/whisper.json.gz", "models/bert_fp32.json.gz", "models/llama_eager.json.gz"),
    *("models/flex", "serving/eager.json.gz", "serving/shapes.json.gz", "h200-torch-nsys-ncu"),
)
END = re.compile(r"[.!?…:]$|[.!?] [(\[].*[)\]]$|(^|, use: )profharness [^`]*$")
TERM = re.compile("[a-z]+: ")
POINTER = re.compile(r"(\w+): (?:profharness [a-z]|\{shell_command)")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "store.db"
    for source in SOURCES:
        ingest_path(path, TRACES / source)
    return path


def is_sentence(text: str) -> bool:
    first = re.split("[ ,]", text)[0]
    return bool(END.search(text)) and (not re.fullmatch("[a-z]+", first) or first in STYLES)


@pytest.mark.parametrize("command", ["layers", "kernels", "explain", "analyze", "bench"])
def test_notes_of_commands_are_sentences(
    command: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: some notes ended with a full stop and others did not."""
    notes: set[Note] = set()
    printed = terminal._print_note
    monkeypatch.setattr(
        terminal, "_print_note", lambda *given: (notes.add(given[1]), printed(*given))
    )
    told = ""
    for source in SOURCES:
        run = Path(source).name
        result = CliRunner().invoke(cli, [command, run, "--store", str(store)])
        told += " ".join((*result.output.split(), str(result.exception or ""), ""))
    assert len(notes) > 1
    wrong = [
        note.text
        for note in notes
        if (not note.label or (note.level == "warning" and not TERM.match(note.text)))
        and not is_sentence(note.text)
    ]
    assert wrong == []
    assert not {note.label for note in notes} & {"caveat", "layout", "no time", "times"}
    assert {match[1] for match in POINTER.finditer(told)} <= {"use"}


@pytest.mark.parametrize(
    "given",
    [["kernels", "h200-torch-nsys-ncu"], ["layers", "llama_eager.json.gz", "--gpu", "H200"]],
)
def test_all_commands_describe_warm_kernel_times_alike(given: list[str], store: Path) -> None:
    """Bug: kernels and layers had two wordings of this note."""
    result = CliRunner().invoke(cli, [*given, "--store", str(store), "--format", "md"])
    assert f"- {WARM_KERNELS}" in result.output


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("kernels", "- **efficient, cudnn**: refused: head_dim=100 is not a multiple of 8\n"),
        ("kernels", "- **all-disabled**: refused: cudnn: head_dim=100 is not a multiple of 8\n"),
        (
            "bench",
            "- **cudnn**: refused on b2-h8-s512-d100-fp16: head_dim=100 is not a multiple of 8\n",
        ),
        (
            "report",
            "- **cudnn**: refused on b2-h8-s512-d100-fp16: head_dim=100 is not a multiple of 8\n",
        ),
    ],
)
def test_refusals_are_short_notes_on_the_backend(command: str, shown: str, store: Path) -> None:
    """Bug: kernels and bench printed PyTorch's message, and report a label with two colons."""
    run = "h200-torch-nsys-ncu"
    result = CliRunner().invoke(cli, [command, run, "--store", str(store), "--format", "md"])
    assert shown in result.output
    assert "should be a multiple" not in result.output and "Mem efficient" not in result.output


def test_a_refusal_has_the_message_of_pytorch_with_full(store: Path) -> None:
    given = ["kernels", "h200-torch-nsys-ncu", "--full", "--store", str(store)]
    assert "refused: head_dim should be a multiple of 8" in CliRunner().invoke(cli, given).output


def test_notes_of_golden_outputs_are_sentences() -> None:
    for path in (Path(__file__).parent / "golden").glob("*.md.txt"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("- ") and not line.startswith("- **"):
                assert is_sentence(line[2:]), line


def test_all_messages_name_a_command_in_the_same_way() -> None:
    """Bug: commands came after `why:`, `code:`, `show it with:` and `see them with:`."""
    for path in (ROOT / "profharness").rglob("*.py"):
        # Join the parts of strings that continue on the next line.
        text = re.sub(r'"\n +f?"', "", path.read_text(encoding="utf-8"))
        found = {match[1] for match in POINTER.finditer(text)}
        assert found <= {"use"}, (path, found)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the mask is unknown", "The mask is unknown."),
        ("flash is predicted to be slower", "flash is predicted to be slower."),
        ("sgl_kernel::op is not read", "sgl_kernel::op is not read."),
        ("score traffic: memory traffic", "Score traffic: memory traffic."),
        ("4 of 24 cells did not run: 4 refused", "4 of 24 cells did not run: 4 refused."),
        (
            "To see why, use: profharness explain a.json",
            "To see why, use: profharness explain a.json",
        ),
        ("add one with `profharness atlas add FILE`", "Add one with `profharness atlas add FILE`."),
        ("No block is busy. (measured)", "No block is busy. (measured)"),
    ],
)
def test_a_note_is_shown_as_a_sentence(text: str, shown: str) -> None:
    assert shown_note(Note(text)).text == shown
    assert shown_note(Note(text, "label", "warning")).text == shown
    assert shown_note(Note(f"mismatch: {text}", "label", "warning")).text == f"mismatch: {text}"
    assert shown_note(Note(text, "label")).text == text
