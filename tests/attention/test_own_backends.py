"""Implementations by users, run by real workers on the CPU: how they are found and named, and what
happens if they break the contract.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

from profharness.attention.backends import (
    BACKENDS,
    expand_backends,
    find_backend,
    find_backends,
    implementation_names,
)
from profharness.attention.config import expand_configs
from profharness.errors import UsageError
from profharness.recording.capture import capture, resume
from profharness.run import CaptureOptions, Cell, Protocol, Run, read_run

ROOT = Path(__file__).resolve().parents[2]

QUICK = Protocol(iterations=1, warmup=0, samples=2, timeout_s=PATIENCE_S, device="cpu")
GOOD = """
from torch.nn.functional import scaled_dot_product_attention
def attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
"""


def run(out: Path, configs: str, *backends: str) -> Run:
    options = CaptureOptions(("events",), out, QUICK)
    cells = [config for text in configs.split(" ") for config in expand_configs(text)]
    return read_run(capture(cells, backends, options))


FILES = {
    "good.py": GOOD + "other = attention\n",
    "helped.py": "import helper_beside\nfrom good import attention\nimport torch\nassert torch.nn\n",
    "helper_beside.py": "",
    "torch.py": "raise RuntimeError('the torch.py of the folder was imported')",
    "no_import.py": "\nimport a_package_that_is_not_there\n",
    "no_syntax.py": "def attention(:\n",
    "leaves.py": "import sys\nsys.exit(3)\n",
    "leaves_later.py": "import sys\ndef attention(*a, **k): sys.exit(4)\n",
    "empty.py": "attention = None\n",
    "raises.py": "def attention(q, k, v, **rest):\n    raise ValueError('x' * 9000 + 'the end')\n",
    "wrong_shape.py": "def attention(q, k, v, **rest): return q.transpose(1, 2)\n",
    "wrong_dtype.py": "def attention(q, k, v, **rest): return q.double()\n",
    "wrong_type.py": "def attention(q, k, v, **rest): return (q, k)\n",
    "no_gradient.py": "def attention(q, k, v, **rest): return q.detach() * 1\n",
    "picky.py": GOOD
    + "def supports(config): return 'odd lengths only' if config.seq_len_q % 2 == 0 else None\n",
    "wrong_supports.py": GOOD + "def supports(config): return False\n",
    "gives_up.py": "def attention(q, k, v, **rest): raise NotImplementedError('not on Sundays')\n",
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Cell]:
    """Run every file above on one config, forward, and forward and backward, in one capture. Return
    the cells by backend and bwd.
    """
    folder = tmp_path_factory.mktemp("work")
    (folder / "mine").mkdir()
    for name, text in FILES.items():
        (folder / "mine" / name).write_text(text)
    (folder / "kernels").mkdir()
    (folder / "kernels" / "local.py").write_text(GOOD)
    skipped = ("torch.py", "helper_beside.py")
    backends = [f"mine/{name}" for name in FILES if name not in skipped]
    before = Path.cwd()
    os.chdir(folder)
    try:
        record = run(
            folder / "runs",
            "1,4,8,16,causal,kv_heads=2 1,2,6,8,bwd 1,2,8,8,mask=bool",
            *backends,
            *("naive", "local", "mine/good.py:other", "math"),
            str(folder / "mine" / "good.py") + ":attention",
        )
    finally:
        os.chdir(before)
    text = (folder / "runs" / record.run / "run.json").read_text()
    assert str(folder) not in text
    assert not (folder / "runs" / record.run / "sources.json").exists()
    code = record.environment["backend_code"]
    assert code["mine/good.py"] == code["good.py:attention"] == code["mine/good.py:other"]
    assert code["mine/good.py"].startswith("sha256:")
    assert code["naive"] != code["local"]
    assert "math" not in code
    return {(c.backend, c.config.bwd): c for c in record.cells if c.config.mask == "none"} | {
        (f"masked {c.backend}", False): c for c in record.cells if c.config.mask != "none"
    }


@pytest.mark.parametrize(
    "name",
    [
        *("naive", "local", "mine/good.py", "mine/good.py:other", "good.py:attention", "math"),
        "mine/helped.py",
    ],
)
def test_implementations_that_follow_the_contract_run(
    cells: dict[tuple[str, bool], Cell], name: str
) -> None:
    for bwd in (False, True):
        cell = cells[name, bwd]
        assert (cell.status, cell.message) == ("ok", None)
        assert len(cell.samples["wall"]) == 2
        assert (cell.compile_ns is None) == (name == "math")
        assert (cell.choice is None) == (name != "math")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_import", "no_import.py cannot be imported: ModuleNotFoundError.*not_there.*line 2"),
        ("no_syntax", "no_syntax.py cannot be imported: SyntaxError"),
        ("leaves", r"leaves\.py cannot be imported: SystemExit: 3"),
        ("leaves_later", r"called exit\(4\)"),
        ("empty", r"has no function 'attention'; expected attention\(q"),
        ("raises", r"(?s)ValueError: xxx.*characters left out.*the end \(raises.py, line 2\)"),
        ("wrong_shape", r"returned shape \[1, 8, 4, 16\]; it must be \[1, 4, 8, 16\]"),
        ("wrong_dtype", "returned torch.float64 on cpu; the inputs are torch.float32"),
        ("wrong_type", "returned tuple, not a tensor"),
        ("wrong_supports", r"supports\(\) returned False"),
    ],
)
def test_breaking_the_contract_gives_an_error_cell(
    cells: dict[tuple[str, bool], Cell], name: str, told: str
) -> None:
    import re

    cell = cells[f"mine/{name}.py", False]
    assert cell.status == "error"
    assert re.search(told, str(cell.message)), cell.message
    assert len(str(cell.message)) < 4200


def test_unsupported_configs_are_refused_with_the_reason(
    cells: dict[tuple[str, bool], Cell],
) -> None:
    expected = {
        ("mine/picky.py", False): "odd lengths only",
        ("mine/gives_up.py", False): "not on Sundays",
        ("mine/no_gradient.py", True): "has no gradient",
        ("masked naive", False): "mask=bool",
        ("masked mine/good.py", False): "mask=bool",
    }
    for key, reason in expected.items():
        cell = cells[key]
        assert (cell.status, [r.code for r in cell.refusals]) == ("refused", ["unsupported"])
        assert reason in str(cell.message)
    assert cells["masked math", False].status == "ok"


def test_unknown_names_and_files_are_reported_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot find the file .*gone\.py"):
        find_backend("gone.py:fn")
    (tmp_path / "here.py").write_text(GOOD)
    with pytest.raises(UsageError, match="not a valid function name"):
        find_backend(f"{tmp_path}/here.py:1x")
    with pytest.raises(UsageError, match=r"flsh.*did you mean flash\?"):
        find_backend("flsh")


def test_all_and_kernels_expand_to_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels").mkdir()
    for name in ("mine", "flash"):
        (tmp_path / "kernels" / f"{name}.py").write_text(GOOD)
    offered = [name for name in implementation_names() if name != "flash"]
    assert "mine" in offered
    usual = ("auto", "math")
    assert expand_backends(["all"], usual) == ["auto", "math"]
    kernels = expand_backends(["kernels"], usual)
    assert kernels == ["kernels/flash.py", *offered]
    assert expand_backends(["all", "kernels"], usual) == ["auto", "math", *kernels]
    assert expand_backends(["math", "all", "mine"], usual) == ["math", "auto", "mine"]
    assert expand_backends([], usual) == []


def test_kernels_without_an_implementation_is_reported(tmp_path: Path) -> None:
    """Uses a copy of the package, because the checkout has a folder kernels/."""
    shutil.copytree(ROOT / "profharness", tmp_path / "profharness")
    code = (
        "from profharness.attention.backends import expand_backends\n"
        "print(expand_backends(['all', 'kernels'], ('auto',)))\n"
        "expand_backends(['kernels'], ('auto',))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stdout == "['auto']\n", done.stderr
    assert "UsageError: --backend kernels selects nothing" in done.stderr


def test_a_file_of_kernels_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same name as in a checkout, unless the working directory has a file of that name."""
    monkeypatch.chdir(tmp_path)
    shipped = find_backend("kernels/naive.py")
    assert shipped.file == ROOT / "kernels" / "naive.py"
    assert shipped.name == "kernels/naive.py"
    assert find_backend("naive").summary == "bundled with profharness"
    assert find_backend("kernels/tiled.py:one_block").name == "kernels/tiled.py:one_block"
    with pytest.raises(UsageError, match=r"cannot find the file kernels/none\.py"):
        find_backend("kernels/none.py")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "naive.py").write_text(GOOD)
    assert find_backend("kernels/naive.py").file == tmp_path / "kernels" / "naive.py"
    assert find_backend("naive").summary == "implementation in kernels/naive.py"


def test_names_that_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "kernels"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(GOOD)
    (tmp_path / "kernels" / "flash.py").write_text(GOOD)
    (tmp_path / "kernels" / "naive.py").write_text(GOOD)
    assert find_backend("flash") is BACKENDS["flash"]
    assert find_backend("kernels/flash.py").file == tmp_path / "kernels" / "flash.py"
    assert find_backend("naive").file == tmp_path / "kernels" / "naive.py"
    assert find_backend("a/same.py").name == "a/same.py"
    assert find_backend(str(tmp_path / "a" / "same.py")).name == "same.py"
    found = find_backends(["a/same.py", "b/same.py", "a/same.py"])
    assert list(found) == ["a/same.py", "b/same.py"]
    with pytest.raises(UsageError, match=r"two backends have the name 'same\.py'"):
        find_backends([str(tmp_path / "a" / "same.py"), str(tmp_path / "b" / "same.py")])
    assert list(implementation_names())[:3] == ["flash", "naive", "same"]


def test_a_run_resumes_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels").mkdir()
    from profharness.attention.backends import write_sources
    from profharness.recording.capture import plan_cells
    from profharness.run import write_run

    cells = plan_cells(expand_configs("1,1,8,8"), ["mine.py"])
    folder = tmp_path / "half"
    folder.mkdir()
    write_run(folder, Run("r", "2026-01-01T00:00:00+00:00", ("events",), QUICK, cells))
    write_sources(folder, [find_backend("mine.py")])
    monkeypatch.chdir("/")
    record = resume(folder).run
    assert [(cell.status, cell.message) for cell in record.cells] == [("ok", None)]
    assert set(record.environment["backend_code"]) == {"mine.py"}


def offer(folder: Path, package: str, *points: str) -> None:
    """Install a real distribution: a package with its dist-info and entry points."""
    (folder / f"{package}_pkg").mkdir(parents=True)
    (folder / f"{package}_pkg" / "__init__.py").write_text("")
    (folder / f"{package}_pkg" / "impl.py").write_text(GOOD)
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("\n".join(["[profharness.attention.backends]", *points]))


CHILD = """
import json, sys
from pathlib import Path
from profharness.attention.backends import find_backend, fingerprints
from profharness.attention.config import expand_configs
from profharness.errors import UsageError
from profharness.run import Protocol, read_run
from profharness.run import CaptureOptions
from profharness.recording.capture import capture
options = CaptureOptions(("events",), Path(sys.argv[1]), Protocol(1, 0, 0, device="cpu"))
names = ["pointed", "bare", "flash", "one_pkg.impl:attention", "asks", "broken"]
record = read_run(capture(expand_configs("1,1,8,8"), names, options))
try:
    find_backend("twice")
except UsageError as error:
    print(error)
print(json.dumps({
    "status": {cell.backend: cell.status for cell in record.cells},
    "code": record.environment["backend_code"],
    "broken": [cell.message for cell in record.cells][-1],
    "loaded": [name for name in ("torch", "one_pkg") if name in sys.modules],
}))
"""


def test_entry_points_of_installed_packages(tmp_path: Path) -> None:
    site = tmp_path / "site"
    flash = "flash = one_pkg.impl:gone"
    bare = "bare = one_pkg.impl"
    offer(site, "one", "pointed = one_pkg.impl:attention", bare, flash, "twice = one_pkg.impl:a")
    offer(site, "two", "twice = two_pkg.impl:attention", "broken = two_pkg.gone:attention")
    (site / "kernels").mkdir()  # an installed package of that name is unaffected
    (site / "kernels" / "__init__.py").write_text("mark = 1\n")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise ImportError('the wrong one')\n")
    (tmp_path / "kernels" / "asks.py").write_text("from kernels import mark\n" + GOOD)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "runs")],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *_, refusal, last = done.stdout.splitlines()
    assert (
        "packages provide the backend 'twice' (one_pkg.impl:a, two_pkg.impl:attention)" in refusal
    )
    told = json.loads(last)
    assert told["status"] == {
        "pointed": "ok",
        "bare": "ok",
        "flash": "ok",
        "one_pkg.impl:attention": "ok",
        "asks": "ok",
        "broken": "error",
    }
    assert "two_pkg.gone cannot be imported: ModuleNotFoundError" in told["broken"]
    assert told["loaded"] == []
    assert told["code"]["pointed"] == told["code"]["one_pkg.impl:attention"]
    assert not {"broken", "flash"} & set(told["code"])
