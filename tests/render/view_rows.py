"""Build rows for tests of views by hand, as the store returns them."""

from __future__ import annotations

from typing import Any

from profharness.rows import CellRow, KernelRow, Refusal

RUN = "20250102-030405-ab12"
CONFIG = "b2-h8-s512-d64-fp16"


def kernel(**changes: Any) -> KernelRow:
    """Return a flash kernel of the cell `0`."""
    values: dict[str, Any] = {
        "run": RUN,
        "config": CONFIG,
        "backend": "flash",
        "cell": "0",
        "profiler": "torch",
        "status": "ok",
        "range": "profharness:0",
        "kernel": "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128> >(Params)",
        "kernel_short": "pytorch_flash::flash_fwd_kernel",
        "kernel_kind": "kernel",
        "family": "flash",
        "grid": (4, 2, 8),
        "block": (128, 1, 1),
        "registers_per_thread": 255,
        "static_shared_bytes": None,
        "dynamic_shared_bytes": None,
        "shared_bytes": 49152,
        "launches": 5,
        "launches_per_call": 1.0,
        "duration_ns": 7392,
        "total_ns": 36960,
        "min_ns": 7200,
        "max_ns": 7600,
        "share": 1.0,
        "first_ns": 1000,
        "op_path": "aten::scaled_dot_product_attention",
        "sdpa_op": "aten::_scaled_dot_product_flash_attention",
        "occupancy": 0.125,
        "occupancy_limiter": "registers",
        "device": 0,
    }
    return KernelRow(**(values | changes))


def cell(**changes: Any) -> CellRow:
    """Return the cell `0`, which ran flash attention."""
    values: dict[str, Any] = {
        "run": RUN,
        "cell": "0",
        "config": CONFIG,
        "backend": "flash",
        "status": "ok",
        "message": None,
        "choice": "flash",
        "sdpa_op": "aten::_scaled_dot_product_flash_attention",
        "iterations": 5,
        "refusals": (),
        "warnings": (),
    }
    return CellRow(**(values | changes))


def math_kernels() -> list[KernelRow]:
    """Return the kernels of the cell `1`, which ran math: two matrix products around a softmax."""
    op = "aten::_scaled_dot_product_attention_math"
    common = {"cell": "1", "backend": "math", "range": "profharness:1", "sdpa_op": op}
    product: dict[str, Any] = {"kernel": "gemm<a|b>*", "kernel_short": "gemm", "family": "gemm"}
    return [
        kernel(**common, **product, grid=(65535, 16, 1), share=0.25, first_ns=10, shared_bytes=0),
        kernel(
            **common,
            kernel="softmax_warp_forward<half, float>",
            kernel_short="at::native::softmax_warp_forward_with_a_very_long_short_name",
            family="softmax",
            launches_per_call=2.5,
            share=0.5,
            first_ns=20,
            duration_ns=1_234_567,
            occupancy=None,
        ),
        kernel(
            **common, **product, grid=None, block=None, share=0.25, first_ns=30, shared_bytes=None
        ),
    ]


def sample() -> tuple[list[KernelRow], list[CellRow]]:
    """Return two backends that ran, one refused, one crashed, and a range of a foreign trace."""
    op = "aten::_scaled_dot_product_attention_math"
    cells = [
        cell(warnings=("clocks moved by 12 % while it was timed",)),
        cell(cell="1", backend="math", sdpa_op=op),
        cell(
            cell="2",
            backend="efficient",
            status="refused",
            refusals=(Refusal("DTYPE", "Expected query, key and value to be | of <one> dtype"),),
        ),
        cell(cell="3", backend="cudnn", status="crashed", message="the worker died of SIGABRT"),
    ]
    foreign = kernel(config=None, backend=None, cell=None, status=None, range="my step")
    return [kernel(), *math_kernels(), foreign], cells
