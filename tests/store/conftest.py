"""Make run folders from a real H200 trace, whose ranges are renamed to cells of a run."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from profharness.attention.config import parse_config
from profharness.rows import Refusal
from profharness.run import Cell, Protocol, Run, TraceFile, write_run

KINETO = Path(__file__).parent.parent / "data" / "kineto_h200.json.gz"
RANGE = "b2h8s512d64-fp16/"
Folder = Callable[..., Path]


@pytest.fixture(scope="session")
def kineto() -> Path:
    """Return a real trace: 384 launches on an H200, one range per backend with three calls each."""
    return KINETO


@pytest.fixture
def run_folder(tmp_path: Path) -> Folder:
    """Return a function that makes a run folder.

    `cells` maps a cell id to the backends whose ranges become its calls.
    """

    def make(
        run: str = "20261121-aaaa",
        created: str = "2026-11-21T10:00:00+00:00",
        cells: dict[str, list[str]] | None = None,
        samples: list[int] | None = None,
        dtype: str = "fp16",
    ) -> Path:
        folder = tmp_path / run
        folder.mkdir(exist_ok=True)
        cells = cells if cells is not None else {"c0": ["flash"], "c1": ["efficient"]}
        text = gzip.decompress(KINETO.read_bytes()).decode()
        for cell, backends in cells.items():
            for backend in backends:
                text = text.replace(f'"{RANGE}{backend}"', f'"profharness:{cell}"')
        text = text.replace(f'"{RANGE}math"', '"profharness:warmup"')
        (folder / "torch.json.gz").write_bytes(gzip.compress(text.encode()))
        config = parse_config(f"2,8,512,64,{dtype}")
        ran = tuple(
            Cell(
                cell,
                config,
                backends[0] if backends else "flash",
                status="ok",
                iterations=len(backends),
                samples={"event": samples or [5, 1, 3, 9]},
                clocks={"sm_mhz": 1980},
            )
            for cell, backends in cells.items()
        )
        refused = Cell(
            "c9",
            config,
            "cudnn",
            status="refused",
            refusals=(Refusal("head_dim", "too large"), Refusal("dtype", "no", "rule")),
        )
        traces = (TraceFile("torch", "torch.json.gz", tuple(cells)),)
        write_run(
            folder,
            Run(run, created, ("torch",), Protocol(), (*ran, refused), {"torch": "2.11"}, traces),
        )
        return folder

    return make
