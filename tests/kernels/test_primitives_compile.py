"""The functions of kernels/device.cuh and wgmma.cuh compile with NVIDIA's compilers, without a GPU.
The emulator reports where g++ rejects a source.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from emulator import COMPILER, EmulatorError, emulate

EVERY_PRIMITIVE = Path(__file__).parent / "emulator" / "every_primitive.cu"
DEVICE_HEADER = Path(__file__).parents[2] / "kernels"
INSTRUCTIONS = (
    *("cp.async.cg.shared.global", "cp.async.wait_group", "ldmatrix.sync.aligned.m8n8.x4.trans"),
    *("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "mapa.u64", "shfl.sync.bfly"),
    *("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "barrier.cluster.arrive.release"),
    *("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16", "griddepcontrol.wait"),
    *("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "fence.proxy.async.shared::cta"),
    *("ld.global.cg.v4.f32", "red.release.gpu.global.add.u32", "griddepcontrol.launch_dependents"),
    *("barrier.cluster.wait.acquire", "ex2.approx.ftz.f32", "cvt.rn.bf16x2.f32", "cvt.rn.f16x2"),
)


def test_nvrtc_compiles_every_primitive() -> None:
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    options = core.ProgramOptions(std="c++17", arch="sm_90a", include_path=str(DEVICE_HEADER))
    try:
        program = core.Program(EVERY_PRIMITIVE.read_text(), "c++", options)
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not there: {error}")
    code = program.compile("cubin", name_expressions=("every_primitive<fp16>",))
    assert bytes(code.code)[:4] == b"\x7fELF"


def test_nvcc_compiles_every_primitive(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    for kind, out in (("-ptx", tmp_path / "out.ptx"), ("-cubin", tmp_path / "out.cubin")):
        words = [nvcc, "-std=c++17", "-arch=sm_90a", "-I", str(DEVICE_HEADER), kind, "-o", str(out)]
        done = subprocess.run(
            [*words, str(EVERY_PRIMITIVE)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    text = (tmp_path / "out.ptx").read_text()
    assert [name for name in INSTRUCTIONS if name not in text] == []


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
def test_a_source_that_does_not_compile_shows_the_compiler(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text(
        "__global__ void broken(float* out) { __shared__ float x[4]; out[0] = x[y]; }"
    )
    with pytest.raises(EmulatorError, match=r"broken.cu[\s\S]*use SHARED"):
        emulate(source, "broken", 1, 1, [torch.zeros(1)])
