"""PyTorch's refusal texts as reason codes; matched by distinctive fragments, because wording and
line numbers change by release.
"""

from __future__ import annotations

import re

_SUFFIX = re.compile(r"\s*\(Triggered internally at .*\)\s*$", re.DOTALL)
_HEADER = re.compile(
    r"^(memory efficient kernel|flash attention kernel|cudnn attention kernel) not used because:$",
    re.IGNORECASE,
)

# Fragment (lower case) to code; first hit wins.
CODES: tuple[tuple[str, str], ...] = (
    ("has been runtime disabled", "runtime_disabled"),
    ("requires a cuda device", "not_on_cuda"),
    ("need to be on cuda device", "not_on_cuda"),
    ("to be 4 dimensional", "not_4d"),
    ("does not support non-null attn_mask", "mask"),
    ("attn_mask requires a gradient", "mask_grad"),
    ("same last dimension and to be less than or equal to", "head_dim"),
    ("only supports gpu architectures", "capability"),
    ("compute capability", "capability"),
    ("doesn't support training with head_dim", "head_dim_training"),
    ("does not support the is_causal flag when seqlen_q", "causal_non_square"),
    ("expected query, key and value to all be of dtype", "dtype"),
    ("expected query, key and value to all be of the same dtype", "dtype"),
    ("low-precision flash attention sdpa requires fa3", "dtype"),
    ("nested inputs", "nested"),
    (" nt inputs", "nested"),
    ("to be a multiple of 8 and less than", "head_dim_multiple"),
    ("q,k,v to have the same last dimension.", "head_dim"),
    ("to have the same batch_size", "batch_size"),
    ("to have the same num_heads", "num_heads"),
    ("heads in key/value must divide", "num_heads"),
    ("batch size or num_heads greater than", "grid_size"),
    ("do not support zero seq_len", "seq_len_zero"),
    ("do not support seq_len == 0", "seq_len_zero"),
    ("last dimension of the input to have stride 1", "last_dim_stride"),
    ("last dimension of inputs to be divisible by", "head_dim_multiple"),
    ("storage offsets * element_size to be aligned", "alignment"),
    ("please use the following attn mask shapes", "mask_shape"),
    ("head_dim should be no more than", "head_dim"),
    ("head_dim should be a multiple of", "head_dim_multiple"),
    ("does not support sequence length 1", "seq_len_one"),
    ("does not support key/value sequence length 1", "seq_len_one"),
    ("query sequence length 1 with dropout", "seq_len_one"),
    ("is not deterministic", "deterministic"),
    ("nested tensor", "nested"),
    ("dropout", "dropout"),
    ("decode is disabled", "decode_disabled"),
    ("does not support backward with these head dimensions", "head_dim_training"),
    ("non-finite query gradients", "known_bug"),
    ("provided head dimensions", "head_dim"),
)


def clean(text: str) -> str:
    """A warning's text without the C++ source position that PyTorch appends."""
    return _SUFFIX.sub("", text).strip()


def is_header(text: str) -> bool:
    """Whether a warning only announces the reasons that follow it."""
    return bool(_HEADER.match(clean(text)))


def code(text: str) -> str:
    """The reason code of a refusal text, `unknown` if the text is new."""
    lowered = text.lower()
    return next((code for fragment, code in CODES if fragment in lowered), "unknown")
