"""CUDA sources compiled by the real NVRTC, without a GPU: the cache, its files, and what errors say."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'profharness[kernels]'")

from profharness.backends.base import RefusedError
from profharness.backends.cuda_launch import (
    Arguments,
    CompiledSource,
    LaunchError,
    _three,
    cache_folder,
    local_files,
    read_cached,
    why_not_trusted,
    write_cached,
)
from profharness.backends.cuda_source import CompileError, CudaSource, architecture
from profharness.config import expand_configs
from profharness.run import CaptureOptions, Protocol, read_run
from profharness.runner import capture

ROOT = Path(__file__).resolve().parents[2]
TEXT = """#include "parts/value.cuh"
template <class T, int N>
__global__ void fill(T* out) { out[threadIdx.x] = VALUE + N; }
extern "C" __global__ void plain(float* out) { out[0] = VALUE; }
"""
NAME = "fill<float, 8>"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaSource:
    """A source with a header in a folder of its own, which includes another one; an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "value.cuh").write_text('#pragma once\n# include "deep.cuh"\n')
    (tmp_path / "parts" / "deep.cuh").write_text("#define VALUE 1\n")
    (tmp_path / "made.cu").write_text(TEXT)
    return CudaSource(tmp_path / "made.cu")


def again(source: CudaSource, **options: object) -> CudaSource:
    return CudaSource(source.path, options)


def files() -> list[Path]:
    return sorted(path for path in cache_folder().glob("**/*") if path.is_file())


def test_templates_and_plain_names_compile_to_a_cubin(source: CudaSource) -> None:
    made = source.cubin([NAME, "fill<double, 2>", "plain"], "sm_90a")
    assert made.cubin.startswith(b"\x7fELF")
    assert made.names["plain"] == "plain"
    assert made.names[NAME].startswith("_Z4fillIfLi8EE")
    assert all(name.encode() in made.cubin for name in made.names.values())
    assert (made.arch, made.from_cache) == ("sm_90a", False)
    assert b"made.cu" in made.cubin  # line information, by which ncu finds the source


def test_a_second_compile_comes_from_the_cache(source: CudaSource) -> None:
    first = source.cubin([NAME], "sm_80")
    (file,) = files()
    written = file.stat().st_mtime_ns
    second = again(source).cubin([NAME], "sm_80")
    assert second.from_cache and not first.from_cache
    assert (second.cubin, second.names) == (first.cubin, first.names)
    assert files() == [file] and file.stat().st_mtime_ns == written


def test_what_decides_the_cubin_decides_the_cache_entry(source: CudaSource) -> None:
    told = [
        source.cubin([NAME], "sm_80"),
        source.cubin([NAME], "sm_90a"),
        source.cubin(["plain"], "sm_80"),
        again(source, max_register_count=32).cubin([NAME], "sm_80"),
    ]
    source.path.write_text(TEXT + "// changed\n")
    told.append(again(source).cubin([NAME], "sm_80"))
    (source.path.parent / "parts" / "deep.cuh").write_text("#define VALUE 2\n")
    told.append(again(source).cubin([NAME], "sm_80"))
    assert [each.from_cache for each in told] == [False] * 6
    assert len(files()) == 6
    assert told[-1].cubin != told[-2].cubin


def test_an_option_reaches_the_compiler(source: CudaSource) -> None:
    source.path.write_text('extern "C" __global__ void plain(int* out) { out[0] = GIVEN; }\n')
    with pytest.raises(CompileError, match='identifier "GIVEN" is undefined'):
        source.cubin(["plain"], "sm_80")
    assert again(source, define_macro=("GIVEN", "7")).cubin(["plain"], "sm_80").cubin


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "foreign", "folder"])
def test_a_broken_cache_file_is_compiled_anew(source: CudaSource, damage: str) -> None:
    first = source.cubin([NAME], "sm_80")
    (file,) = files()
    content = file.read_bytes()
    flipped = bytes([*content[:100], content[100] ^ 1, *content[101:]])
    broken = {"empty": b"", "cut": content[:-20], "flipped": flipped, "foreign": b"{}" * 99}
    file.unlink()
    if damage == "folder":
        file.mkdir()
    else:
        file.write_bytes(broken[damage])
    healed = again(source).cubin([NAME], "sm_80")
    assert not healed.from_cache
    assert healed.names == first.names
    if damage != "folder":
        assert again(source).cubin([NAME], "sm_80").from_cache


def test_a_folder_that_cannot_be_written_is_no_error(
    source: CudaSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way of a folder, also for root")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        made = again(source).cubin([NAME], "sm_80")
        assert made.cubin.startswith(b"\x7fELF") and not made.from_cache


def test_an_error_names_file_and_line(source: CudaSource) -> None:
    source.path.write_text(TEXT + "__global__ void broken(float* out) { out[0] = ; }\n")
    with pytest.raises(CompileError) as caught:
        source.cubin([NAME], "sm_90a")
    text = str(caught.value)
    assert text.startswith("made.cu does not compile for sm_90a:\nmade.cu(5): error: ")
    assert str(source.path.parent) not in text
    assert not files()


def test_an_error_in_a_header_names_the_header(source: CudaSource) -> None:
    (source.path.parent / "parts" / "deep.cuh").write_text("\nint VALUE() { return }\n")
    with pytest.raises(CompileError, match=r"(?m)^parts/deep\.cuh\(2\): error: "):
        source.cubin([NAME], "sm_90a")


def test_a_source_in_a_python_file_has_that_files_lines(source: CudaSource) -> None:
    text = "\n" + TEXT.replace("N; }", "N }")
    path = source.path.with_name("mine.py")
    path.write_text(f'import os\n\nCUDA = r"""{text}"""\n')
    with pytest.raises(CompileError, match=r"(?m)^mine\.py\(6\): error: expected a \";\""):
        CudaSource(path, text=text).cubin([NAME], "sm_80")
    made = CudaSource(path, text=TEXT).cubin([NAME, "plain"], "sm_80")  # not in the file: no lines
    assert made.names["plain"] == "plain"


@pytest.mark.parametrize(
    ("name", "arch", "said"),
    [
        ("absent", "sm_90a", "absent"),
        ("fill<float>", "sm_90a", "fill<float>"),
        (NAME, "sm_12", "sm_12|architecture"),
    ],
)
def test_a_wrong_name_or_architecture_is_told(
    source: CudaSource, name: str, arch: str, said: str
) -> None:
    with pytest.raises(CompileError, match=said):
        source.cubin([name], arch)


def test_a_source_that_is_not_there_is_told_when_it_is_compiled(tmp_path: Path) -> None:
    source = CudaSource(tmp_path / "no.cu")
    with pytest.raises(CompileError, match=r"no\.cu cannot be read: No such file"):
        source.cubin(["plain"], "sm_80")


def test_includes_in_a_circle_and_of_the_toolkit_end(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n#include <cuda_fp16.h>\n')
    (tmp_path / "b.cuh").write_text('#include "a.cu"\n#include "not_there.cuh"\n')
    found = local_files(tmp_path / "a.cu", (tmp_path / "a.cu").read_bytes())
    assert set(found) == {tmp_path / "a.cu", tmp_path / "b.cuh"}


def test_a_header_in_angle_brackets_counts_if_it_stands_beside(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("#include <b.cuh>\n#include <cuda_fp16.h>\n")
    (tmp_path / "b.cuh").write_text("")
    found = local_files(tmp_path / "a.cu", (tmp_path / "a.cu").read_bytes())
    assert set(found) == {tmp_path / "a.cu", tmp_path / "b.cuh"}


def test_more_folders_can_be_searched(source: CudaSource, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "far.cuh").write_text("#define FAR 1\n")
    text = '#include "far.cuh"\nextern "C" __global__ void plain(int* p) { *p = FAR; }\n'
    given = {"include_path": str(tmp_path / "more")}
    made = CudaSource(source.path, given, text=text).cubin(["plain"], "sm_80")
    assert made.names["plain"] == "plain"


def test_two_processes_at_once_leave_one_good_file(source: CudaSource) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from profharness.backends.cuda_source import CudaSource\n"
        "sys.stdin.readline()\n"
        f"CudaSource(Path({str(source.path)!r})).cubin([{NAME!r}], 'sm_80')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment)
        for _ in range(2)
    ]
    for process in both:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in both:
        process.communicate()
    assert [process.returncode for process in both] == [0, 0]
    (file,) = files()  # and no temporary one
    assert read_cached(file) is not None
    assert source.cubin([NAME], "sm_80").from_cache


@given(st.binary(max_size=200), st.dictionaries(st.text(max_size=9), st.text(max_size=9)))
def test_a_cache_file_gives_back_what_was_written_or_nothing(
    cubin: bytes, names: dict[str, str]
) -> None:
    made = CompiledSource(cubin, names, "sm_90a", "13.0")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.cubin"
        assert write_cached(path, made)
        found = read_cached(path)
        assert found == CompiledSource(cubin, names, "sm_90a", "13.0", from_cache=True)
        path.write_bytes(path.read_bytes()[:-1])
        assert read_cached(path) is None


def test_a_source_that_does_not_compile_is_a_row_with_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bad.cu").write_text("\n\n__global__ void bad(float* out) { oops }\n")
    (tmp_path / "bad.py").write_text(
        "from pathlib import Path\n"
        "from profharness.backends.cuda_source import CudaSource\n"
        "SOURCE = CudaSource(Path(__file__).with_suffix('.cu'))\n"
        "def attention(q, k, v, **_):\n    return SOURCE.cubin(['bad'], 'sm_80')\n"
    )
    protocol = Protocol(iterations=1, warmup=0, samples=0, device="cpu")
    options = CaptureOptions(("events",), tmp_path / "runs", protocol)
    backends = [str(tmp_path / "bad.py"), "math"]
    record = read_run(capture(expand_configs("1,1,8,8"), backends, options))
    bad, math = record.cells
    assert (bad.status, math.status) == ("error", "ok")
    assert str(bad.message).startswith("bad.cu does not compile for sm_80:\nbad.cu(3): error: ")
    assert str(tmp_path) not in str(bad.message)


def test_making_a_source_imports_nothing_and_help_is_told_without_the_package(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.cu").write_text(TEXT)
    code = (
        "import sys; from pathlib import Path\n"
        "from profharness.backends.cuda_source import CudaSource\n"
        f"source = CudaSource(Path({str(tmp_path / 'a.cu')!r}))\n"
        "assert not {'cuda', 'torch', 'numpy'} & set(sys.modules)\n"
        "sys.modules['cuda'] = None\n"
        "from profharness.backends.base import RefusedError\n"
        "try:\n    source.cubin(['plain'], 'sm_80')\n"
        "except RefusedError as error:\n    print(error.code, error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("absent ")
    assert "pip install 'profharness[kernels]'" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_kernel_without_a_gpu_is_an_error_of_torch_not_a_crash(source: CudaSource) -> None:
    with pytest.raises((RuntimeError, AssertionError, RefusedError)):
        source.kernel(NAME)


def test_architectures() -> None:
    assert architecture(9, 0) == "sm_90a"
    assert architecture(8, 0) == "sm_80"
    assert architecture(12, 0) == "sm_120"


def read_back(args: list[object]) -> list[bytes]:
    """What the driver would copy: the bytes behind each pointer."""
    arguments = Arguments(args)
    buffer = arguments.fill(args)
    pointers = (ctypes.c_void_p * len(args)).from_address(buffer[1])
    return [
        ctypes.string_at(pointer or 0, size)
        for pointer, size in zip(pointers, arguments.sizes, strict=True)
    ]


def test_arguments_are_passed_as_c_does() -> None:
    tensor = torch.arange(6.0)[2:]
    args = [True, np.int64(-5), tensor, 0.5, np.int8(3), np.float64(2.5), None, 7, np.float16(1)]
    expected = [
        struct.pack("i", 1),
        struct.pack("q", -5),
        struct.pack("P", tensor.data_ptr()),
        struct.pack("f", 0.5),
        struct.pack("b", 3),
        struct.pack("d", 2.5),
        struct.pack("P", 0),
        struct.pack("i", 7),
        struct.pack("e", 1),
    ]
    assert read_back(args) == expected
    offsets = Arguments(args).offsets
    assert all(at % size == 0 for at, size in zip(offsets, Arguments(args).sizes, strict=True))


NUMBERS = st.one_of(
    st.booleans(),
    st.integers(-(2**31), 2**31 - 1),
    st.floats(width=32, allow_nan=False),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(0, 255).map(np.uint8),
)


@given(st.lists(NUMBERS, max_size=12))
def test_every_argument_arrives(args: list[object]) -> None:
    letters = {bool: "i", int: "i", float: "f", np.int64: "q", np.uint8: "B"}
    assert read_back(args) == [struct.pack(letters[type(arg)], arg) for arg in args]


def test_buffers_are_used_again_but_never_shared() -> None:
    arguments = Arguments([1])
    first, second = arguments.fill([1]), arguments.fill([2])
    assert first[1] != second[1]
    arguments.release(first)
    assert arguments.fill([3])[1] == first[1]


@pytest.mark.parametrize("wrong", [2**31, "text", 1j, np.zeros(3)])
def test_arguments_that_no_kernel_takes(wrong: object) -> None:
    with pytest.raises(LaunchError, match="argument"):
        read_back([wrong])


def test_dimensions() -> None:
    assert _three(5) == (5, 1, 1)
    assert _three((2, 3)) == (2, 3, 1)
    assert _three((2, 3, 4)) == (2, 3, 4)


def test_a_cache_that_others_can_write_to_is_not_trusted(tmp_path: Path) -> None:
    """A forged file holds the hash of its own content: only owner and mode tell."""
    place = tmp_path / "open" / "cuda" / "k.cubin"
    compiled = CompiledSource(b"code", {"k": "k"}, "sm_90a", "13.0")
    assert why_not_trusted(place) is None
    umask = os.umask(0)
    try:
        assert write_cached(place, compiled)
    finally:
        os.umask(umask)
    assert place.parent.stat().st_mode & 0o777 == 0o700
    assert why_not_trusted(place) is None
    assert read_cached(place) is not None
    place.parent.chmod(0o777)
    assert "can be written by others" in str(why_not_trusted(place))
    assert write_cached(place, compiled)  # makes it the user's alone again
    place.chmod(0o666)
    assert str(place) in str(why_not_trusted(place))
    other = tmp_path / "link.cubin"
    other.symlink_to(place)
    assert "link" in str(why_not_trusted(other))
    if os.geteuid() != 0:
        pytest.skip("another owner needs root")
    place.chmod(0o600)
    os.chown(place, 12345, -1)
    assert "another user" in str(why_not_trusted(place))
    os.chown(place.parent, 12345, -1)
    assert not write_cached(place, compiled)
