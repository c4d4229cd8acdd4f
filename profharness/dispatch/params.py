"""Everything that PyTorch's SDPA dispatcher looks at in one call, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from profharness.errors import UsageError

if TYPE_CHECKING:
    from profharness.config import Config


BACKENDS = ("flash", "efficient", "cudnn", "math")
DEVICES = ("cuda", "cpu")
FLASH_IMPLS = ("FA2", "FA3", "FA4")
DETERMINISTIC = ("off", "error", "warn_only")


# name -> (text in PyTorch's messages, bytes per element)
DTYPES = {
    "fp16": ("Half", 2),
    "bf16": ("BFloat16", 2),
    "fp32": ("float", 4),
    "fp64": ("double", 8),
    "fp8": ("Float8_e4m3fn", 1),
}


class LayoutFacts(TypedDict):
    """The fields of AttentionParams that a memory layout decides."""

    last_stride: int
    batch_stride_zero: bool
    storage_offset_bytes: int


class Mask(NamedTuple):
    """attn_mask: its shape, and whether it holds booleans or is added to the scores."""

    shape: tuple[int, ...]
    kind: str = "float"
    requires_grad: bool = False
    last_stride: int = 1


@dataclass(frozen=True)
class AttentionParams:
    """One call of scaled_dot_product_attention on [batch, heads, seq, head_dim] tensors.

    query is [batch, heads, seq_q, head_dim], key [batch_kv, kv_heads, seq_kv, head_dim], value
    [batch_kv, kv_heads_v, seq_kv, head_dim_v]; None means the same as batch, kv_heads and head_dim.
    requires_grad: any of the three requires a gradient and grad mode is on. storage_offset_bytes
    counts from the start of the storage, the same for all three. enabled: backends whose runtime
    flag is on. ndim other than 4 stands for inputs with fewer or more dimensions. nested: all three
    are nested tensors of the strided layout, seq lengths are then the longest ones.
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_kv: int
    head_dim: int
    dtype: str = "fp16"
    device: str = "cuda"
    batch_kv: int | None = None
    kv_heads_v: int | None = None
    head_dim_v: int | None = None
    ndim: int = 4
    enable_gqa: bool = False
    is_causal: bool = False
    mask: Mask | None = None
    dropout: float = 0.0
    requires_grad: bool = False
    last_stride: int = 1
    batch_stride_zero: bool = False
    storage_offset_bytes: int = 0
    deterministic: str = "off"
    nested: bool = False
    enabled: frozenset[str] = frozenset(BACKENDS)
    flash_impl: str = "FA2"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("dtype", self.dtype, tuple(DTYPES)),
            ("device", self.device, DEVICES),
            ("deterministic", self.deterministic, DETERMINISTIC),
            ("flash_impl", self.flash_impl, FLASH_IMPLS),
        ):
            if value not in allowed:
                raise UsageError(f"{name} {value!r} is unknown; allowed are {' '.join(allowed)}")

    @property
    def value_dim(self) -> int:
        """The last dimension of value."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def value_heads(self) -> int:
        """Heads of value."""
        return self.kv_heads if self.kv_heads_v is None else self.kv_heads_v

    @property
    def key_batch(self) -> int:
        """Batch of key and value."""
        return self.batch if self.batch_kv is None else self.batch_kv

    @property
    def same_heads(self) -> bool:
        """Whether query, key and value have the same number of heads."""
        return self.heads == self.kv_heads == self.value_heads

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype][1]

    @property
    def dtype_text(self) -> str:
        """The dtype as PyTorch prints it in its messages."""
        return DTYPES[self.dtype][0]

    @property
    def query_sizes(self) -> list[int]:
        """Shape of query."""
        return [self.batch, self.heads, self.seq_q, self.head_dim]

    @property
    def key_sizes(self) -> list[int]:
        """Shape of key."""
        return [self.key_batch, self.kv_heads, self.seq_kv, self.head_dim]

    @property
    def value_sizes(self) -> list[int]:
        """Shape of value."""
        return [self.key_batch, self.value_heads, self.seq_kv, self.value_dim]


def from_config(config: Config, device: str = "cuda") -> AttentionParams:
    """What the dispatcher sees when the worker runs `config` on `device` (`cuda` or `cpu`), all
    flags at their defaults. Grouped heads set enable_gqa.
    """
    dtype = str(config.resolve(device).dtype)
    return AttentionParams(
        batch=config.batch,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        seq_q=config.seq_len_q,
        seq_kv=config.seq_len_kv,
        head_dim=config.head_dim,
        head_dim_v=config.head_dim_v,
        dtype=dtype,
        device=device,
        enable_gqa=config.num_kv_heads != config.num_heads,
        is_causal=config.causal,
        mask=_mask_of(config),
        dropout=config.dropout,
        requires_grad=config.bwd,
        deterministic="error" if config.deterministic else "off",
        **_layout_facts(config.layout, dtype),
    )


def _mask_of(config: Config) -> Mask | None:
    word = config.mask
    if word == "none":
        return None
    lead = {"bool_2d": (), "float_bh": (config.batch, config.num_heads)}.get(word, (1, 1))
    kind = "bool" if word.startswith("bool") else "float"
    shape = (*lead, config.seq_len_q, config.seq_len_kv)
    return Mask(shape, kind, requires_grad=word == "float_grad")


def _layout_facts(layout: str, dtype: str) -> LayoutFacts:
    return {
        "last_stride": 2 if layout == "strided_last" else 1,
        "batch_stride_zero": layout == "broadcast_batch",
        "storage_offset_bytes": DTYPES[dtype][1] if layout == "offset1" else 0,
    }
