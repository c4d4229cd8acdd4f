"""Selection of executables, with real files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_tools import Scenario, install
from hypothesis import given
from hypothesis import strategies as st

from profharness.recording.profilers import (
    PROFILERS,
    find_tool,
    installed,
    parse_version,
    require_tool,
)
from profharness.recording.profilers.base import Tool, ToolError, version_key

PATTERNS = {name: PROFILERS[name].patterns for name in ("nsys", "ncu")}


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the tools installed on this machine."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("PROFHARNESS_NSYS", raising=False)
    monkeypatch.delenv("PROFHARNESS_NCU", raising=False)
    look_in(monkeypatch, {"nsys": (), "ncu": ()})


def look_in(monkeypatch: pytest.MonkeyPatch, places: dict[str, tuple[str, ...]]) -> None:
    for name, patterns in places.items():
        monkeypatch.setitem(PROFILERS, name, replace(PROFILERS[name], patterns=patterns))


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["nsys", "ncu"])
def test_tool_on_path_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "bin", Scenario(nsys_version="2024.2.3.38-1v0", ncu_version="2024.1.1.0"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    version = {"nsys": "2024.2.3.38", "ncu": "2024.1.1.0"}[name]
    expected = Tool(name, tmp_path / "bin" / name, version, True)
    assert find_tool(name) == expected
    assert require_tool(name) == expected


def test_variable_precedes_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "bin", Scenario())
    install(tmp_path / "other", Scenario(nsys_version="2026.1.1.1-1v0"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PROFHARNESS_NSYS", str(tmp_path / "other" / "nsys"))
    assert find_tool("nsys") == Tool("nsys", tmp_path / "other" / "nsys", "2026.1.1.1", False)
    ncu = find_tool("ncu")
    assert ncu is not None
    assert ncu.path == tmp_path / "bin" / "ncu"


def test_variable_without_an_executable_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Using the nsys on PATH instead would go unnoticed."""
    install(tmp_path / "bin", Scenario())
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "plain").write_text("no program")
    for value in (str(tmp_path / "no" / "nsys"), str(tmp_path), str(tmp_path / "plain")):
        monkeypatch.setenv("PROFHARNESS_NSYS", value)
        with pytest.raises(ToolError, match=r"PROFHARNESS_NSYS.*\[tool_missing\]"):
            find_tool("nsys")
    monkeypatch.setenv("PROFHARNESS_NSYS", "")
    assert find_tool("nsys") is not None


def test_missing_tool_is_an_error() -> None:
    assert find_tool("nsys") is None
    with pytest.raises(ToolError, match=r"install NVIDIA Nsight Compute.*\[tool_missing\]"):
        require_tool("ncu")


def test_newest_version_is_selected_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_in(monkeypatch, PATTERNS)
    paths = [
        executable(tmp_path / f"opt/nvidia/nsight-compute/{version}/ncu")
        for version in ("2025.10.1", "2025.9.3", "2024.1.1")
    ]
    (tmp_path / "opt/nvidia/nsight-compute/2026.1.0").mkdir()
    (tmp_path / "opt/nvidia/nsight-compute/2026.1.0/ncu").write_text("not executable")
    cuda = executable(tmp_path / "usr/local/cuda-13.0/bin/ncu")
    assert installed("ncu", tmp_path) == [*paths, cuda]


def test_nsys_of_nsight_compute_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_in(monkeypatch, PATTERNS)
    inner = "opt/nvidia/nsight-compute/2025.3.1/host/target-linux-x64/nsys"
    last = executable(tmp_path / inner)
    assert installed("nsys", tmp_path) == [last]
    first = executable(tmp_path / "opt/nvidia/nsight-systems-cli/2024.2.3/bin/nsys")
    assert installed("nsys", tmp_path) == [first, last]


def test_tool_outside_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "place", Scenario())
    pattern = str(tmp_path / "pl*" / "nsys").lstrip("/")
    look_in(monkeypatch, {"nsys": (pattern,)})
    assert find_tool("nsys") == Tool("nsys", tmp_path / "place" / "nsys", "2025.3.1.90", False)


def test_version_of_a_wrapper_and_of_a_broken_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "bin", Scenario())
    wrapper = executable(tmp_path / "wrapper")
    wrapper.write_text(f'#!/bin/sh\nexec {tmp_path}/bin/ncu "$@"\n')
    monkeypatch.setenv("PROFHARNESS_NCU", str(wrapper))
    assert find_tool("ncu") == Tool("ncu", wrapper, "2025.3.1.0", False)
    wrapper.write_text("#!/bin/sh\necho broken >&2; exit 127\n")
    assert find_tool("ncu") == Tool("ncu", wrapper, None, False)


@given(st.lists(st.integers(0, 3000), min_size=2, max_size=4))
def test_versions_are_parsed_and_compared_as_numbers(numbers: list[int]) -> None:
    text = ".".join(map(str, numbers))
    for line in (
        f"NVIDIA Nsight Systems version {text}-234433681190v0",
        f"NVIDIA (R) Nsight\nCopyright (c) 2018-2025\nVersion {text} (build 33998838)",
    ):
        assert parse_version(line) == text
    assert version_key(text) == tuple(numbers)
    assert parse_version("no such thing") is None
