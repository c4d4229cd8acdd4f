"""Small programs with attention, and a function that runs them under `profharness observe`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profharness.run import observed_rows
from profharness.traces.observed import ObservedCall, read_observed

MODEL = """
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x, mask=None):
        shape = (x.shape[0], -1, 4, 8)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(x.shape))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()

    def forward(self, x, mask=None):
        return x + self.attn(x, mask)

class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = layer(x, mask)
        return x

def train(steps, model=None):
    model = model or Model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(steps):
        model(torch.randn(2, 16, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def infer(passes, model=None, mask=None, rows=16):
    model = model or Model()
    with torch.no_grad():
        for _ in range(passes):
            y = model(torch.randn(2, rows, 32), mask)
    return y
"""


@dataclass(frozen=True)
class Seen:
    """The result of a program under `profharness observe`. `calls` are those of all its processes."""

    code: int
    stdout: str
    stderr: str
    folder: Path | None
    calls: tuple[ObservedCall, ...] = ()

    @property
    def record(self) -> dict[str, Any]:
        """The run's record."""
        assert self.folder is not None, self.stderr
        found: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        return found

    def windows(self) -> list[dict[str, Any]]:
        """The window events of the processes' journals."""
        assert self.folder is not None, self.stderr
        journals = sorted(self.folder.glob("[0-9]*.jsonl"))
        rows = [row for path in journals for row in observed_rows(path)]
        return [row for row in rows if row and row["event"] == "window"]

    def counts(self) -> dict[str | None, int]:
        """Calls by module path, over all processes."""
        found: dict[str | None, int] = {}
        for item in self.calls:
            found[item.call.path] = found.get(item.call.path, 0) + item.count
        return found


def write(folder: Path, body: str, name: str = "program.py") -> Path:
    """Write a program with the model above and a body. The model can be imported as `model`."""
    (folder / "model.py").write_text(MODEL)
    path = folder / name
    path.write_text(f"from model import *\n{body}\n")
    return path


def run_unobserved(
    *argv: str | Path, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command line of Python."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=False,
    )


def observe(
    folder: Path,
    *argv: str | Path,
    options: Sequence[str] = ("--profiler", "none"),
    environment: Mapping[str, str | None] | None = None,
    text: str = "",
) -> Seen:
    """Run a command line of Python in a folder. Variables of None are unset."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    command = [sys.executable, "-m", "profharness", "observe", *options, "--"]
    done = subprocess.run(
        [*command, sys.executable, *map(str, argv)],
        input=text,
        capture_output=True,
        text=True,
        cwd=folder,
        env={name: value for name, value in variables.items() if value is not None},
        check=False,
    )
    folders = sorted(path.parent for path in (folder / "traces" / "runs").glob("*/run.json"))
    found = folders[-1] if folders else None
    calls = read_observed(found) if found else ()
    return Seen(done.returncode, done.stdout, done.stderr, found, calls)
