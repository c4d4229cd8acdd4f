"""Write the pages of docs/studies/ from the runs in traces/studies.tar.xz, including every figure,
or measure those runs again on a GPU.

python scripts/make_studies.py write             write the pages and pictures; needs no GPU
python scripts/make_studies.py check             exit 1 if a page or picture is not current
python scripts/make_studies.py store FOLDER      unpack the runs and store them, for your own queries
python scripts/make_studies.py measure FOLDER    make all runs, on a machine with a GPU
python scripts/make_studies.py pack FOLDER       scrub the runs and pack them into the archive

scripts/studies/NAME.md is the Jinja template of a page. The figures of a page come from commands of
profharness (`rows`, `us`) or from the output of a script (`printed`). Statements in words must
`claim` a condition: a page whose data contradict the condition is not written.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from _frame import output, pack_files, without_traces

from profharness.attention.config import SDPA_BACKENDS, parse_config
from profharness.cli import find_command
from profharness.commands.report import words_of
from profharness.recording.probe import Measured, measure_peaks
from profharness.run import read_run
from profharness.scrub import scrub
from profharness.store import ingest_path, open_store

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "studies"
TEMPLATES = ROOT / "scripts" / "studies"
PACKED = ROOT / "traces" / "studies.tar.xz"
RUNS, PRINTED, PEAKS, STORE = "runs", "printed", "peaks.json", "store.db"
TORCH_BACKENDS = ",".join(SDPA_BACKENDS)
LOOK = "2,8,512,64,fp16"
METRICS = "tensor,memory,cache,stalls"
LARGE = "1,4,64,8192,fp32"
PATH = ("single_query", "kernels/tiled.py:one_block", "kernels/tiled.py:one_cluster", "tiled")
TABLE = (
    *("1,1,16,8192,{fp32,fp16}", "1,4,64,{512,2048,4096},fp32", "1,4,64,8192,{fp32,fp16,bf16}"),
    *("4,4,128,4096,{fp32,fp16,bf16}", "8,4,128,2048,{fp16,bf16}"),
)


@dataclass(frozen=True)
class Study:
    """One page: the names of its runs, and the output of scripts for it.

    The raw traces of the runs in `traced` are kept. Of the other runs, only the samples are kept.
    """

    name: str
    runs: Mapping[str, tuple[str, ...]]
    printed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    traced: tuple[str, ...] = ()


def configs(*texts: str) -> tuple[str, ...]:
    """Return --config for each text."""
    return tuple(word for text in texts for word in ("--config", text))


STUDIES = (
    Study(
        "backend-investigation",
        {
            "bench": (
                *("bench", *configs("1,1,16,8192,fp32", "8,4,128,2048,{fp32,fp16}")),
                *("--backend", "all,naive,tiled", "--max-time", "300ms"),
            )
        },
        traced=("bench",),
    ),
    Study(
        "kernel-look",
        {
            "look": (
                *("capture", *configs(LOOK), "--profiler", "torch,ncu", "--metrics", METRICS),
                *("--backend", f"all-disabled,auto,{TORCH_BACKENDS}"),
            ),
            "lengths": (
                *("bench", *configs("2,8,{128:4096:*2},64,fp16"), "--max-time", "200ms"),
                *("--backend", TORCH_BACKENDS),
            ),
        },
        traced=("look",),
    ),
    Study(
        "large-head-dim-bottleneck",
        {
            "study": (
                *("capture", *configs("1,4,64,{512,2048},fp32", "1,2,32,4096,fp32")),
                *(*configs("1,1,16,8192,fp32"), "--backend", "single_query"),
                *("--profiler", "torch,ncu", "--metrics", METRICS),
            ),
            "even": (
                *("capture", *configs("1,4,64,{512,2048,4096,8192},fp32")),
                *("--backend", "single_query,auto,math,naive"),
                *("--profiler", "torch,ncu", "--metrics", METRICS),
            ),
        },
        traced=("study", "even"),
    ),
    Study(
        "autotune",
        {
            "bench": (
                *("bench", *configs("{4:64:*2},8,512,64", "32,8,{128:2048:*2},64")),
                *(*configs("32,{4,12,16,32},512,64"), "--dtype", "fp16"),
                *("--backend", f"auto,{TORCH_BACKENDS}", "--max-time", "200ms"),
            )
        },
    ),
    Study(
        "kernel-benchmark",
        {
            "bench": (
                *("bench", *configs("1,1,128,64", "8,4,128,64", "32,8,{128,256},64")),
                *("--dtype", "fp16,bf16", "--warmup", "200", "--samples", "500"),
                *("--backend", f"auto,{TORCH_BACKENDS},naive,flash-attn"),
                *("--seed", "42", "--verify"),
            )
        },
    ),
    Study(
        "large-head-dim",
        {
            "steps": (
                *("capture", *configs(LARGE), "--profiler", "torch,ncu", "--metrics", METRICS),
                *("--backend", ",".join((*PATH, "naive", "auto"))),
            ),
            "table": (
                *("bench", *configs(*TABLE), "--measurement", "graph,cold"),
                *("--backend", "tiled,auto,efficient,math,naive,naive-compiled"),
                *("--max-time", "150ms"),
            ),
            "long": (
                *("bench", *configs("4,16,4096,128,bf16"), "--measurement", "graph"),
                *("--backend", "flash_triton,tiled,cudnn,flash", "--max-time", "300ms"),
            ),
        },
        {
            "limits": ("bench_limits.py",),
            "samples-fp16": ("warp_samples.py", "4,4,128,4096,fp16"),
            "samples-fp32": ("warp_samples.py", "4,4,128,4096,fp32"),
        },
        traced=("steps",),
    ),
)


def measure(folder: Path, studies: Sequence[Study]) -> None:
    """Measure every run into folder/runs/STUDY/NAME, the output of the scripts, and the peaks of
    the device. A run that fails ends the script; earlier runs are kept and not repeated.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / PEAKS).exists():
        (folder / PEAKS).write_bytes(msgspec.json.encode(measure_peaks("cuda")))
    for study in studies:
        for name, words in study.runs.items():
            place = folder / RUNS / study.name / name
            if not any(place.glob("*/run.json")):
                scratch = ("--store", str(folder / "scratch.db"), "--out", str(place))
                timed(f"{study.name} {name}", "-m", "profharness", *words, *scratch)
        for name, (script, *arguments) in study.printed.items():
            path = folder / PRINTED / f"{name}.txt"
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                text = timed(f"{study.name} {name}", str(ROOT / "scripts" / script), *arguments)
                path.write_text(text, encoding="utf-8")


def timed(title: str, *words: str) -> str:
    """Return the output of a Python program. Exit with it if the program fails."""
    start = time.perf_counter()
    text = output([sys.executable, *words], cwd=ROOT)
    print(f"{title}: {time.perf_counter() - start:.0f} s", flush=True)
    return text


def pack(folder: Path, target: Path = PACKED, studies: Sequence[Study] = STUDIES) -> None:
    """Pack the measured runs into one archive: scrubbed, and without traces if samples suffice."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "studies"
        for study in studies:
            for name in study.runs:
                for run in sorted((folder / RUNS / study.name / name).glob("*/run.json")):
                    place = copy / RUNS / study.name / name / run.parent.name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    scrub(run.parent, place)
                    if name not in study.traced:
                        without_traces(place)
        (copy / PRINTED).mkdir()
        for path in sorted((folder / PRINTED).glob("*.txt")):
            (copy / PRINTED / path.name).write_bytes(path.read_bytes())
        (copy / PEAKS).write_bytes((folder / PEAKS).read_bytes())
        target.parent.mkdir(parents=True, exist_ok=True)
        pack_files(copy, (path for path in copy.rglob("*") if path.is_file()), target)
    print(f"{target}: {target.stat().st_size / 1e6:.2f} MB")


def unpack(folder: Path, packed: Path = PACKED) -> None:
    """Unpack the runs of the archive into a folder, with a store of them and of the peaks."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    ingest_path(folder / STORE, folder / RUNS)
    measured = msgspec.json.decode((folder / PEAKS).read_bytes(), type=Measured)
    with open_store(folder / STORE, write=True) as store:
        store.add_peaks(measured.peaks, measured.created, measured.environment)


def command(*words: str) -> None:
    """Run one command line of profharness in this process, and discard its output."""
    name, *rest = words
    silence = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        find_command(name).main(rest, standalone_mode=False)


@dataclass
class Figures:
    """Figures for a template, from the runs of one study in `folder`. Pictures are written to
    `beside`.
    """

    study: Study
    folder: Path
    beside: Path
    pictures: int = 0
    answers: dict[tuple[str, ...], list[dict[str, Any]]] = field(default_factory=dict)

    def run(self, name: str) -> str:
        """Return the id of a run: the first in its folder, because runs that verified its outputs
        came later.

        STUDY/NAME is a run of another study.
        """
        place = self.folder / RUNS / (name if "/" in name else f"{self.study.name}/{name}")
        runs = [read_run(record.parent) for record in place.glob("*/run.json")]
        return min(runs, key=lambda run: (run.created, run.run)).run

    def words(self, text: str) -> tuple[str, ...]:
        """Return a command line as words, with {NAME} replaced by the run of that name."""
        runs = {name: self.run(name) for name in self.study.runs}
        return (*(word.format(**runs) for word in text.split()), "--store", self.store)

    @property
    def store(self) -> str:
        return str(self.folder / STORE)

    def rows(self, text: str, **keys: Any) -> list[dict[str, Any]]:
        """Return the JSON rows of a command that have these values."""
        words = self.words(text)
        if words not in self.answers:
            with tempfile.TemporaryDirectory() as scratch:
                path = Path(scratch) / "answer.json"
                command(*words, "-o", str(path))
                self.answers[words] = json.loads(path.read_bytes())["rows"]
        if "config" in keys:
            keys["config"] = parse_config(keys["config"]).label
        return [row for row in self.answers[words] if keys.items() <= row.items()]

    def row(self, text: str, **keys: Any) -> dict[str, Any]:
        """Return the only row with these values."""
        rows = self.rows(text, **keys)
        if len(rows) != 1:
            raise ValueError(f"{len(rows)} rows of {text!r} have {keys}")
        return rows[0]

    def bench(self, config: str, backend: str, name: str = "graph", run: str = "bench") -> Any:
        """Return the row of one cell and measurement of a bench. With an empty name, return the
        cell's only row.
        """
        keys = {"measurement": name} if name else {}
        return self.row(f"bench --run {{{run}}}", config=config, backend=backend, **keys)

    def us(self, config: str, backend: str, name: str = "graph", run: str = "bench") -> float:
        """Return the median of one cell in µs."""
        return float(self.bench(config, backend, name, run)["median_ns"]) / 1000

    def answer(self, text: str, level: int = 3) -> str:
        """Return the Markdown output of a command, with its first heading at that level."""
        self.pictures += 1
        report = self.beside / f"{self.study.name}-{self.pictures}.md"
        command(*self.words(text), "-o", str(report), "--format", "md", "--force")
        answered = report.read_text(encoding="utf-8")
        report.unlink()
        return lowered(answered, level - 1).strip()

    def printed(self, name: str) -> str:
        """Return the output of a script."""
        return (self.folder / PRINTED / f"{name}.txt").read_text(encoding="utf-8").rstrip()

    def machine(self) -> str:
        """Describe the machine of the runs."""
        run = self.run(next(iter(self.study.runs)))
        with open_store(Path(self.store)) as store:
            facts = store.environment(run)
        cudnn = int(facts["cudnn"])
        day = f"{run[:4]}-{run[4:6]}-{run[6:8]}"
        return (
            f"All measurements were made on {day} on one {facts['gpu']} ({facts['num_sms']} SMs, "
            f"driver {facts['driver']}) with torch {facts['torch']} and cuDNN "
            f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
        )


def lowered(text: str, levels: int) -> str:
    """Return Markdown with every heading that many levels lower. Code is unchanged."""
    lines, code = [], False
    for line in text.splitlines():
        code ^= line.startswith("```")
        lines.append(f"{'#' * levels}{line}" if line.startswith("#") and not code else line)
    return "\n".join(lines) + "\n"


def claim(holds: bool, text: str = "") -> str:
    """Return the text if the claim holds, else raise ValueError."""
    if not holds:
        raise ValueError(f"the data contradict this: {text}")
    return text


def verdict(holds: bool) -> str:
    """Return whether a published statement holds, in words."""
    return "holds" if holds else "does not hold"


def digits(value: float, count: int = 3) -> str:
    """Format a number with this many significant digits and a separator for thousands."""
    if abs(value) >= 10 ** (count - 1):
        return f"{value:,.0f}"
    return f"{value:#.{count}g}".rstrip(".")


def pages(folder: Path, target: Path, studies: Sequence[Study]) -> Iterator[Path]:
    """Write the page of each study and its pictures into `target`."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["digits"] = digits
    for study in studies:
        figures = Figures(study, folder, target)
        names = ("rows", "row", "bench", "us", "answer", "printed", "machine", "run")
        given = {name: getattr(figures, name) for name in names}
        commands = {name: shlex.join(words) for name, words in study.runs.items()}
        template = environment.get_template(f"{study.name}.md")
        try:
            text = template.render(
                **given, zip=zip, claim=claim, verdict=verdict, commands=commands
            )
        except (ValueError, KeyError, TypeError, jinja2.TemplateError) as error:
            raise SystemExit(f"{study.name}: {error!r}") from error
        meanings = "".join(f"- **{word}**: {said}\n" for word, said in words_of(text).items())
        page = target / f"{study.name}.md"
        page.write_text(f"{text.rstrip()}\n\n## Words\n\n{meanings}", encoding="utf-8")
        yield page


def write(studies: Sequence[Study], target: Path = PAGES) -> list[Path]:
    """Write the pages of the packed runs, and remove pictures that no page uses. Return the pages."""
    with tempfile.TemporaryDirectory() as scratch:
        unpack(Path(scratch))
        for study in studies:
            for picture in target.glob(f"{study.name}-[0-9]*.svg"):
                picture.unlink()
        return list(pages(Path(scratch), target, studies))


def outdated(studies: Sequence[Study], committed: Path = PAGES) -> list[str]:
    """Return the names of pages and pictures that `write` would change, add or remove."""
    with tempfile.TemporaryDirectory() as scratch:
        write(studies, Path(scratch))
        new, old = contents(Path(scratch), studies), contents(committed, studies)
    return sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))


def contents(folder: Path, studies: Sequence[Study]) -> dict[str, bytes]:
    """Return the pages and pictures of the studies in a folder."""
    patterns = (f"{study.name}{end}" for study in studies for end in (".md", "-[0-9]*.svg"))
    return {path.name: path.read_bytes() for each in patterns for path in folder.glob(each)}


def main() -> None:
    """Measure, pack, unpack, write or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["measure", "pack", "store", "write", "check"])
    parser.add_argument("folder", type=Path, nargs="?")
    names = [study.name for study in STUDIES]
    parser.add_argument(
        "--study", action="append", choices=names, help="only this study; repeatable"
    )
    given = parser.parse_args()
    if given.what not in ("write", "check") and given.folder is None:
        parser.error(f"{given.what} requires a FOLDER")
    chosen = [study for study in STUDIES if study.name in (given.study or names)]
    if given.what == "measure":
        measure(given.folder.resolve(), chosen)
    elif given.what == "pack":
        pack(given.folder.resolve())
    elif given.what == "store":
        unpack(given.folder.resolve())
    elif given.what == "write":
        print(*write(chosen), sep="\n")
    elif names := outdated(chosen):
        raise SystemExit("not current; run `make_studies.py write`: " + ", ".join(names))


if __name__ == "__main__":
    main()
