"""CUDA sources with the real NVRTC, without a GPU: the cache, and error messages."""

from __future__ import annotations

import ctypes
import math
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

from cuda.core._kernel_arg_handler import ParamHolder

from profharness.attention.backends.base import RefusedError
from profharness.attention.backends.cuda_launch import (
    CompiledSource,
    LaunchError,
    clusters_in,
    converter,
    reason,
)
from profharness.attention.backends.cuda_source import (
    CompileError,
    CudaSource,
    architecture,
    cache_folder,
    distrust_reason,
    read_cached,
    write_cached,
)
from profharness.attention.backends.sources import SOURCE_BYTES, local_files
from profharness.attention.config import expand_configs
from profharness.files import RECORD_BYTES
from profharness.recording.capture import capture
from profharness.run import CaptureOptions, Protocol, read_run

ROOT = Path(__file__).resolve().parents[2]
TEXT = """#include "parts/value.cuh"
template <class T, int N>
__global__ void fill(T* out) { out[threadIdx.x] = VALUE + N; }
extern "C" __global__ void plain(float* out) { out[0] = VALUE; }
"""
NAME = "fill<float, 8>"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaSource:
    """Return a source that includes a header, which includes another one; the cache is empty."""
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
    assert b"made.cu" in made.cubin  # line information, which ncu uses to find the source


def test_a_second_compile_comes_from_the_cache(source: CudaSource) -> None:
    first = source.cubin([NAME], "sm_80")
    (file,) = files()
    written = file.stat().st_mtime_ns
    second = again(source).cubin([NAME], "sm_80")
    assert second.from_cache and not first.from_cache
    assert (second.cubin, second.names) == (first.cubin, first.names)
    assert files() == [file] and file.stat().st_mtime_ns == written


def test_everything_that_changes_the_cubin_changes_the_cache_entry(source: CudaSource) -> None:
    compiled = [
        source.cubin([NAME], "sm_80"),
        source.cubin([NAME], "sm_90a"),
        source.cubin(["plain"], "sm_80"),
        again(source, max_register_count=32).cubin([NAME], "sm_80"),
    ]
    source.path.write_text(TEXT + "// changed\n")
    compiled.append(again(source).cubin([NAME], "sm_80"))
    (source.path.parent / "parts" / "deep.cuh").write_text("#define VALUE 2\n")
    compiled.append(again(source).cubin([NAME], "sm_80"))
    assert [each.from_cache for each in compiled] == [False] * 6
    assert len(files()) == 6
    assert compiled[-1].cubin != compiled[-2].cubin


def test_an_option_reaches_the_compiler(source: CudaSource) -> None:
    source.path.write_text('extern "C" __global__ void plain(int* out) { out[0] = GIVEN; }\n')
    with pytest.raises(CompileError, match='identifier "GIVEN" is undefined'):
        source.cubin(["plain"], "sm_80")
    assert again(source, define_macro=("GIVEN", "7")).cubin(["plain"], "sm_80").cubin


def test_a_damaged_cache_file_is_compiled_again(source: CudaSource) -> None:
    first = source.cubin([NAME], "sm_80")
    (file,) = files()
    content = file.read_bytes()
    flipped = bytes([*content[:100], content[100] ^ 1, *content[101:]])
    for broken in (b"", content[:-20], b"{}" * 99, flipped):
        file.write_bytes(broken)
        assert read_cached(file) is None
    healed = again(source).cubin([NAME], "sm_80")
    assert (healed.names, healed.from_cache) == (first.names, False)
    assert again(source).cubin([NAME], "sm_80").from_cache
    file.unlink()
    file.mkdir()
    assert not again(source).cubin([NAME], "sm_80").from_cache


def test_an_unwritable_cache_folder_is_not_an_error(
    source: CudaSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("blocks a folder of this name, even for root")
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


def test_errors_contain_the_lines_of_the_python_file(source: CudaSource) -> None:
    text = "\n" + TEXT.replace("N; }", "N }")
    path = source.path.with_name("mine.py")
    path.write_text(f'import os\n\nCUDA = r"""{text}"""\n')
    with pytest.raises(CompileError, match=r"(?m)^mine\.py\(6\): error: expected a \";\""):
        CudaSource(path, text=text).cubin([NAME], "sm_80")
    made = CudaSource(path, text=TEXT).cubin(
        [NAME, "plain"], "sm_80"
    )  # the text is not in the file, so its lines are unknown
    assert made.names["plain"] == "plain"


@pytest.mark.parametrize(
    ("name", "arch", "said"),
    [
        ("absent", "sm_90a", "absent"),
        ("fill<float>", "sm_90a", "fill<float>"),
        (NAME, "sm_12", "sm_12|architecture"),
    ],
)
def test_a_wrong_name_or_architecture_is_an_error(
    source: CudaSource, name: str, arch: str, said: str
) -> None:
    with pytest.raises(CompileError, match=said):
        source.cubin([name], arch)


def test_a_missing_source_is_reported_on_compilation(tmp_path: Path) -> None:
    source = CudaSource(tmp_path / "no.cu")
    with pytest.raises(CompileError, match=r"cannot read no\.cu: No such file"):
        source.cubin(["plain"], "sm_80")


@pytest.mark.parametrize(
    ("source", "header"),
    [
        (
            '#include "b.cuh"\n#include <cuda_fp16.h>\n',
            '#include "a.cu"\n#include "not_there.cuh"\n',
        ),
        ("#include <b.cuh>\n#include <cuda_fp16.h>\n", ""),
    ],
)
def test_local_headers_are_found(tmp_path: Path, source: str, header: str) -> None:
    (tmp_path / "a.cu").write_text(source)
    (tmp_path / "b.cuh").write_text(header)
    found, complete = local_files(tmp_path / "a.cu", source.encode())
    assert set(found) == {tmp_path / "a.cu", tmp_path / "b.cuh"}
    assert complete


def test_a_source_with_headers_of_options_is_not_cached(source: CudaSource, tmp_path: Path) -> None:
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "far.cuh").write_text("#define FAR 1\n")
    text = 'extern "C" __global__ void plain(int* p) { *p = FAR; }\n'
    for options, include in (
        ({"include_path": str(folder)}, "#include <far.cuh>\n"),
        ({"include_path": [str(folder)], "pre_include": "far.cuh"}, ""),
    ):
        source.path.write_text(include + text)
        for _ in range(2):
            assert not again(source, **options).cubin(["plain"], "sm_80").from_cache
    assert not files()


def test_an_angle_include_does_not_hide_the_file_that_the_compiler_reads(
    source: CudaSource, tmp_path: Path
) -> None:
    (tmp_path / "parts" / "value.cuh").write_text("#include <deep.cuh>\n")
    for value in (3, 4):
        (tmp_path / "deep.cuh").write_text(f"#define VALUE {value}\n")
        assert not again(source).cubin([NAME], "sm_80").from_cache


@pytest.mark.parametrize(
    "line",
    ['#include /**/ "far.cuh"', '#/**/include "far.cuh"', '/*\n*/ # /**/ include "far.cuh"',
     '#define NAME "far.cuh"\n#include NAME', '#include "far.cuh"\n//' + "x" * SOURCE_BYTES],
)  # fmt: skip
def test_a_source_with_unknown_includes_is_not_cached(
    source: CudaSource, tmp_path: Path, line: str
) -> None:
    (tmp_path / "far.cuh").write_text("#define VALUE 1\n")
    if len(line) > SOURCE_BYTES:
        line, more = line.split("\n")
        (tmp_path / "far.cuh").write_text(f"#define VALUE 1\n{more}\n")
    source.path.write_text(TEXT.replace('#include "parts/value.cuh"', line))
    for _ in range(2):
        assert not again(source).cubin(["plain"], "sm_80").from_cache
    assert not files()


def test_comments_and_splices_do_not_disable_the_cache(source: CudaSource) -> None:
    lines = (
        '// include this, or #include <none.cuh>\n/* include */ #inc\\\nlude "parts/value.cuh"\n'
    )
    source.path.write_text(TEXT.replace('#include "parts/value.cuh"', lines))
    assert [again(source).cubin(["plain"], "sm_80").from_cache for _ in range(2)] == [False, True]
    (source.path.parent / "parts" / "value.cuh").write_text("#define VALUE 5\n")
    assert not again(source).cubin(["plain"], "sm_80").from_cache


def test_a_source_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_bytes(b" " * (SOURCE_BYTES + 1))
    with pytest.raises(CompileError, match=r"cannot read a\.cu: larger than 16,000,000 bytes"):
        CudaSource(tmp_path / "a.cu").cubin(["plain"], "sm_80")


def test_two_processes_leave_one_valid_file(source: CudaSource) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from profharness.attention.backends.cuda_source import CudaSource\n"
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
    (file,) = files()  # no temporary file
    assert read_cached(file) is not None
    assert source.cubin([NAME], "sm_80").from_cache


@given(st.binary(max_size=200), st.dictionaries(st.text(max_size=9), st.text(max_size=9)))
def test_cache_files_round_trip_or_are_rejected(cubin: bytes, names: dict[str, str]) -> None:
    made = CompiledSource(cubin, names, "sm_90a", "13.0")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.cubin"
        assert write_cached(path, made)
        found = read_cached(path)
        assert found == CompiledSource(cubin, names, "sm_90a", "13.0", from_cache=True)
        path.write_bytes(path.read_bytes()[:-1])
        assert read_cached(path) is None


def test_a_compile_error_is_recorded_in_its_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bad.cu").write_text("\n\n__global__ void bad(float* out) { oops }\n")
    (tmp_path / "bad.py").write_text(
        "from pathlib import Path\n"
        "from profharness.attention.backends.cuda_source import CudaSource\n"
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


def test_creating_a_source_imports_nothing_and_a_missing_package_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.cu").write_text(TEXT)
    code = (
        "import sys; from pathlib import Path\n"
        "from profharness.attention.backends.cuda_source import CudaSource\n"
        f"source = CudaSource(Path({str(tmp_path / 'a.cu')!r}))\n"
        "assert not {'cuda', 'torch', 'numpy'} & set(sys.modules)\n"
        "sys.modules['cuda'] = None\n"
        "from profharness.attention.backends.base import RefusedError\n"
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
def test_a_kernel_without_a_gpu_raises(source: CudaSource) -> None:
    with pytest.raises((RuntimeError, AssertionError, RefusedError)):
        source.kernel(NAME)


def test_architectures() -> None:
    assert [architecture(*each) for each in ((9, 0), (12, 0))] == ["sm_90a", "sm_120"]


def read_back(args: list[object]) -> list[bytes]:
    """Return the bytes that cuda.core passes to the driver for each argument."""
    pairs = [converter(index, arg) for index, arg in enumerate(args)]
    values = [convert(arg) for (_, convert), arg in zip(pairs, args, strict=True)]
    holder = ParamHolder(values)
    pointers = (ctypes.c_void_p * len(args)).from_address(holder.ptr) if args else []
    return [
        ctypes.string_at(pointer or 0, size)
        for pointer, (size, _) in zip(pointers, pairs, strict=True)
    ]


def test_arguments_have_their_c_types() -> None:
    tensor = torch.arange(6.0)[2:]
    args = [True, np.int64(-5), tensor, 0.5, np.int8(3), np.float64(2.5), None, 7, np.float16(1)]
    assert read_back(args) == [
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


NUMBERS = st.one_of(
    st.booleans(),
    st.integers(-(2**31), 2**31 - 1),
    st.floats(width=32, allow_nan=False),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(0, 255).map(np.uint8),
)


@given(st.lists(NUMBERS, max_size=12))
def test_arguments_keep_their_values(args: list[object]) -> None:
    letters = {bool: "i", int: "i", float: "f", np.int64: "q", np.uint8: "B"}
    assert read_back(args) == [struct.pack(letters[type(arg)], arg) for arg in args]


@pytest.mark.parametrize("wrong", [2**31, "text", 1j, np.zeros(3)])
def test_unsupported_arguments_are_refused(wrong: object) -> None:
    with pytest.raises(LaunchError, match="argument"):
        read_back([wrong])


def test_floats_beyond_float32_are_refused_except_infinity_and_nan() -> None:
    for wrong in (1e300, -1e300, 3.5e38):
        with pytest.raises(LaunchError, match=r"argument 1 .*float32; .* numpy\.float64"):
            read_back([0.5, wrong])
        assert read_back([np.float64(wrong)]) == [struct.pack("d", wrong)]
    for number in (math.inf, -math.inf, math.nan):
        assert read_back([number]) == [bytes(ctypes.c_float(number))]


def test_a_grid_of_blocks_becomes_a_grid_of_clusters() -> None:
    assert clusters_in((8, 3, 1), (4, 1, 1)) == (2, 3, 1)
    with pytest.raises(LaunchError, match="not a multiple of the cluster"):
        clusters_in((9, 1, 1), (2, 1, 1))


def test_errors_that_end_the_context_are_marked() -> None:
    text = "CUDA_ERROR_ILLEGAL_ADDRESS: While executing a kernel"
    assert reason(RuntimeError(text)) == f"CUDA error: {text}"
    assert reason(RuntimeError("CUDA_ERROR_INVALID_VALUE")) == "CUDA_ERROR_INVALID_VALUE"


def test_an_interrupted_write_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_cached(tmp_path / "k.cubin", CompiledSource(b"code", {"k": "k"}, "sm_90a", "13.0"))
    assert list(tmp_path.iterdir()) == []


def test_a_large_cache_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "k.cubin"
    assert write_cached(path, CompiledSource(bytes(RECORD_BYTES), {"k": "k"}, "sm_90a", "13.0"))
    assert read_cached(path) is None


def test_a_cache_that_others_can_write_is_distrusted(tmp_path: Path) -> None:
    """A forged file contains a valid hash of its content, so only owner and mode reveal it."""
    place = tmp_path / "open" / "cuda" / "k.cubin"
    compiled = CompiledSource(b"code", {"k": "k"}, "sm_90a", "13.0")
    assert distrust_reason(place) is None
    umask = os.umask(0)
    try:
        assert write_cached(place, compiled)
    finally:
        os.umask(umask)
    assert place.parent.stat().st_mode & 0o777 == 0o700
    assert distrust_reason(place) is None
    assert read_cached(place) is not None
    place.parent.chmod(0o777)
    assert "other users can write to it" in str(distrust_reason(place))
    assert write_cached(place, compiled)  # restores the mode
    place.chmod(0o666)
    assert str(place) in str(distrust_reason(place))
    other = tmp_path / "link.cubin"
    other.symlink_to(place)
    assert "link" in str(distrust_reason(other))
    if os.geteuid() != 0:
        pytest.skip("another owner needs root")
    place.chmod(0o600)
    os.chown(place, 12345, -1)
    assert "another user" in str(distrust_reason(place))
    os.chown(place.parent, 12345, -1)
    assert not write_cached(place, compiled)
