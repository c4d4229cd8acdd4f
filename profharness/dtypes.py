"""The floating-point dtypes, with their names in configs, in PyTorch and in kernel names."""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """A dtype of tensors, with its names in different contexts."""

    name: str
    bytes: int
    """Size of an element, in bytes."""
    torch: str
    """Name of the dtype in the module torch."""
    message: str
    """Name in PyTorch's error messages: the name of a c10::ScalarType or of a C++ type."""
    types: tuple[str, ...]
    """Names of the C++ types that represent the dtype in kernel names and traces."""
    aliases: tuple[str, ...] = ()
    """Other names that users may try in a config."""


DTYPES = {
    row.name: row
    for row in (
        Dtype(
            "fp16",
            2,
            "float16",
            "Half",
            ("c10::Half", "__half", "half", "cutlass::half_t", "_Float16"),
            ("half", "f16"),
        ),
        Dtype(
            "bf16",
            2,
            "bfloat16",
            "BFloat16",
            (
                "c10::BFloat16",
                "__nv_bfloat16",
                "__hip_bfloat16",
                "__bf16",
                "std::bfloat16_t",
                "cutlass::bfloat16_t",
            ),
            ("bfloat",),
        ),
        Dtype("fp32", 4, "float32", "float", ("float",), ("float", "f32", "single")),
        Dtype("fp64", 8, "float64", "double", ("double",)),
        Dtype(
            "fp8_e4m3",
            1,
            "float8_e4m3fn",
            "Float8_e4m3fn",
            ("c10::Float8_e4m3fn", "cutlass::float_e4m3_t"),
        ),
        Dtype(
            "fp8_e5m2",
            1,
            "float8_e5m2",
            "Float8_e5m2",
            ("c10::Float8_e5m2", "cutlass::float_e5m2_t"),
        ),
    )
}
CONFIG_DTYPES = ("fp16", "bf16", "fp32")
"""Dtypes that a config can have."""
HALF = ("fp16", "bf16")
"""Dtypes with 16 bits."""
OF_CPP_TYPE = {cpp_type: row.name for row in DTYPES.values() for cpp_type in row.types}
OF_TORCH = {row.torch: row.name for row in DTYPES.values()}
