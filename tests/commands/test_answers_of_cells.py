"""The sentences with which `kernels`, `bench`, `explain`, `predict` and `verify` answer, on stored
runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from profharness.cli import find_command
from profharness.errors import GateError
from profharness.store import ingest_path

ROOT = Path(__file__).parents[2]
H200 = ROOT / "traces" / "h200-torch2.11"

# its fixture takes seconds: one process makes it once
pytestmark = pytest.mark.xdist_group("answers-of-cells")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "profharness.db"
    ingest_path(path, H200)
    return path


def invoke(*words: object) -> Result:
    name, *arguments = map(str, words)
    return CliRunner().invoke(find_command(name), arguments)


def test_a_gate_that_is_met_says_so_on_stderr(store: Path) -> None:
    asked = ("kernels", "--store", store, "--backend", "flash")
    met = invoke(*asked, "--expect", "flash")
    assert met.exit_code == 0
    assert met.stderr.splitlines()[-1] == "gate passed: --expect flash"
    assert "gate passed" not in met.stdout
    assert "gate passed" not in invoke(*asked).stderr
    unmet = invoke(*asked, "--expect", "math")
    assert isinstance(unmet.exception, GateError)
    assert "gate passed" not in unmet.stderr
