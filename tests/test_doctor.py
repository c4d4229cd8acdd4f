"""doctor's checks of profilers and their environment, with real files and processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from profharness.commands.doctor import (
    check_compilers,
    check_counters,
    check_dcgm,
    check_extra,
    check_importer,
    check_injection,
    check_ncu_driver,
    check_rocm,
    check_sandbox,
    check_store,
    check_tmpdir,
    check_tool,
    find_importer,
    may_administer,
    missing_libraries,
    packages_remedy,
    process_names,
    run_checks,
)
from profharness.environment import EXTRAS, amd_driver_version, rocm_libraries
from profharness.recording.profilers.base import Tool
from profharness.store.schema import connect

LDD = """\tlinux-vdso.so.1 (0x00007ffc)
\tlibdw.so.1 => not found
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)
\tlibelf.so.1 => not found
\tlibodd.so.9 => not found
\tlibdw.so.1 => not found
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_store_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    assert check_store(path).state == "ok"
    connect(path, write=True).close()
    assert check_store(path).state == "ok"
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        shutil.copyfile(path, disk / "s.db")
        full = check_store(disk / "s.db")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        stored, new = check_store(disk / "s.db"), check_store(disk / "new.db")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    assert (full.state, "free bytes" in full.detail) == ("warning", True)
    assert (stored.state, "is read-only" in stored.detail) == ("warning", True)
    assert (new.state, "is read-only" in new.detail) == ("warning", True)


def program(path: Path) -> Path:
    """Return a real executable with shared libraries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile("/bin/sleep", path)
    path.chmod(0o755)
    return path


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder that is first on PATH, with all relevant variables unset."""
    for name in ("PROFHARNESS_NSYS", "PROFHARNESS_NCU", "CUDA_INJECTION64_PATH", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "first"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_tools_are_found_with_their_versions(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(clean / "nsys", "echo NVIDIA Nsight Systems version 2025.3.1.90-25v0")
    tool, check = check_tool("nsys")
    assert tool == Tool("nsys", clean / "nsys", "2025.3.1.90", True)
    assert (check.state, check.detail) == ("ok", "2025.3.1.90, on PATH")
    other = script(clean / "elsewhere" / "ncu", "echo Version 2025.3.1.0")
    monkeypatch.setenv("PROFHARNESS_NCU", str(other))
    _, check = check_tool("ncu")
    assert (check.state, check.detail) == ("ok", f"2025.3.1.0, not on PATH: {other}")


def test_a_wrong_variable_and_a_broken_tool_are_warnings(
    clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(clean / "nsys", "exit 127")
    tool, check = check_tool("nsys")
    assert tool is not None
    assert (check.state, check.detail) == ("warning", "does not print a version, on PATH")
    assert str(clean / "nsys") in check.remedy
    monkeypatch.setenv("PROFHARNESS_NSYS", str(clean / "no"))
    tool, check = check_tool("nsys")
    assert tool is None
    assert check.state == "warning"
    assert "PROFHARNESS_NSYS" in check.detail


@pytest.mark.parametrize(
    ("nsys", "importer"),
    [
        ("n/target-linux-x64/nsys", "n/host-linux-x64/QdstrmImporter"),
        ("n/bin/nsys", "n/host-linux-x64/QdstrmImporter"),
        ("n/target-linux-sbsa-armv8/nsys", "n/host-linux-armv8/QdstrmImporter"),
        ("n/nsys", "n/QdstrmImporter"),
        ("n/nsys", "n/host-linux-x64/QdstrmImporter"),
        (
            "c/host/target-linux-x64/nsys",
            "c/host/linux-desktop-glibc_2_11_3-x64/QdstrmImporter",
        ),
    ],
)
def test_the_importer_in_the_folder_of_nsys(nsys: str, importer: str, tmp_path: Path) -> None:
    tool = program(tmp_path / nsys)
    assert find_importer(tool) is None
    expected = program(tmp_path / importer)
    assert find_importer(tool) == expected
    link = tmp_path / "link"
    link.symlink_to(tool)
    assert find_importer(link) == expected
    check = check_importer(Tool("nsys", link, "2025.3.1", True))
    assert (check.state, check.detail) == ("ok", str(expected))


def test_the_importer_in_debians_folder_is_not_found(tmp_path: Path) -> None:
    nsys = program(tmp_path / "usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys")
    program(tmp_path / "usr/lib/nsight-systems/host-linux-x64/QdstrmImporter")
    tool = Tool("nsys", nsys, "2024.2.3", True)
    check = check_importer(tool)
    assert check.state == "warning"
    folder = tmp_path / "usr/lib/x86_64-linux-gnu/nsight-systems/host-linux-x64"
    assert str(folder) in check.remedy
    folder.symlink_to("../../nsight-systems/host-linux-x64")
    assert check_importer(tool).state == "ok"


def test_a_wrapper_does_not_reveal_its_importer(tmp_path: Path) -> None:
    nsys = script(tmp_path / "bin" / "nsys", "exec /elsewhere/nsys")
    assert check_importer(Tool("nsys", nsys, "2025.3.1", True)).state == "absent"


def test_a_missing_library_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsys = program(tmp_path / "n/target-linux-x64/nsys")
    program(tmp_path / "n/host-linux-x64/QdstrmImporter")
    (tmp_path / "ldd.txt").write_text(LDD)
    script(tmp_path / "bin" / "ldd", f"cat {tmp_path}/ldd.txt")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    check = check_importer(Tool("nsys", nsys, "2025.3.1", True))
    assert check.state == "warning"
    assert "lacks libdw.so.1, libelf.so.1, libodd.so.9" in check.detail
    assert "install libdw1 libelf1 (" in check.remedy
    assert "libodd.so.9" in check.remedy


def test_ldd() -> None:
    assert missing_libraries(Path("/bin/sleep")) == []
    assert missing_libraries(Path("/no/such/file")) is None
    assert (
        packages_remedy(["libssh.so.4"])
        == "install libssh-4 (these are the package names on Debian and Ubuntu)"
    )


@pytest.mark.parametrize(
    ("ncu", "driver", "warns"),
    [
        ("2025.3.1.0", "580.65.06", False),
        ("2025.3.1.0", "575.57.08", True),
        ("2024.1.1.0", "550.54.14", False),
        ("2024.1.1.0", "535.86", True),
        ("2031.1.0", "535.86", False),
        ("2025", "535.86", False),
        ("2025.3.1.0", "unknown", False),
        (None, "535.86", False),
        ("2025.3.1.0", None, False),
    ],
)
def test_ncu_and_driver(ncu: str | None, driver: str | None, warns: bool) -> None:
    checks = check_ncu_driver(ncu, driver)
    assert [check.state for check in checks] == (["warning"] if warns else [])
    assert all("LibraryNotLoaded" in check.remedy for check in checks)


def test_the_reader_in_the_folder_of_ncu(clean: Path, tmp_path: Path) -> None:
    """Run in an interpreter without a package of that name."""
    ncu = script(tmp_path / "c" / "ncu", "echo Version 2025.3.1.0")
    (clean / "ncu").symlink_to(ncu)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from importlib import metadata\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "from profharness.commands.doctor import check_ncu_reader; print(check_ncu_reader().detail)"
    )
    root = str(Path(__file__).resolve().parents[1])

    def detail() -> str:
        argv = [sys.executable, "-Ic", code, root]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

    assert detail() == "not installed"
    module = tmp_path / "c" / "extras" / "python" / "ncu_report.py"
    module.parent.mkdir(parents=True)
    module.touch()
    assert str(module) in detail()


@pytest.mark.parametrize(
    ("text", "privileged", "state"),
    [
        (None, True, "absent"),
        ("RmProfilingAdminOnly: 0\n", False, "ok"),
        ("RmProfilingAdminOnly: 1\n", True, "ok"),
        ("RmProfilingAdminOnly: 1\n", False, "warning"),
    ],
)
def test_counters(text: str | None, privileged: bool, state: str) -> None:
    assert check_counters(text, privileged=privileged).state == state


def test_administrators(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nCapEff:\t000001ffffffffff\n")
    assert may_administer(status)
    status.write_text("Name:\tpython\nCapEff:\t00000000a80425fb\n")  # docker's root
    assert not may_administer(status)
    assert not may_administer(tmp_path / "no")


def test_tmpdir(tmp_path: Path) -> None:
    assert check_tmpdir(tmp_path).state == "ok"
    assert check_tmpdir(tmp_path / "no").state == "warning"
    (tmp_path / "nsight-compute-lock").touch()
    assert check_tmpdir(tmp_path).state == "ok"  # a lock of this user is fine


@pytest.fixture
def nobody() -> Iterator[Path]:
    """Yield a folder that others may enter, without root's rights during the test."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        user = os.geteuid()
        if user == 0:
            os.chown(name, 65534, 65534)
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            os.seteuid(user)


def test_tmpdir_with_the_lock_of_another(nobody: Path) -> None:
    lock = nobody / "nsight-compute-lock"
    lock.touch(mode=0o444)
    check = check_tmpdir(nobody)
    assert check.state == "warning"
    assert check.detail == f"{lock} belongs to another user"


def test_tmpdir_that_cannot_be_written(nobody: Path) -> None:
    assert check_tmpdir(nobody).state == "ok"
    nobody.chmod(0o555)
    assert check_tmpdir(nobody).state == "warning"


def test_injection() -> None:
    assert check_injection(None) == check_injection("") == []
    assert "/x/lib.so" in check_injection("/x/lib.so")[0].detail


def test_dcgm_by_its_real_process(tmp_path: Path) -> None:
    process = subprocess.Popen([program(tmp_path / "nv-hostengine"), "60"])
    try:
        until(lambda: check_dcgm(process_names()), process)
        checks = check_dcgm(process_names())
    finally:
        process.kill()
        process.wait()
    assert "nv-hostengine" in checks[0].detail
    assert "dcgmi profile --pause" in checks[0].remedy
    assert check_dcgm(["bash", "not-nv-hostengine"]) == []


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016\n", True),
        ("Linux version 4.19.0-gvisor #1 SMP Sun Jan 10 15:06:54 PST 2016\n", True),
        ("Linux version 4.4.0-210-generic (buildd@lgw01) #242-Ubuntu SMP Fri Apr 16 2021\n", False),
        ("Linux version 6.1.0-18-amd64 (debian-kernel@lists.debian.org)\n", False),
        (None, False),
    ],
)
def test_sandbox(version: str | None, found: bool) -> None:
    assert bool(check_sandbox(version)) == found


def test_compilers_of_kernels() -> None:
    there, nvrtc = check_compilers({"triton": "3.6.0"})
    assert (there.state, there.detail) == ("ok", "3.6.0")
    assert (nvrtc.state, nvrtc.detail.partition(".")[0].isdigit()) == ("ok", True)
    for told in ({"triton": None}, "no worker starts"):
        absent = check_compilers(told)[0]
        assert (absent.state, "profharness[kernels]" in absent.remedy) == ("absent", True)


def test_the_extras_equal_those_of_the_build_file() -> None:
    """`docs`, `test` and `train` are for development, so doctor does not check them. Packages that can be
    installed but not imported are left out.
    """
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    offered = tomllib.loads(text)["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(offered) - {"docs", "test", "train"}
    for name, extra in EXTRAS.items():
        packages = {re.split(r"[<>=]", requirement)[0] for requirement in offered[name]}
        assert set(extra.modules.values()) <= packages


@pytest.mark.parametrize("extra", ["report", "web", "mcp", "cluster"])
def test_an_extra_has_its_versions_or_its_remedy(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = EXTRAS[extra].modules
    there = check_extra(extra)
    assert there.state == "ok" and all(package in there.detail for package in modules.values())
    first = next(iter(modules))
    monkeypatch.setitem(sys.modules, first, None)
    absent = check_extra(extra)
    assert absent.state == "absent" and f"package {modules[first]} is not" in absent.detail
    assert absent.remedy == f"pip install 'profharness[{extra}]'"


def test_a_missing_nvrtc_has_its_remedy() -> None:
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "from profharness.commands.doctor import check_compilers\n"
        "print(check_compilers({})[1])"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "state='absent'" in done.stdout and "profharness[kernels]'" in done.stdout


def test_run_checks_without_a_worker(clean: Path, tmp_path: Path) -> None:
    script(clean / "nsys", "echo NVIDIA Nsight Systems version 2025.3.1.90-25v0")
    checks = run_checks(tmp_path / "store.db", lambda: "no worker starts")
    states = {check.name: check.state for check in checks}
    assert len(states) == len(checks)
    assert states["torch"] == "missing"
    assert states["nsys"] == states["Python"] == states["SQLite"] == states["store"] == "ok"
    assert {"nsys importer", "ncu", "counters", "TMPDIR", "ncu-report"} <= set(states)
    assert {"extra report", "extra web", "extra mcp", "extra cluster"} <= set(states)
    assert set(states.values()) <= {"ok", "warning", "missing", "absent"}
    assert all(check.remedy for check in checks if check.state in ("warning", "missing"))
    assert not (tmp_path / "store.db").exists()


@pytest.mark.usefixtures("clean")
def test_the_command_prints_them_as_json(tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-m", "profharness", "doctor", "--format", "json"]
    argv += ["--store", str(tmp_path / "store.db")]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=False)
    document = json.loads(done.stdout)
    assert document["schema"] == "profharness.doctor/1"
    assert set(document["rows"][0]) == {"name", "state", "detail", "remedy"}
    missing = any(row["state"] == "missing" for row in document["rows"])
    assert done.returncode == int(missing)


ROCM = {
    "torch": "2.9.1+rocm7.2.4",
    "torch_hip": "7.2.53211",
    "gpu": "AMD Instinct MI300X",
    "architecture": "gfx942",
    "num_sms": 304,
    "driver": "6.16.13",
    "aotriton": "0.11.1",
    "roctracer": ["libroctracer64.so.4.1.70200"],
}


def test_a_rocm_build_of_torch_is_checked() -> None:
    checks = {check.name: check for check in check_rocm(ROCM, {}, vllm=True)}
    assert checks["GPU"].detail == "AMD Instinct MI300X, gfx942, 304 compute units"
    assert checks["driver"].detail == "amdgpu 6.16.13"
    assert checks["AOTriton"].state == "ok" and "0.11.1" in checks["AOTriton"].detail
    assert checks["roctracer"].state == "warning"
    assert checks["vLLM"].state == "warning" and "VLLM_ROCM_USE_AITER=1" in checks["vLLM"].remedy


def test_a_sound_rocm_build_has_no_warning() -> None:
    sound = ROCM | {"roctracer": ["libroctracer64.so.4.1.70204"]}
    checks = check_rocm(sound, {"VLLM_ROCM_USE_AITER": "0"}, vllm=True)
    assert {check.state for check in checks} == {"ok"}
    assert all(check.name != "vLLM" for check in check_rocm(sound, {}, vllm=False))
    old = check_rocm(sound | {"architecture": "gfx90a"}, {}, vllm=True)
    assert all(check.name != "vLLM" for check in old)  # AITER does not support gfx90a
    (without,) = (
        c for c in check_rocm(sound | {"aotriton": None}, {}, vllm=False) if c.state != "ok"
    )
    assert without.name == "AOTriton"


def test_libraries_of_a_rocm_build_are_found(tmp_path: Path) -> None:
    for name in (
        "libaotriton_v2.so",
        "libaotriton_v2.so.0.11.1",
        "libroctracer64.so.4.1.70200",
        "libc10.so",
    ):
        (tmp_path / name).touch()
    assert rocm_libraries(tmp_path) == {
        "aotriton": "0.11.1", "roctracer": ["libroctracer64.so.4.1.70200"],
    }  # fmt: skip
    assert rocm_libraries(tmp_path / "none") == {"aotriton": None, "roctracer": []}
    (tmp_path / "amdgpu").mkdir()
    assert amd_driver_version(tmp_path / "amdgpu") == "in the kernel"
    (tmp_path / "amdgpu" / "version").write_text("6.16.13\n")
    assert amd_driver_version(tmp_path / "amdgpu") == "6.16.13"
    assert amd_driver_version(tmp_path / "missing") is None


def test_a_rocm_build_needs_no_tool_of_nvidia(tmp_path: Path) -> None:
    names = [check.name for check in run_checks(tmp_path / "s.db", lambda: ROCM)]
    assert "rocprofv3" in names and "roctracer" in names
    assert not {"nsys", "ncu", "CUDA", "cuDNN", "counters"} & set(names)
