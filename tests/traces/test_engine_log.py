"""The lines in which serving engines log the attention backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from profharness.traces.engine_log import EngineLog, read_engine_log

# Lines from public issues and pull requests of vLLM and SGLang
LINES = {
    "(EngineCore_DP0 pid=3642945) INFO 11-24 20:03:06 [cuda.py:416] Using FLASH_ATTN attention backend "
    "out of potential backends: ['FLASH_ATTN', 'FLASHINFER', 'TRITON_ATTN', 'FLEX_ATTENTION']": (
        EngineLog(
            "vLLM",
            backend="FLASH_ATTN",
            candidates=("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"),
        )
    ),
    "INFO 11-24 20:03:41 [cuda.py:410] Valid backends: ['FLASH_ATTN', 'FLASHINFER']\n"
    "INFO 11-24 20:03:41 [cuda.py:419] Using FLASH_ATTN backend.": (
        EngineLog("vLLM", backend="FLASH_ATTN", candidates=("FLASH_ATTN", "FLASHINFER"))
    ),
    "INFO [cuda.py:367] Using AttentionBackendEnum.FLASHINFER backend.": (
        EngineLog("vLLM", backend="FLASHINFER")
    ),
    "ValueError: Selected backend AttentionBackendEnum.CUTLASS_MLA is not valid for this configuration. "
    "Reason: ['sparse not supported']": (
        EngineLog("vLLM", refusals={"CUTLASS_MLA": ("sparse not supported",)})
    ),
    "INFO 01-07 11:20:04 api_server.py:528] vLLM API server version 0.6.3.post1": (
        EngineLog("vLLM", "0.6.3.post1")
    ),
    "INFO Using Flash Attention backend on V1 engine.": EngineLog(
        "vLLM", backend="Flash Attention"
    ),
    "[2025-07-09 11:52:19] server_args=ServerArgs(model_path='m', attention_backend='fa3', "
    "decode_attention_backend='flashinfer', prefill_attention_backend=None, page_size=1)": (
        EngineLog("SGLang", backend="fa3 and flashinfer")
    ),
    "[2025-07-09] Attention backend not explicitly specified. Use fa3 backend by default.": (
        EngineLog("SGLang", backend="fa3")
    ),
    "loading /cache/abc/fmha/trtllm-gen/fmhaSm100Kernel_QkvBfloat16OBfloat16H128PagedKvDenseP16.cubin": (
        EngineLog(cubins=("fmhaSm100Kernel_QkvBfloat16OBfloat16H128PagedKvDenseP16",))
    ),
    # vllm/collect_env.py
    "PyTorch version              : 2.11.0+cu130\n"
    "Nvidia driver version        : 580.95.05\n"
    "cuDNN version                : Could not collect\n"
    "[pip3] flashinfer-python==0.6.4\n[pip3] nvidia-cudnn-cu13==9.19.0.56\n[pip3] triton==3.6.0\n"
    "[conda] numpy 2.2.6 pypi_0 pypi\nvLLM Version                 : 0.25.0": (
        EngineLog(
            "vLLM",
            "0.25.0",
            libraries={
                "torch": "2.11.0+cu130",
                "driver": "580.95.05",
                "flashinfer": "0.6.4",
                "cudnn": "9.19.0.56",
                "triton": "3.6.0",
            },
        )
    ),
    # sglang/check_env.py
    "CUDA Driver Version: 580.95.05\nsgl_kernel: 0.3.21\nflashinfer_python: 0.6.4": (
        EngineLog(libraries={"driver": "580.95.05", "sgl-kernel": "0.3.21", "flashinfer": "0.6.4"})
    ),
}


@pytest.mark.parametrize(("text", "found"), LINES.items())
def test_lines_of_engines(tmp_path: Path, text: str, found: EngineLog) -> None:
    log = tmp_path / "server.log"
    log.write_text(f"starting\n{text}\nUsing a slow image processor backend\n")
    assert read_engine_log(log) == found


def test_a_log_of_another_program_tells_nothing(tmp_path: Path) -> None:
    log = tmp_path / "other.log"
    log.write_bytes(b"\xff\xfe hello\nUsing the Agg backend\n")
    assert read_engine_log(log) is None
