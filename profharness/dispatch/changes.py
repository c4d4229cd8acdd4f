"""What can be changed about a config so that a backend takes it: a registry from reason to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from profharness.dispatch.perturb import rounded_up, with_dims

if TYPE_CHECKING:
    from profharness.config import Config

PADDED_LENGTH = 8
LARGEST_DIM = 256


@dataclass(frozen=True)
class Change:
    """One change. codes: the reasons that it may remove. apply gives the changed config, None where
    it does not fit. text is a sentence over `b` and `a`, the config before and after it. exact: the
    output stays the same within the dtype's error. group: of the changes of one group, the first
    that removes the reason is enough.
    """

    name: str
    codes: tuple[str, ...]
    apply: Callable[[Config], Config | None]
    text: str
    exact: bool = True
    group: str | None = None

    def sentence(self, before: Config, after: Config) -> str:
        """The change in words, with its figures."""
        return self.text.format(b=before, a=after)


def _scale(config: Config) -> float:
    return config.head_dim**-0.5 if config.scale is None else config.scale


def _to_dims(config: Config, head_dim: int, value_dim: int) -> Config:
    """Padded; the scale stays that of the real head_dim."""
    scale = config.scale if head_dim == config.head_dim else _scale(config)
    return with_dims(replace(config, scale=scale), head_dim, value_dim)


def _pad_multiple(config: Config) -> Config:
    return _to_dims(config, rounded_up(config.head_dim), rounded_up(config.value_dim))


def _pad_equal(config: Config) -> Config:
    largest = max(config.head_dim, config.value_dim)
    return _to_dims(config, largest, largest)


def _pad_largest(config: Config) -> Config | None:
    if max(config.head_dim, config.value_dim) > LARGEST_DIM:
        return None
    return _to_dims(config, LARGEST_DIM, LARGEST_DIM)


def _causal_instead(config: Config) -> Config | None:
    square = config.seq_len_q == config.seq_len_kv
    return replace(config, mask="none", causal=True) if square and not config.causal else None


def _detach_mask(config: Config) -> Config | None:
    return replace(config, mask="float") if config.mask == "float_grad" else None


def _no_causal(config: Config) -> Config | None:
    return replace(config, causal=False) if config.seq_len_q == 1 else None


def _fewer_keys(config: Config) -> Config | None:
    shorter = 1 < config.seq_len_q < config.seq_len_kv
    plain = config.causal and config.mask == "none"
    return replace(config, seq_len_kv=config.seq_len_q) if shorter and plain else None


def _pad_queries(config: Config) -> Config | None:
    one = config.seq_len_q == 1 and config.mask == "none"
    return replace(config, seq_len_q=PADDED_LENGTH) if one else None


def _pad_keys(config: Config) -> Config | None:
    if config.mask != "none" or config.causal:
        return None
    length = rounded_up(config.seq_len_kv + 1)
    return replace(config, seq_len_kv=length, mask="bool_2d")


def _sixteenth(config: Config) -> Config | None:
    nearest = min(max(round(config.dropout * 16), 1), 15) / 16
    return replace(config, dropout=nearest) if config.dropout else None


# Better changes first: those that keep the output, then those that cost something.
CHANGES = (
    Change("contiguous", ("last_dim_stride",), lambda c: replace(c, layout="contiguous"),
           "make the last dimension of q, k and v contiguous (a copy of each)"),
    Change("aligned copy", ("alignment",), lambda c: replace(c, layout="contiguous"),
           "copy q, k and v with clone(), so that their storage offset is 0"),
    Change("pad head_dim", ("head_dim_multiple",), _pad_multiple,
           "pad head_dim from {b.head_dim} to {a.head_dim} (head_dim_v from {b.value_dim} to {a.value_dim}), "
           "keep the scale and slice the output"),
    Change("equal head_dim_v", ("head_dim",), _pad_equal,
           "pad head_dim ({b.head_dim}) and head_dim_v ({b.value_dim}) to the same {a.head_dim}, keep the scale "
           "and slice the output"),
    Change("pad head_dim to 256", ("head_dim_training",), _pad_largest,
           "pad head_dim from {b.head_dim} to 256 and head_dim_v from {b.value_dim} to 256, keep the scale and "
           "slice the output"),
    Change("expand kv heads", ("num_heads",), lambda c: replace(c, num_kv_heads=c.num_heads),
           "repeat the {b.num_kv_heads} key and value heads to {a.num_kv_heads} instead of enable_gqa (more memory "
           "for k and v)"),
    Change("detach mask", ("mask_grad",), _detach_mask,
           "detach attn_mask, if its gradient is not needed"),
    Change("slice keys", ("causal_non_square",), _fewer_keys,
           "cut k and v to the first {a.seq_len_kv} keys: is_causal starts at the first key, so later ones never "
           "count (for a mask that ends at the last key see torch.nn.attention.bias.causal_lower_right)"),
    Change("no causal", ("causal_non_square",), _no_causal,
           "leave is_causal out, if the one query may see all keys (is_causal lets it see the first alone)",
           exact=False),
    Change("pad queries", ("seq_len_one", "decode_disabled"), _pad_queries,
           "pad the one query to {a.seq_len_q} and slice the output"),
    Change("pad keys", ("seq_len_one", "known_bug"), _pad_keys,
           "pad k and v from {b.seq_len_kv} to {a.seq_len_kv} keys and mask the added ones"),
    Change("causal for mask", ("mask", "mask_grad", "mask_shape"), _causal_instead,
           "say is_causal=True instead of attn_mask, which holds only if the mask is lower triangular", exact=False),
    Change("no mask", ("mask", "mask_grad", "mask_shape"), lambda c: replace(c, mask="none"),
           "leave attn_mask out, if it hides nothing", exact=False),
    Change("bf16", ("dtype",), lambda c: replace(c, dtype="bf16"),
           "compute in bf16 instead of {b.dtype}: 8 significant bits (about 2 to 3 digits) instead of the 24 of fp32, "
           "with the same range", exact=False, group="dtype"),
    Change("fp16", ("dtype",), lambda c: replace(c, dtype="fp16"),
           "compute in fp16 instead of {b.dtype}: 11 significant bits (about 3 digits), and values must stay below "
           "65504", exact=False, group="dtype"),
    Change("dropout in sixteenths", ("dropout",), _sixteenth,
           "set dropout from {b.dropout} to {a.dropout}, a multiple of 1/16", exact=False, group="dropout"),
    Change("no dropout", ("dropout", "seq_len_one", "head_dim_training"), lambda c: replace(c, dropout=0.0),
           "leave dropout out (dropout_p=0), as outside of training", exact=False, group="dropout"),
    Change("not deterministic", ("deterministic",), lambda c: replace(c, deterministic=False),
           "turn torch.use_deterministic_algorithms off or to warn_only=True (gradients may then differ from run to "
           "run)"),
    Change("no gradients", ("head_dim_training", "known_bug"), lambda c: replace(c, bwd=False),
           "call it under torch.inference_mode(), if no gradients are needed"),
)  # fmt: skip
