"""Wrong input ends with exit code 2, and failures of the machine or of a tool with exit code 1."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from profharness.cli import cli
from profharness.errors import ProfharnessError

TRACES = Path(__file__).parents[2] / "traces"
CAPTURE = str(TRACES / "h200-torch2.11")
PROGRAM = str(TRACES / "models" / "llama_eager.json.gz")
BERT = str(TRACES / "models" / "bert_fp32.json.gz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of another program, a damaged atlas, and a file in place of a store."""
    made = tmp_path_factory.mktemp("inputs")
    (made / "text.db").write_text("no store at all" * 20)
    with sqlite3.connect(made / "other.db") as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    (made / "empty.db").write_bytes(b"")
    (made / "atlas.npz").write_bytes(b"PK\5\6" + bytes(18))
    return made


def invoke(folder: Path, *words: str) -> Result:
    store = () if "--store" in words or words[0] == "atlas" else ("--store", str(folder / "s.db"))
    return CliRunner().invoke(cli, [*words, *store])


@pytest.mark.parametrize(
    "words",
    [
        ("kernels", "2,8,512,65", CAPTURE),
        ("kernels", "2,8,512,64", CAPTURE, "--backend", "fa3"),
        ("analyze", "2,8,512,65", CAPTURE),
        ("bench", "2,8,512,65", "--run", CAPTURE),
        ("diff", "flash", "math", "2,8,512,65", CAPTURE),
        ("diff", CAPTURE, PROGRAM),
        ("layers", CAPTURE),
        ("ranks", PROGRAM),
        ("explain", "2,8,512,65", BERT),
        ("export", PROGRAM, "--profiler", "ncu"),
        ("kernels", "nosuch"),
        ("kernels", "--store", "none.db"),
        ("kernels", "--store", "FOLDER/text.db"),
        ("kernels", "--store", "FOLDER/other.db"),
        ("kernels", "--store", "FOLDER/empty.db"),
        ("kernels", "--store", "FOLDER"),
        ("ingest", PROGRAM, "--store", "FOLDER/none/s.db"),
        ("capture", "--resume", "nosuch", "--out", "FOLDER"),
        ("atlas", "merge", "FOLDER/atlas.npz", "-o", "FOLDER/out.npz"),
    ],
    ids=" ".join,
)
def test_wrong_input_has_exit_code_2(folder: Path, words: tuple[str, ...]) -> None:
    done = invoke(folder, *(word.replace("FOLDER", str(folder)) for word in words))
    code = getattr(done.exception, "exit_code", done.exit_code)
    assert code == 2, (done.output, done.exception)


def test_a_damaged_store_has_exit_code_1(folder: Path) -> None:
    assert invoke(folder, "ingest", PROGRAM, "--store", str(folder / "d.db")).exit_code == 0
    damaged = folder / "d.db"
    damaged.write_bytes(damaged.read_bytes()[:8192] + b"\xff" * 40000)
    done = invoke(folder, "kernels", "--store", str(damaged))
    assert isinstance(done.exception, ProfharnessError)
    assert done.exception.exit_code == 1, done.exception
