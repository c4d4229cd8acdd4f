"""No text of a file or an argument reaches the terminal with anything that a terminal obeys."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from waiting import PATIENCE_S

from profharness.cli import COMMANDS, cli
from profharness.errors import one_line, printable, printable_path

ROOT = Path(__file__).parents[2]
# a test reads the store that another one makes
pytestmark = pytest.mark.xdist_group("hostile")
RUN = ROOT / "traces" / "h200-torch2.11"
PROGRAM = ROOT / "traces" / "models" / "llama_eager.json.gz"
# CSI and OSC sequences, C0 and C1, DEL, line ends of other kinds, bidirectional marks, isolates and
# embeddings, invisible signs, tag characters, private use
HOSTILE = (
    "\x1b[31m\x1b]0;title\x07\x1bc\x9b2J\x9d0;t\x9c\r\x08\x0b\x0c\x7f\x85\u2028\u2029\u202e\u202a"
    "\u2066\u2069\u200e\u200f\u061c\u200b\u2060\ufeff\xad\U000e0041\ue000"
)
READING: tuple[tuple[str, ...], ...] = (
    *(("kernels", "--run", "all", "--format", name) for name in ("json", "jsonl", "html")),
    ("kernels", "--run", "all", "--full"),
    ("kernels", "--run", "CAPTURED", "--format", "csv"),
    ("runs", "--format", "json"),
    ("runs",),
    ("diff", "flash", "math"),
    ("bench", "--run", "CAPTURED"),
    ("analyze", "--run", "CAPTURED"),
    ("analyze", "--run", "PROGRAM"),
    ("layers", "PROGRAM"),
    ("layers", "PROGRAM", "--gpu", "H200"),
    ("layers", "PROGRAM", "PROGRAM"),
    ("report", "CAPTURED", "PROGRAM"),
    ("ranks", "CAPTURED", "PROGRAM"),
    ("explain-kernel", f"flash_fwd{HOSTILE}kernel"),
    ("explain", "--config", "2,8,512,64", "--torch", "2.11", "--gpu", "H200"),
)
OTHERS: tuple[tuple[str, ...], ...] = (
    ("ingest", f"no{HOSTILE}.json"),
    ("kernels", "--run", f"no{HOSTILE}"),
    ("kernels", "--config", f"2,8,512,64,{HOSTILE}"),
    ("kernels", "--run", "latest", "--backend", f"no{HOSTILE}"),
    ("kernels", f"--no{HOSTILE}"),
    ("kernels", "--configs", f"no{HOSTILE}"),
    (f"no{HOSTILE}",),
    ("runs", "-o", f"no{HOSTILE}/x.md"),
    ("runs", "-o", f"{HOSTILE}.md"),
    ("layers", "PROGRAM", "--expect", f"{HOSTILE}=flash"),
    ("layers", "PROGRAM", "--fail-on", "math-fallback"),
    ("kernels", "--run", "CAPTURED", "--expect", "math"),
    ("capture", "--resume", f"no{HOSTILE}"),
    ("capture", "--config", "1,1,16,8", "--backend", f"{HOSTILE}.py"),
    ("predict", "--config", "2,8,512,64", "--gpu", f"no{HOSTILE}"),
    ("export", "CAPTURED", "-o", f"{HOSTILE}.json"),
    ("repro", "--run", "CAPTURED", "--config", "2,8,512,64", "--backend", "flash"),
    ("scrub", "--check", f"hostile{HOSTILE}"),
    ("scrub", "CAPTURED", "-o", f"copy{HOSTILE}"),
    ("atlas", "add", f"no{HOSTILE}"),
    ("lane", f"no{HOSTILE}"),
    ("new-kernel", "mine", "--out", f"new{HOSTILE}"),
)
DRIVER = """
import json, sys
from profharness.cli import main
for words in json.load(sys.stdin):
    sys.argv = ["profharness", *words]
    try:
        main()
    except SystemExit:
        pass
"""


def hostile(value: Any, keys: tuple[str, ...], inside: bool = False) -> Any:
    """A JSON tree whose texts below some of the keys end with all that a terminal obeys."""
    if isinstance(value, dict):
        return {key: hostile(item, keys, inside or key in keys) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, keys, inside) for item in value]
    return f"{value}{HOSTILE}" if inside and isinstance(value, str) else value


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of a hostile run and a hostile program, both from hostile names."""
    root = tmp_path_factory.mktemp("hostile")
    folder = root / f"hostile{HOSTILE}"
    folder.mkdir()
    run = json.loads((RUN / "run.json").read_text())
    for number, cell in enumerate(run["cells"]):
        if number % 3 == 0:
            refusals = [{"code": "mask", "message": "why"}] if number % 2 else []
            cell |= {"status": "refused" if refusals else "error", "message": "it failed"}
            cell |= {"refusals": refusals, "warnings": ["a warning"]}
        else:
            cell["warnings"] = ["a warning"]
    run["problems"] = [{"profiler": "ncu", "code": "x", "message": "why", "remedy": "what"}]
    keys = ("message", "warnings", "note", "gpu", "cpu", "driver", "platform", "problems", "python")
    (folder / "run.json").write_text(json.dumps(hostile(run, keys)))
    for path in RUN.glob("*.json.gz"):
        (folder / path.name).write_bytes(named_hostile(path))
    program = root / f"program{HOSTILE}.json.gz"
    program.write_bytes(named_hostile(PROGRAM))
    return root


def named_hostile(path: Path) -> bytes:
    """A Kineto trace whose kernels, ranges, Python frames and devices have hostile names."""
    tree = json.loads(gzip.decompress(path.read_bytes()))
    for event in tree["traceEvents"]:
        name = str(event.get("name"))
        if name.startswith("nn.Module: "):
            event["name"] = name.replace("nn.Module: ", f"nn.Module: A{HOSTILE}")
        elif event.get("cat") in ("kernel", "user_annotation", "python_function"):
            event["name"] = name if name.startswith("profharness:") else f"{name}{HOSTILE}"
    devices = hostile(tree.get("deviceProperties", []), ("name",))
    return gzip.compress(json.dumps(tree | {"deviceProperties": devices}).encode())


@pytest.fixture(scope="module")
def commands(place: Path) -> list[list[str]]:
    """What is run in the place, after both sources are in the store."""
    names = {"CAPTURED": json.loads((RUN / "run.json").read_text())["run"], "PROGRAM": "latest"}
    sources = [path.name for path in place.iterdir()]
    everything = [["ingest", source] for source in sorted(sources)]
    for words in READING:
        formats = () if "--format" in words else ("table", "md")
        everything += [[*words, "--format", name] for name in formats] or [[*words]]
    everything += [*map(list, OTHERS), *([name, "--help"] for name in COMMANDS)]
    return [[names.get(word, word) for word in words] for words in everything]


def unprintable(text: str) -> set[str]:
    return {char for char in text if not (char.isprintable() or char in "\n\t")}


def test_no_command_prints_what_a_terminal_obeys(place: Path, commands: list[list[str]]) -> None:
    """As a process: `main`, all that it tells of errors, and the streams that others write to."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(commands).encode(),
        cwd=place,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert (unprintable(out), unprintable(err)) == (set(), set())
    # it is told, and every command was run
    assert "\\x1b[31m" in out and "\\x1b[31m" in err
    assert done.returncode == 0 and "Traceback" not in err, err[-2000:]


def test_no_command_prints_it_in_process(
    place: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By click alone, without the streams of `main`; click's own errors are `main`'s to print."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("PROFHARNESS_STORE", "second.db")
    for words in commands:
        done = CliRunner().invoke(cli, words)
        if done.exit_code == 2 and "Usage:" in done.stderr:
            continue
        assert unprintable(done.output) == set(), words


@pytest.mark.parametrize(
    "words", [("kernels", "--full"), ("layers",), ("report",), ("ingest", "again")]
)
def test_a_terminal_gets_colours_and_moves_of_profharness_alone(
    place: Path, commands: list[list[str]], words: tuple[str, ...]
) -> None:
    source = next(path.name for path in place.iterdir() if path.name.startswith("program"))
    words = (words[0], source, "--store", "third.db") if words[0] == "ingest" else words
    text = on_terminal(place, *words)
    own = re.sub(r"\x1b\[[0-9;]*m|\r\x1b\[K|\r(?=\n)", "", text)
    assert unprintable(own) == set() and "\\x1b[31m" in own
    assert commands


def on_terminal(folder: Path, *words: str) -> str:
    """What a command writes where stdout and stderr are a terminal."""
    mine, its = pty.openpty()
    argv = [sys.executable, "-m", "profharness", *words]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(argv, stdin=its, stdout=its, stderr=its, cwd=folder, env=environment)
    os.close(its)
    parts = []
    try:
        while part := os.read(mine, 1 << 16):
            parts.append(part)
    except OSError:  # how the end of a terminal shows on Linux
        pass
    finally:
        os.close(mine)
        process.wait(PATIENCE_S)
    return b"".join(parts).decode()


def test_what_libraries_write_is_printable() -> None:
    code = """
import logging, sys, warnings
from profharness.cli import _open_streams
_open_streams()
text = sys.stdin.read()
warnings.warn(text)
logging.basicConfig(); logging.error(text)
print(text, file=sys.stderr); print(text); sys.stderr.writelines([text])
raise ValueError(text)
"""
    command = [sys.executable, "-X", "utf8", "-c", code]
    done = subprocess.run(command, input=HOSTILE.encode(), capture_output=True, check=False)
    assert (unprintable(done.stdout.decode()), unprintable(done.stderr.decode())) == (set(), set())
    assert done.stderr.count(b"\\x1b[31m") >= 4 and done.stdout.count(b"\\x1b[31m") == 1


@pytest.mark.parametrize("clean", [printable, one_line, printable_path])
def test_a_clean_text_is_printable_and_stays_as_it_is(clean: Callable[[str], str]) -> None:
    text = clean(f"a\tb\n{HOSTILE}\ud800 z")
    assert unprintable(text) == set() and clean(text) == text
    assert text.encode().decode() == text and text.startswith("a") and text.endswith(" z")
    assert clean("Größe 漢字 🙂 µs") == "Größe 漢字 🙂 µs"


def test_the_commands_print_by_one_module() -> None:
    printing = re.compile(r"click\.s?echo\(|(?<![\w.])print\(|std(?:out|err)\.write\(")
    places = {
        path.name
        for folder in ("*.py", "commands/**/*.py")
        for path in (ROOT / "profharness").glob(folder)
        if printing.search(path.read_text())
    }
    # texts.py has the scripts that `repro` writes
    assert places == {"__main__.py", "_output.py", "cli.py", "texts.py"}
