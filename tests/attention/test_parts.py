"""The dependencies of an implementation, whose hash is stored with a run, and where its `tuning` is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

from profharness.attention.backends import find_backend
from profharness.attention.backends.sources import (
    commit,
    find_implementation,
    fingerprint,
    parts_of,
)
from profharness.attention.config import expand_configs
from profharness.errors import UsageError
from profharness.logs import LOG_VARIABLE, start_log
from profharness.recording.capture import capture
from profharness.run import CaptureOptions, Protocol, read_run

ROOT = Path(__file__).resolve().parents[2]
QUICK = Protocol(iterations=1, warmup=0, samples=0, timeout_s=PATIENCE_S, device="cpu")
GOOD = """
from torch.nn.functional import scaled_dot_product_attention
def attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
"""
CUDA_TEXT = 'CUDA = """\n#include "text.cuh"\n"""\n'
BELONGS = {
    "mine.py": f"import numpy\nfrom _tiles import best\nimport sub.deep\n{CUDA_TEXT}{GOOD}",
    "mine.cu": '#include "near.cuh"\n  #  include "../shared.cuh"\n#include <cuda_fp16.h>\n',
    "near.cuh": '#include "far.cuh"\n#include "gone.cuh"\n',
    "far.cuh": '#include "near.cuh"\n',  # circular
    "../shared.cuh": "\n",
    "text.cuh": "\n",
    "_tiles.py": "def best():\n    from _late import late\nSOURCE = 'other.cu'\nimport mine\n",
    "_late.py": "late = 1\n",
    "other.cu": "\n",
    "sub/__init__.py": "from . import inner\n",
    "sub/inner.py": "from .. import up\n",
    "sub/deep.py": "\n",
    "up.py": "\n",
}
OTHERS = {
    "_unused.py": "\n",
    "unused.cuh": "\n",
    "sub/unused.py": "\n",
    "broken.py": "def (\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (BELONGS | OTHERS).items():
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "own"


def told(folder: Path) -> str:
    text = fingerprint(find_backend(str(folder / "mine.py")))
    assert text is not None and re.fullmatch(r"sha256:[0-9a-f]{16}", text)
    return text


def test_the_parts_of_a_file(folder: Path) -> None:
    found = parts_of(folder / "mine.py")
    assert {os.path.relpath(path, folder) for path in found} == set(BELONGS)
    assert all(content == path.read_bytes() for path, content in found.items())


@pytest.mark.parametrize("name", BELONGS)
def test_an_edit_of_any_part_changes_the_version(name: str, folder: Path) -> None:
    before = told(folder)
    assert told(folder) == before
    with (folder / name).open("a") as file:
        file.write("# edited\n")
    assert told(folder) != before


@pytest.mark.parametrize("name", OTHERS)
def test_an_edit_of_any_other_file_keeps_the_version(name: str, folder: Path) -> None:
    before = told(folder)
    (folder / name).write_text("edited = 1\n")
    assert told(folder) == before


def test_a_copy_elsewhere_has_the_same_version(folder: Path, tmp_path: Path) -> None:
    before = told(folder)
    (tmp_path / "elsewhere").mkdir()
    moved = folder.rename(tmp_path / "elsewhere" / "own")
    (tmp_path / "shared.cuh").rename(tmp_path / "elsewhere" / "shared.cuh")
    assert told(moved) == before
    near, far = moved / "near.cuh", moved / "far.cuh"
    texts = near.read_text(), far.read_text()
    far.write_text(texts[0])
    near.write_text(texts[1])
    assert told(moved) != before  # the same contents under other names


def test_a_file_that_is_not_python_has_a_version(folder: Path) -> None:
    assert set(parts_of(folder / "broken.py")) == {folder / "broken.py"}
    (folder / "broken.py").write_bytes(b"x = '\0'\n")
    assert set(parts_of(folder / "broken.py")) == {folder / "broken.py"}
    long = f"x = '{'y' * 5000}.cu'\n"
    (folder / "broken.py").write_text(long)
    assert set(parts_of(folder / "broken.py")) == {folder / "broken.py"}


def test_a_file_too_large_to_be_code_is_not_read(folder: Path) -> None:
    parts = parts_of(folder / "mine.py")
    for name in ("sub/deep.py", "huge.py"):
        with (folder / name).open("wb") as file:
            file.truncate(1 << 31)
    assert set(parts_of(folder / "mine.py")) == set(parts) - {folder / "sub" / "deep.py"}
    with pytest.raises(UsageError, match="larger than 16,000,000 bytes"):
        find_implementation(f"{folder}/huge.py")


def test_the_parts_of_the_files_in_kernels() -> None:
    def names(stem: str) -> set[str]:
        return {path.name for path in parts_of(ROOT / "kernels" / f"{stem}.py")}

    assert names("naive") == {"naive.py"}
    assert names("flash_triton") >= {"_flash_triton_kernels.py", "_flash_triton_tiles.py"}
    assert names("tiled") >= {"_tiled_plan.py", "tiled.cu", "device.cuh", "tiled_half.cuh"}


TUNINGS = {
    "home.py": GOOD + "def tuning(): return {'at': 'home'}\n",
    "shows.py": "from home import attention\n",
    "own.py": "from home import attention\ndef tuning(): return {'at': 'own'}\n",
    "says.py": GOOD
    + "def tuning(): return {'at': 'module'}\nattention.tuning = lambda: {'at': 'function'}\n",
    "silent.py": GOOD + "tuning = {'at': 'no function'}\n",
    "wrong.py": GOOD + "def tuning(): return 3\n",
}


def test_tuning_of_an_imported_function_is_found(tmp_path: Path) -> None:
    for name, text in TUNINGS.items():
        (tmp_path / name).write_text(text)
    options = CaptureOptions(("events",), tmp_path / "runs", QUICK)
    files = [str(tmp_path / name) for name in TUNINGS]
    cells = {
        c.backend: c for c in read_run(capture(expand_configs("1,1,8,8"), files, options)).cells
    }
    assert {name: (cell.tuning or {}).get("at") for name, cell in cells.items()} == {
        "home.py": "home",
        "shows.py": "home",
        "own.py": "own",
        "says.py": "function",
        "silent.py": None,
        "wrong.py": None,
    }
    assert cells["wrong.py"].status == "error"
    assert "must return a dict" in str(cells["wrong.py"].message)


SAYS = "import logging\nlogging.getLogger('profharness.mine').debug('heard')\n" + GOOD


@pytest.mark.parametrize(("level", "kept"), [("debug", True), ("error", True), ("", False)])
def test_the_log_is_written_if_enabled(
    level: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    monkeypatch.setenv(LOG_VARIABLE, level)
    options = CaptureOptions(("events",), tmp_path / "runs", QUICK)
    folder = capture(expand_configs("1,1,8,8"), [str(tmp_path / "says.py")], options)
    log = folder / "worker.log"
    assert log.exists() == kept
    if kept:
        assert ("DEBUG profharness.mine: heard" in log.read_text()) == (level == "debug")


def test_an_unknown_log_level_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_VARIABLE, "loud")
    with pytest.raises(ValueError, match="choose from debug, info, warning, error"):
        start_log()
    done = subprocess.run(
        [sys.executable, "-m", "profharness", "capture", "--config", "1,1,8,8"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "PROFHARNESS_LOG=loud: unknown level" in done.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_a_file_reports_uncommitted_changes(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    file, other = tmp_path / "mine.py", tmp_path / "other.txt"
    file.write_text("def attention(q, k, v): ...")
    assert commit(file) is None
    git("init", "-q")
    assert commit(file) is None  # nothing is committed yet
    git("add", "mine.py")
    git("commit", "-q", "-m", "one")
    head = git("rev-parse", "HEAD")
    other.write_text("not of the backend")
    assert commit(file) == head
    (tmp_path / "mine.cu").write_text("// belongs to it")
    assert commit(file) == f"{head}, changed"
    assert commit(tmp_path / "none.py") is None
