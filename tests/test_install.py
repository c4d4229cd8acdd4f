"""An installed profharness: a wheel built from the sdist, in a separate environment, used from an
empty folder. Every command block of the pages runs there.

The dependencies of profharness come from the environment of the tests. The network is not used.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import pytest
from make_outputs import IN_TERMINAL, in_terminal
from waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\|.*\| `(profharness [^|`]+)` \|.*\|$", re.MULTILINE)
RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")  # the last part may have no digit
RUNNABLE = ("sh", "console", "python", "sql", "table")
SOURCES = ("profharness", "kernels", "pyproject.toml", "setup.py", "README.md", "LICENSE")

# Commands that are not run here, by their first words, and why.
ELSEWHERE = {
    "make ": "of the checkout; continuous integration runs both",
    "python scripts/": "of the checkout; tests/test_campaign.py runs a part",
    "pip install": "the fixture did it, without the network",
    "eval ": "of a shell's start-up file",
    "_PROFHARNESS_COMPLETE": "of a shell's start-up file",
    "profharness serve": "runs until it is stopped: test_serve_answers_from_the_wheel",
    "profharness observe": "runs a program of the reader's: tests/observe",
    "profharness mcp": "runs until its client leaves: tests/commands/test_mcp.py",
    "profharness ranks": "of a job of the reader's: tests/commands/test_ranks.py",
    "profharness ingest /tmp/step100": "of a job of the reader's: tests/commands/test_ranks.py",
    "profharness ingest /shared": "of a host that many use: tests/jobs/test_parallel_ingest.py",
    "profharness layers --gpu": "of a program of the reader's: tests/observe/test_forecast.py",
    "profharness layers mi300x": "a trace of an AMD GPU: tests/commands/test_layers_classes.py",
    "profharness kernels rocpd": "a trace of an AMD GPU: tests/traces/test_rocm.py",
    "profharness layers h100_timesformer": "public traces: tests/commands/test_layers_classes.py",
    "profharness scrub traces/runs/20261121-152530-4142": "an id of another day: test_a_run_is_scrubbed",
}
PYTHON_ELSEWHERE = (
    "def attention(",
    "import profharness\n\nwith profharness.observe",
    "with profharness.observe() as seen",  # around a reader's model: tests/observe
    "from pathlib",
    "with torch.profiler",  # around a step of the reader's: tests/traces/test_calls.py
    "from emulator",
)  # contents of kernels' files
# Exit codes other than 0 on a machine without a GPU and tools, by the command's first words.
CODES = {
    "--expect cudnn": (3,),
    "--fail-on": (0, 3),
    "nsys,ncu": (1,),
    "--profiler ncu": (1,),
    "--profiler torch,ncu": (1,),
    "--profiler torch,rocprofv3": (1,),
}
# Sampling continues until an interval is small. The interval is not checked here.
SHORTER = {
    "profharness bench": "--iterations 3 --warmup 1 --processes 1",
    "profharness verify": "--cases none",
    "profharness capture": "--samples 5",
}

pytestmark = pytest.mark.xdist_group("installed")


@dataclass(frozen=True)
class Block:
    """A code block of a page. `number` counts the page's blocks."""

    page: str
    number: int
    kind: str
    body: str


def blocks() -> Iterator[Block]:
    """Yield all blocks that are run, in the order of the pages. A table of commands is a block too."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        found = list(FENCE.findall(text))
        if rows := ROW.findall(text):
            found.append(("table", "\n".join(rows) + "\n"))
        for number, (kind, body) in enumerate(found, start=1):
            if kind in RUNNABLE:
                yield Block(page, number, kind, body)


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel, and the folder of the session."""

    wheel: Path
    sdist: Path
    bin: Path
    folder: Path
    done: set[str] = field(default_factory=set)  # commands that another page contains too

    def environment(self) -> dict[str, str]:
        """The environment of a user who has activated it, without anything of the checkout."""
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COLUMNS")}
        path = f"{self.bin}{os.pathsep}{kept['PATH']}"
        alone = {"OMP_NUM_THREADS": "1"}  # other tests run at the same time
        return kept | alone | {"PATH": path, "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(self, command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a line of shell, with separate streams."""
        return subprocess.run(
            ["bash", "-c", command],
            cwd=folder or self.folder,
            env=self.environment(),
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Install the wheel built from the sdist of a clean copy, without its dependencies."""
    place = tmp_path_factory.mktemp("installed")
    source, dist = place / "source", place / "dist"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy2
        ignored = {"ignore": shutil.ignore_patterns("__pycache__")} if path.is_dir() else {}
        copy(path, source / name, **ignored)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(source)]
    quietly(build)
    wheel, sdist = next(dist.glob("*.whl")), next(dist.glob("*.tar.gz"))
    venv.create(place / "venv", with_pip=False)
    folder = place / "empty"
    folder.mkdir()
    installed = Installed(wheel, sdist, place / "venv" / "bin", folder)
    site = next((place / "venv").glob("lib/python*/site-packages"))
    # a line in a .pth file adds the folder but does not process its own .pth files, such as an
    # editable install's
    paths = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "shared.pth").write_text("\n".join(paths) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(installed.bin / "python"), "install"]
    quietly([*pip, "--no-deps", "--no-index", "--ignore-installed", str(wheel)])
    return installed


def quietly(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def commands(body: str) -> Iterator[tuple[str, str]]:
    """Yield a block's commands with the output that it shows, empty in an `sh` block."""
    if "$ " not in body[:2]:
        for line in body.replace("\\\n", " ").splitlines():
            yield line.strip(), ""
        return
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


@pytest.mark.parametrize("block", list(blocks()), ids=lambda block: f"{block.page}-{block.number}")
def test_a_block_prints_what_its_page_shows(installed: Installed, block: Block) -> None:
    with_traces(installed.folder)
    if block.kind == "python":
        run_python(installed, block)
    elif block.kind == "sql":
        run_sql(installed, block)
    else:
        for command, output in commands(block.body):
            if command and not command.startswith(tuple(ELSEWHERE)):
                run_command(installed, command, output, shown=block.kind == "console")


def with_traces(folder: Path) -> None:
    """Copy the runs and traces of the repository, which the pages refer to."""
    traces = ROOT / "traces"
    for path in (
        traces / "models",
        traces / "serving",
        traces / "serving_bench",
        *traces.glob("h200-*"),
    ):
        if not (folder / "traces" / path.name).exists():
            shutil.copytree(path, folder / "traces" / path.name)


def run_command(installed: Installed, command: str, output: str, *, shown: bool) -> None:
    text = re.sub(r"\s+#.*$", "", command)
    if not shown and text in installed.done:
        return
    installed.done.add(text)
    more = [more for start, more in SHORTER.items() if text.startswith(start)]
    asked, text = text, " ".join([text, *more])
    if written := re.search(r" -o (\S+)", text):  # an earlier block may have written the file
        (installed.folder / written[1]).unlink(missing_ok=True)
    done = installed.run(in_terminal(text) if text in IN_TERMINAL else text)
    told = f"{text}\n{done.stdout}\n{done.stderr}"
    assert "Traceback (most recent call last)" not in told, told
    codes = next((codes for part, codes in CODES.items() if part in text), (0,))
    assert done.returncode in codes, told
    if shown:
        compare(asked, output, done)


def compare(command: str, page: str, done: subprocess.CompletedProcess[str]) -> None:
    """Check that all output on the page was printed, and that the page shows all of stdout. It may
    omit lines of stderr.

    Measured figures are not compared, and neither are small ops of a CPU.
    """
    if re.search(r"_for_cpu +[-\d]", page):
        assert header(done.stdout) == header(page)
        assert leading(page) <= set(done.stdout.split())
        return
    alike = shape if command.startswith("profharness capture") else without_ids
    told, printed = ({alike(line) for line in text.splitlines()} for text in (page, done.stdout))
    came = printed | {alike(line) for line in done.stderr.splitlines()}
    assert (told - came - {""}, printed - told - {""}) == (set(), set())


def header(text: str) -> list[str]:
    """Return the column names of a table. The unit of a time depends on the speed of the machine."""
    line = next(line for line in text.splitlines() if line.startswith("backend "))
    return re.sub(r"\b(ms|µs|time)\b", "time", line).split()


def leading(text: str) -> set[str]:
    """Return the backends of a table of a CPU, and its ops that take a quarter of a call and more."""
    found = re.findall(r"^(\S+ )?\s*(\w+)…?\s.*?\s([\d.]+)(?: +-)?$", text, re.MULTILINE)
    rows = ((backend, op) for backend, op, share in found if float(share) > 25)
    return {word.strip() for row in rows for word in row} - {""}


def without_ids(line: str) -> str:
    return RUN_ID.sub("0", line.rstrip())


def shape(line: str) -> str:
    """Return a line without its figures and ids, and without the time left, which slow machines show."""
    line = re.sub(r", about .* left$", "", line)
    line = without_ids(line)
    return re.sub(r"[0-9a-f]*\d[0-9a-f.,]*", "0", " ".join(line.split()))


def run_python(installed: Installed, block: Block) -> None:
    if block.body.startswith(PYTHON_ELSEWHERE):
        return
    code = (
        block.body
        + "\nfor name in {'cells', 'kernels', 'reasons', 'slowest'} & globals().keys():\n"
    )
    code += "    assert len(globals()[name]), name\n"
    (installed.folder / "notebook.py").write_text(code)
    done = installed.run("python notebook.py")
    assert done.returncode == 0, done.stderr
    # PyTorch's profiler prints when it starts and stops
    assert done.stderr == "" or "torch.profiler" in block.body, done.stderr


def run_sql(installed: Installed, block: Block) -> None:
    """Run SQL on the session's store. The next block of kind `text` is the expected output."""
    found = FENCE.findall((ROOT / block.page).read_text(encoding="utf-8"))
    kind, answer = found[block.number]
    assert kind == "text"
    with closing(sqlite3.connect(installed.folder / "profharness.db")) as connection:
        rows = connection.execute(block.body).fetchall()
    assert ["|".join(map(str, row)) for row in rows] == answer.splitlines()


def test_the_implementations_are_in_the_wheel_and_in_the_sdist(installed: Installed) -> None:
    home = {path.name for path in (ROOT / "kernels").iterdir() if path.is_file()}
    assert {"naive.py", "tiled.cu", "device.cuh"} <= home
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert "profharness/recording/observer/startup/sitecustomize.py" in names
    folder = "profharness/_kernels/"
    assert {name.removeprefix(folder) for name in names if name.startswith(folder)} == home
    assert {"profharness/py.typed", "profharness/render/assets/page.css"} <= set(names)
    assert [name for name in names if name.startswith("profharness/atlas/h200-")]
    assert [name for name in names if name.startswith("profharness/traces/_scanner.")]
    assert not [name for name in names if not name.startswith("profharness")]
    with tarfile.open(installed.sdist) as archive:
        names = archive.getnames()
    top = next(iter(names)).split("/")[0]
    inside = {Path(name).name for name in names if name.startswith(f"{top}/kernels/")}
    assert inside == home


def test_the_installed_package_runs_and_not_the_checkout(installed: Installed) -> None:
    code = (
        "import profharness\nfrom profharness.attention.backends import find_backend\n"
        "print(profharness.__file__, find_backend('tiled').file)"
    )
    paths = installed.run(f"python -c {shlex.quote(code)}").stdout.split()
    assert len(paths) == 2
    assert all(Path(path).is_relative_to(installed.bin.parent) for path in paths)


def test_own_kernels_come_first_and_foreign_ones_are_ignored(
    installed: Installed, tmp_path: Path
) -> None:
    """`kernels` is also the name of a package on PyPI, which would be installed next to profharness."""
    site = next(installed.bin.parent.glob("lib/python*/site-packages"))
    (site / "kernels").mkdir()
    (site / "kernels" / "foreign.py").write_text("")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "naive.py").write_text("def attention(): ...\n")
    code = (
        "from profharness.attention.backends import find_backend, implementation_names\n"
        "print(find_backend('naive').file, *implementation_names())"
    )
    try:
        done = installed.run(f"python -c {shlex.quote(code)}", tmp_path)
    finally:
        shutil.rmtree(site / "kernels")
    own, *names = done.stdout.split()
    assert Path(own) == tmp_path / "kernels" / "naive.py"
    assert {"flash_triton", "naive", "single_query", "tiled"} == set(names)


def test_an_empty_folder_without_any_run_gets_a_remedy(
    installed: Installed, tmp_path: Path
) -> None:
    for command in ("kernels", "runs", "report -o r.html", "serve --port 0"):
        done = installed.run(f"profharness {command}", tmp_path)
        assert done.returncode == 2 and done.stderr.startswith("error: ")
        assert "profharness capture" in done.stderr or "profharness ingest" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_serve_answers_from_the_wheel(installed: Installed) -> None:
    """Its assets are in the wheel too."""
    process = subprocess.Popen(
        [installed.bin / "profharness", "serve", "--port", "0"],
        cwd=installed.folder,
        env=installed.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://[\d.:]+", line)
        assert found, line
        with urlopen(found[0], timeout=PATIENCE_S) as page:
            assert page.status == 200 and b"Slowest kernels" in page.read()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) in (0, 130)
        process.stderr.close()


def test_a_run_is_scrubbed(installed: Installed) -> None:
    run = min((installed.folder / "traces" / "runs").iterdir())
    copy = f"traces/runs/{run.name}-scrubbed"
    done = installed.run(
        f"profharness scrub traces/runs/{run.name} && profharness scrub --check {copy}"
    )
    assert done.returncode == 0, done.stderr
