"""Find the properties that make a backend refuse a config, and the smallest change that makes the
backend accept it.

Both searches repeatedly ask an oracle whether the backend accepts a changed config. A single answer
is not enough, because PyTorch stops at its first failing check.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from profharness.attention.config import AUTO, SDP_BACKENDS, Config, SdpaSetting, sdpa_setting
from profharness.attention.dispatch.machine import (
    AttentionParams,
    Machine,
    Release,
    from_config,
    permitted,
)
from profharness.attention.dispatch.predict import Eligibility, judge, predict
from profharness.attention.dispatch.rocm import EXPERIMENTAL_VARIABLE
from profharness.columns import column
from profharness.device_types import CUDA
from profharness.dtypes import DTYPES
from profharness.rows import Refusal

ANSWERS_FILE = "answers.jsonl"
EASY_DIM = 64
EASY_LENGTH = 32  # accepted by all backends, as it is a multiple of 8 and not 64 modulo 128
Oracle = Callable[[Config, str], Eligibility]
"""A function that returns whether a backend accepts a config, and the reasons against the backend.
The reason that PyTorch reports comes first. An oracle queries either PyTorch or the rules.
"""
ChoiceFunction = Callable[[Config], str]
"""A function that returns the backend that `auto` selects for a config, `none` if PyTorch raises an
exception, or `unknown`.
"""
_Ask = Callable[[Config], Refusal | None]
"""A function that returns why the backend refuses a config. It returns None if the backend accepts
the config or if its eligibility is unknown.
"""


def rounded_up(number: int) -> int:
    """Round a number up to a multiple of 8, for example 100 to 104."""
    return -(-number // 8) * 8


def with_dims(config: Config, head_dim: int, value_dim: int) -> Config:
    """Return the config with these head dims. If both are equal, head_dim_v is None, as in a parsed
    config.
    """
    return replace(
        config, head_dim=head_dim, head_dim_v=value_dim if value_dim != head_dim else None
    )


def _easy_remainder(config: Config) -> Config:
    head_dim = rounded_up(config.head_dim)
    return with_dims(config, head_dim, head_dim if config.head_dim_v is None else config.value_dim)


def _easy_size(config: Config) -> Config:
    """Change head_dim to at most 64 without changing its remainder modulo 8, for example from 100
    to 60. If head_dim_v is 64, change head_dim to at most 128, so that both dims still differ.
    """
    easy = EASY_DIM * (2 if config.head_dim_v == EASY_DIM else 1)
    head_dim = easy - (-config.head_dim % 8)
    return with_dims(config, head_dim, config.head_dim_v or head_dim)


def _easy_heads(config: Config) -> Config:
    if config.num_heads <= 8:
        return config
    kv_heads = min(config.num_kv_heads, 2)
    group = min(config.num_heads // config.num_kv_heads, 4)
    return replace(config, num_heads=kv_heads * group, num_kv_heads=kv_heads)


# `make_easy` applies the functions in this order. The order also decides which of several reasons
# comes first.
PROPERTIES: dict[str, Callable[[Config], Config]] = {
    "dtype": lambda c: replace(c, dtype="fp16"),
    "window": lambda c: replace(c, window=None),
    "mask": lambda c: _unmasked(c),
    "dropout": lambda c: replace(c, dropout=0.0),
    "causal": lambda c: replace(c, causal=False),
    "deterministic": lambda c: replace(c, deterministic=False),
    "bwd": lambda c: replace(c, bwd=False),
    "layout": Config.contiguous,
    "kv_batch": lambda c: replace(c, kv_batch=None),
    "kv_heads": lambda c: replace(c, num_kv_heads=c.num_heads),
    "heads": _easy_heads,
    "head_dim_v": lambda c: replace(c, head_dim_v=None),
    "head_dim remainder": _easy_remainder,
    "head_dim": _easy_size,
    "lengths": lambda c: replace(c, seq_len_q=EASY_LENGTH, seq_len_kv=EASY_LENGTH),
    "batch": lambda c: replace(c, batch=min(c.batch, 2)),
}
"""For each property, a function that sets it to an easy value, which every backend accepts."""


def make_easy(config: Config, names: Collection[str]) -> Config:
    """Return the config with the named properties set to their easy values."""
    for name, ease in PROPERTIES.items():
        if name in names:
            config = ease(config)
    return config


def keep_only(config: Config, names: Collection[str]) -> Config:
    """Return the config with all properties except the named ones set to their easy values."""
    return make_easy(config, PROPERTIES.keys() - set(names))


def difficult_properties(config: Config) -> tuple[str, ...]:
    """Return the properties of a config that do not have their easy values."""
    return tuple(name for name, ease in PROPERTIES.items() if ease(config) != config)


def blockers(
    config: Config, backend: str, oracle: Oracle
) -> tuple[tuple[tuple[str, ...], Refusal], ...]:
    """Return the blockers of a backend. The blocker with PyTorch's first reason comes first. Return
    () if the backend is eligible, or if its eligibility is unknown.

    A blocker is a set of properties and a reason. The backend refuses the config for this reason
    even if the properties of all other blockers have easy values. If the properties of all blockers
    have easy values, the backend accepts the config. The set is empty if the backend refuses even a
    config with only easy values, because no change of the config can help in this case.
    """
    verdict = oracle(config, backend)
    if verdict.eligible is not False:
        return ()
    easy = oracle(keep_only(config, ()), backend)
    if easy.eligible is not True:
        return (((), _first(easy if easy.eligible is False else verdict)),)

    def refusal(changed: Config) -> Refusal | None:
        answer = oracle(changed, backend)
        return _first(answer) if answer.eligible is False else None

    # A set is kept only if the backend still refuses the config after the properties of all other
    # sets are made easy. For example, a reason against an fp16 config may not exist in fp32.
    sets = _minimal_sets(config, refusal)
    involved = {name for names in sets for name in names}
    found = [
        (names, reason)
        for names in sets
        if (reason := refusal(make_easy(config, involved - set(names)))) is not None
    ]
    found += _remaining(config, {name for names, _ in found for name in names}, refusal)
    first = _first(verdict)
    index = next((i for i, (_, reason) in enumerate(found) if reason.code == first.code), None)
    if index is not None:
        found.insert(0, (found.pop(index)[0], first))
    return tuple(found)


def _first(answer: Eligibility) -> Refusal:
    if answer.reasons:
        return answer.reasons[0]
    return Refusal("no_text", "PyTorch gave no reason.", "inferred")


def _minimal_sets(config: Config, refusal: _Ask) -> list[tuple[str, ...]]:
    """Return the smallest sets of properties with which the backend refuses a config whose other
    properties have easy values.
    """
    names = difficult_properties(config)
    sets: list[tuple[str, ...]] = [(name,) for name in names if refusal(keep_only(config, (name,)))]
    rest = [name for name in names if (name,) not in sets]
    for size in (2, 3):
        if not refusal(keep_only(config, rest)):
            break
        for group in itertools.combinations(rest, size):
            if any(set(smaller) <= set(group) for smaller in sets):
                continue
            if refusal(keep_only(config, group)):
                sets.append(group)
    return sets


def _remaining(
    config: Config, gone: set[str], refusal: _Ask
) -> Iterator[tuple[tuple[str, ...], Refusal]]:
    """Yield further blockers, as long as the backend refuses the config although the properties in
    `gone` have easy values.

    A property belongs to such a blocker if the backend accepts the config after the property is
    made easy too.
    """
    while (reason := refusal(make_easy(config, gone))) is not None:
        needed = [name for name in difficult_properties(config) if name not in gone]
        without = set(gone)
        for name in list(needed):
            if refusal(make_easy(config, without | {name})):
                without.add(name)
                needed.remove(name)
        if not needed:
            return
        yield tuple(needed), refusal(make_easy(config, without)) or reason
        gone = gone | set(needed)


def rule_oracle(
    machine: Machine,
    device: str = CUDA,
    adjust: Callable[[AttentionParams], AttentionParams] = lambda params: params,
) -> Oracle:
    """Return an oracle that applies the rules. `adjust` can set parameters of the call that a
    config does not contain, such as runtime flags.
    """

    def ask(config: Config, backend: str) -> Eligibility:
        verdict = judge(backend, adjust(from_config(config, device)), machine)
        return Eligibility(verdict.eligible, verdict.certain or verdict.reasons, verdict.certain)

    return ask


def rule_choice(
    machine: Machine, device: str = CUDA, setting: SdpaSetting | None = None
) -> ChoiceFunction:
    """Return a function that predicts which backend PyTorch selects under `auto`, or under
    `setting` if it is given.
    """
    return lambda config: predict(permitted(from_config(config, device), setting), machine).choice


class ConfigChange(NamedTuple):
    """A change of a config that may remove a reason against a backend."""

    name: str
    codes: tuple[str, ...]
    """The reason codes that this change may remove."""
    apply: Callable[[Config], Config | None]
    """Returns the changed config, or None if the change does not apply."""
    text: str
    """A format string for a sentence about the change. `b` is the config before the change, and `a`
    the config after it. The other fields are those of `_details`.
    """
    exact: bool = True
    """Whether the output stays the same, apart from rounding errors."""
    group: str | None = None
    """The name of a group of alternative changes. Only the first change in the group that removes
    the reason is used.
    """
    prepares: bool = False
    """Whether the change copies or converts inputs, which predicted times do not include."""


def _padded(config: Config, head_dim: int, value_dim: int) -> Config:
    scale = config.scale
    if head_dim != config.head_dim and scale is None:
        scale = config.head_dim**-0.5
    return with_dims(replace(config, scale=scale), head_dim, value_dim)


def _details(before: Config, after: Config) -> dict[str, str]:
    """Return further fields of `ConfigChange.text`.

    `dims` is text such as `head_dim from 100 to 104`, with head_dim_v if it changes differently.
    `causal` says when to pass is_causal instead of a mask, if the mask may be causal.
    """
    head, value = (before.head_dim, after.head_dim), (before.value_dim, after.value_dim)
    named = {"head_dim": head} | ({"head_dim_v": value} if value != head else {})
    dims = " and ".join(f"{name} from {b} to {a}" for name, (b, a) in named.items() if b != a)
    causal = " (pass is_causal=True if it is lower triangular)" if _causal_instead(before) else ""
    return {"dims": dims, "causal": causal}


def _pad_both(config: Config, dim: int) -> Config | None:
    return _padded(config, dim, dim) if max(config.head_dim, config.value_dim) <= dim else None


def _unmasked(config: Config) -> Config:
    return replace(config, mask="none", mask_shape=None, mask_strides=None)


def _hides_padding(config: Config) -> bool:
    """Return whether the mask differs between the sequences, but not between the heads, so that it
    probably hides padding.
    """
    batch, heads = (1, 1, 1, 1, *config.mask_dims)[-4:-2]
    return batch > 1 == heads and not (config.mask_strides and config.mask_strides[0] == 0)


def _causal_instead(config: Config) -> Config | None:
    square = config.seq_len_q == config.seq_len_kv
    plain = config.causal or config.window is not None
    # A mask that is broadcast over the queries hides the same keys from all queries.
    by_query = config.mask_dims[-2:-1] in ((), (config.seq_len_q,))
    return replace(_unmasked(config), causal=True) if square and by_query and not plain else None


def _without_window(config: Config) -> Config | None:
    """Return the config without its window, if the window hides no key from any query."""
    ahead = 1 if config.causal else config.seq_len_kv
    wide = config.window is not None and config.window >= max(config.seq_len_q, ahead)
    return replace(config, window=None) if wide else None


def _fewer_keys(config: Config) -> Config | None:
    shorter = 1 < config.seq_len_q < config.seq_len_kv
    plain = config.causal and config.mask == "none" and config.window is None
    return replace(config, seq_len_kv=config.seq_len_q) if shorter and plain else None


def _pad_queries(config: Config) -> Config | None:
    one_query = config.seq_len_q == 1 and config.mask == "none"
    return replace(config, seq_len_q=8) if one_query else None


def _pad_keys(config: Config) -> Config | None:
    if config.mask != "none" or config.causal or config.window is not None:
        return None
    length = rounded_up(config.seq_len_kv + 1)
    return replace(config, seq_len_kv=length, mask="bool_2d")


def _sixteenth(config: Config) -> Config | None:
    nearest = min(max(round(config.dropout * 16), 1), 15) / 16
    return replace(config, dropout=nearest) if config.dropout else None


_OF_MASKS = ("mask", "mask_grad", "mask_shape")
# The changes in order of preference. Most changes that keep the output come before changes that do
# not keep it.
CHANGES = (
    ConfigChange("contiguous", ("last_dim_stride",), Config.contiguous,
           "make the last dimension of q, k and v contiguous (this copies them)", prepares=True),
    ConfigChange("aligned copy", ("alignment",), Config.contiguous,
           "copy q, k and v with clone(), so that their storage offset is 0", prepares=True),
    ConfigChange("pad head_dim", ("head_dim_multiple",),
           lambda c: _padded(c, rounded_up(c.head_dim), rounded_up(c.value_dim)),
           "pad {dims}, keep the scale and slice the output", prepares=True),
    ConfigChange("equal head_dim_v", ("head_dim",), lambda c: _pad_both(c, max(c.head_dim, c.value_dim)),
           "pad both head_dim ({b.head_dim}) and head_dim_v ({b.value_dim}) to {a.head_dim}, keep the scale "
           "and slice the output", prepares=True),
    ConfigChange("pad head_dim to 256", ("head_dim_training",), lambda c: _pad_both(c, 256),
           "pad {dims}, keep the scale and slice the output", prepares=True),
    ConfigChange("expand kv heads", ("num_heads",), lambda c: replace(c, num_kv_heads=c.num_heads),
           "repeat the {b.num_kv_heads} key and value heads to get {a.num_kv_heads}, instead of using enable_gqa "
           "(k and v then take more memory)", prepares=True),
    ConfigChange("detach mask", ("mask_grad",),
           lambda c: replace(c, mask="float") if c.mask == "float_grad" else None,
           "detach attn_mask if its gradient is not needed"),
    ConfigChange("slice keys", ("causal_non_square",), _fewer_keys,
           "cut k and v to the first {a.seq_len_kv} keys: is_causal aligns the mask with the first key and hides all "
           "later keys (to align the mask with the last key, see torch.nn.attention.bias.causal_lower_right)"),
    ConfigChange("no causal", ("causal_non_square",),
           lambda c: replace(c, causal=False) if c.seq_len_q == 1 else None,
           "leave out is_causal if the single query may attend to all keys (is_causal limits it to the first key)",
           exact=False),
    ConfigChange("pad queries", ("seq_len_one", "decode_disabled"), _pad_queries,
           "pad the single query to {a.seq_len_q} queries and slice the output", prepares=True),
    ConfigChange("pad keys", ("seq_len_one", "known_bug"), _pad_keys,
           "pad k and v from {b.seq_len_kv} to {a.seq_len_kv} keys and mask the added keys", prepares=True),
    ConfigChange("triangle in the mask", ("causal_mask",), lambda c: replace(c, causal=False),
           "add the causal triangle to attn_mask and leave out is_causal", prepares=True),
    ConfigChange("no window", ("mask", "mask_shape"), _without_window,
           "leave out the window: a window of {b.window} hides no key from {b.seq_len_q} queries"),
    ConfigChange("causal for mask", _OF_MASKS, lambda c: None if _hides_padding(c) else _causal_instead(c),
           "if the mask is lower triangular, pass is_causal=True instead of attn_mask", exact=False),
    ConfigChange("no mask", _OF_MASKS, lambda c: None if _hides_padding(c) else _unmasked(c),
           "if attn_mask hides nothing, leave it out", exact=False),
    ConfigChange("no padding", _OF_MASKS, lambda c: _unmasked(c) if _hides_padding(c) else None,
           "if no sequence is padded, leave out attn_mask{causal}", exact=False),
    ConfigChange("causal without padding", _OF_MASKS, lambda c: _causal_instead(c) if _hides_padding(c) else None,
           "if no sequence is padded and the mask is lower triangular, pass is_causal=True instead of attn_mask",
           exact=False),
    ConfigChange("bf16", ("dtype",), lambda c: replace(c, dtype="bf16"),
           "compute in bf16 instead of {b.dtype}: bf16 has the range of fp32, but only 8 of its 24 significant bits "
           "(about 2 to 3 digits)", exact=False, group="dtype", prepares=True),
    ConfigChange("fp16", ("dtype",), lambda c: replace(c, dtype="fp16"),
           "compute in fp16 instead of {b.dtype}: fp16 has 11 significant bits (about 3 digits), and its values must "
           "stay below 65504", exact=False, group="dtype", prepares=True),
    ConfigChange("dropout in sixteenths", ("dropout",), _sixteenth,
           "change dropout from {b.dropout} to {a.dropout}, a multiple of 1/16", exact=False, group="dropout"),
    ConfigChange("no dropout", ("dropout", "seq_len_one", "head_dim_training"), lambda c: replace(c, dropout=0.0),
           "leave out dropout (dropout_p=0), but only in inference, because this changes training",
           exact=False, group="dropout"),
    ConfigChange("not deterministic", ("deterministic",), lambda c: replace(c, deterministic=False),
           "turn off torch.use_deterministic_algorithms or pass warn_only=True (gradients may then differ from run to "
           "run)"),
    ConfigChange("no gradients", ("head_dim_training", "known_bug"), lambda c: replace(c, bwd=False),
           "call SDPA in torch.inference_mode() if no gradients are needed"),
)  # fmt: skip


_INEXACT = {change.name for change in CHANGES if not change.exact}
_PREPARING = {change.name for change in CHANGES if change.prepares}
OF_PADDING = {"no padding", "causal without padding"}
"""The changes that apply only if no sequence is padded."""
_OF_MASK_VALUES = {"causal for mask": 2, "no mask": 2, "no padding": 2, "causal without padding": 3}
"""The changes that apply only to a mask with certain values, which a config does not describe, and
how doubtful this is.
"""


def call_code(before: Config, after: Config, backend: str = AUTO) -> str:
    """Return Python code that converts the tensors of the config `before` to those of the config
    `after` and calls SDPA. The output has the shape and the dtype of the output of `before`.

    If `backend` is not `auto`, the code uses `sdpa_kernel` to permit only this backend, set or
    order.
    """
    imports = ["import torch", "import torch.nn.functional as F"]
    contexts = ["torch.inference_mode()"] if before.bwd and not after.bwd else []
    setting = sdpa_setting(backend)
    if setting is not None:
        imports.append("from torch.nn.attention import SDPBackend, sdpa_kernel")
        contexts.append(setting_code(setting))
    first = [FIRST_CHOICE_LINE] if setting is not None and setting.ordered else []
    call = f"out = F.scaled_dot_product_attention({', '.join(['q', 'k', 'v', *_arguments(after)])})"
    if contexts:
        call = f"with {', '.join(contexts)}:\n    {call}"
    lines = [*imports, "", *_before_call(before, after), *first, call]
    if after.seq_len_q > before.seq_len_q:
        lines.append(f"out = out[:, :, :{before.seq_len_q}]")
    if after.value_dim > before.value_dim:
        lines.append(f"out = out[..., :{before.value_dim}]")
    if before.dtype != after.dtype:
        lines.append(f"out = out.to(torch.{DTYPES[str(before.dtype)].torch})")
    return "\n".join(lines)


FIRST_CHOICE_LINE = (
    "# the first choice in a process replaces any order\ntorch._fused_sdp_choice(q, k, v)"
)


def setting_code(setting: SdpaSetting) -> str:
    """Return the sdpa_kernel call that permits these backends."""
    members = ", ".join(f"SDPBackend.{SDP_BACKENDS[name]}" for name in setting.backends)
    return f"sdpa_kernel([{members}]{', set_priority=True' if setting.ordered else ''})"


def window_condition(config: Config) -> str:
    """Return a Python expression that is true if query i attends to key j within the window."""
    ahead = "j <= i" if config.causal else f"j < i + {config.window}"
    return f"(i - {config.window} < j) & ({ahead})"


def _arguments(config: Config) -> Iterator[str]:
    config = config.sdpa_call()
    if config.mask != "none":
        yield "attn_mask=attn_mask"
    if config.dropout:
        yield f"dropout_p={config.dropout}"
    if config.causal:
        yield "is_causal=True"
    if config.scale is not None:
        yield f"scale={config.scale!r}"
    if config.num_kv_heads != config.num_heads:
        yield "enable_gqa=True"


def _before_call(before: Config, after: Config) -> Iterator[str]:
    if before.deterministic and not after.deterministic:
        yield "torch.use_deterministic_algorithms(False)  # or (True, warn_only=True)"
    if before.contiguous() != before and after.contiguous() == after:
        # clone a tensor with a misaligned storage offset, because contiguous() does not copy it
        copy = "clone" if before.layout == "offset1" else "contiguous"
        yield f"q, k, v = (each.{copy}() for each in (q, k, v))"
    queries, keys = after.seq_len_q - before.seq_len_q, after.seq_len_kv - before.seq_len_kv
    if queries > 0:
        yield f"q = F.pad(q, (0, 0, 0, {queries}))"
    if keys < 0:
        yield f"k, v = (each[:, :, :{after.seq_len_kv}] for each in (k, v))"
    if keys > 0:
        yield f"k, v = (F.pad(each, (0, 0, 0, {keys})) for each in (k, v))"
        real = f"torch.arange({after.seq_len_kv}, device=q.device) < {before.seq_len_kv}"
        yield f"attn_mask = ({real}).repeat({after.seq_len_q}, 1)"
    if after.window is not None:
        yield f"i = torch.arange({after.seq_len_q}, device=q.device)[:, None]"
        yield f"j = torch.arange({after.seq_len_kv}, device=q.device)"
        yield f"attn_mask = {window_condition(after)}"
    if before.num_kv_heads != after.num_kv_heads:
        group = after.num_kv_heads // before.num_kv_heads
        yield f"k, v = (each.repeat_interleave({group}, dim=1) for each in (k, v))"
    query, value = after.head_dim - before.head_dim, after.value_dim - before.value_dim
    if query > 0 and query == value:
        yield f"q, k, v = (F.pad(each, (0, {query})) for each in (q, k, v))"
    elif query > 0:
        yield f"q, k = (F.pad(each, (0, {query})) for each in (q, k))"
    if value > 0 and query != value:
        yield f"v = F.pad(v, (0, {value}))"
    if before.dtype != after.dtype:
        dtype = f"torch.{DTYPES[str(after.dtype)].torch}"
        yield f"q, k, v = (each.to({dtype}) for each in (q, k, v))"
        if before.mask.startswith("float") and after.mask.startswith("float"):
            yield f"attn_mask = attn_mask.to({dtype})"
    if before.causal and before.mask != "none" and after.mask == before.mask and not after.causal:
        sizes = f"{after.seq_len_q}, {after.seq_len_kv}"
        hidden = "False" if after.mask.startswith("bool") else '-float("inf")'
        yield f"above = torch.ones({sizes}, dtype=torch.bool, device=q.device).triu(1)"
        yield f"attn_mask = attn_mask.masked_fill(above, {hidden})"
    if before.mask == "float_grad" and after.mask == "float":
        yield "attn_mask = attn_mask.detach()"


MAX_ADVICE = 4
THEN_SELECT = (
    "then select "  # begins the last sentence of a change after which PyTorch needs sdpa_kernel
)
MAX_CHANGES = 6
FLEX_BIAS = """\
import torch
from torch.nn.attention.flex_attention import flex_attention

bias = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

def score_mod(score, b, h, i, j):
    return score + bias[b, h, i, j]

out = torch.compile(flex_attention)(q, k, v, score_mod=score_mod{arguments})"""
FLEX_BLOCKS = """\
import torch
from torch.nn.attention.flex_attention import (
    create_block_mask,
    flex_attention,
)
{before}
def mask_mod(b, h, i, j):
    return {seen}

# build it once, and reuse it in every layer and step
block_mask = create_block_mask(
    mask_mod, {sizes}, device=q.device
)
out = torch.compile(flex_attention)(q, k, v, block_mask=block_mask{arguments})"""
VARLEN_SINCE, WINDOWED_SINCE = (2, 10), (2, 11)
"""The first releases with varlen_attn, and with its parameters `scale` and `window_size`."""
PACKED = """\
import torch
import torch.nn.functional as F
{imported}
# compute these once, and reuse them in every layer
# true for each token that is not padding, like the
# attention_mask of a tokenizer: [batch, seq]
real = {real}
lengths = real.sum(1)
# if the last query is padding and sees no token,
# use the attention_mask
assert lengths.all()
starts = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
longest = int(lengths.max())

{expanded}packed = [
    each.transpose(1, 2)[real]{cast} for each in (q, k, v)
]
{call}
out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
out[real] = found.to(out.dtype)
out = out.transpose(1, 2)"""
VARLEN_CALL = """\
# if the mask is also causal, add {causal}
found = varlen_attn(*packed, starts, starts, longest, longest{arguments})"""
JAGGED_CALL = """\
jagged = torch.nested.nested_tensor_from_jagged
q_, k_, v_ = (
    jagged(each, starts, max_seqlen=longest).transpose(1, 2)
    for each in packed
)
# if the mask is also causal, add is_causal=True
found = F.scaled_dot_product_attention(q_, k_, v_{arguments})
found = found.transpose(1, 2).values()"""
EXPANDED = """
seen = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
"""


IN_BF16 = ("bf16",)
"""The steps of advice that changes only the dtype to bf16."""
FLEX, PACK = ("flex",), ("pack",)
"""The steps of advice that replaces the call with another function."""
PREPARATION = "the time to prepare the inputs"
"""What predicted times do not include, if a change copies or converts inputs."""
NOT_PREDICTED: dict[tuple[str, ...], str] = {
    PACK: "it depends on how much padding the mask hides",
    FLEX: "the atlas has no times for flex_attention",
}
"""Maps the steps of a change to the reason why its time cannot be predicted."""
SELECT = ("name it",)
"""The steps of advice that only selects a backend, which accepts the call as it is."""


@dataclass(frozen=True)
class PredictedTimes:
    """The kernel times of a call before and after a change, according to an atlas."""

    before_ns: int | None
    """None if the time before the change is unknown. `speed_up` and `certain` are then None too."""
    after_ns: int
    speed_up: float | None
    """The time before the change divided by the time after the change."""
    certain: bool | None
    """Whether the 90 % intervals of both times do not overlap."""
    source: str
    """`measured` if the atlas contains both calls, otherwise `model`."""


@dataclass(frozen=True)
class Advice:
    """A change that lets a backend compute a config."""

    change: str
    """A sentence that describes the change."""
    code: str
    """Python code that makes the change."""
    config: str | None = None
    """The label of the changed config. None if the grammar cannot express the change."""
    verified: bool | None = None
    """Whether the oracle accepted the changed config for this backend. None if the change cannot be
    expressed as a config.
    """
    choice: str | None = None
    """The backend that `auto` or the requested setting selects after the change."""
    gain: float | None = None
    """The speed-up, which is the time before the change divided by the time after the change. None
    if the times were not measured.
    """
    gain_source: str | None = None
    """The measurement and the runs that the gain was computed from."""
    predicted: PredictedTimes | None = None
    """The predicted times. None if there is no atlas that has these times."""
    steps: tuple[str, ...] = ()
    """The names of the changes that make up this advice, in order."""

    @property
    def speed_up(self) -> float | None:
        """The measured gain or, failing that, the predicted speed-up. None if both are unknown."""
        return self.gain or (self.predicted and self.predicted.speed_up) or None

    @property
    def prepares(self) -> bool:
        """Whether the change copies or converts inputs, which the times do not include."""
        return self.steps in (FLEX, PACK) or bool(_PREPARING.intersection(self.steps))

    @property
    def doubt(self) -> int:
        """How doubtful it is that the advice applies to the call.

        A verified change always applies, unless it depends on the values of the mask. A mask with a
        batch dimension, which is the condition for packing, probably hides padding, and probably is
        not causal or without effect. Advice that replaces the call with another function is the
        most doubtful.
        """
        if not self.verified:
            return 1 if self.steps == PACK else 3
        return max((_OF_MASK_VALUES.get(name, 0) for name in self.steps), default=0)

    @property
    def rank(self) -> tuple[bool, bool, int, bool, int, float]:
        """A key that sorts advice on several backends, with the best advice first.

        Advice that makes the call slower comes last, after advice whose gain is unknown. Of the
        rest, advice that is less doubtful comes first, then advice that keeps the output, then
        advice with fewer changes, then advice that saves more time.
        """
        speed_up = self.speed_up or 1.0
        inexact = any(name in _INEXACT for name in self.steps)
        unknown = self.speed_up is None
        return speed_up < 1, unknown, self.doubt, inexact, len(self.steps), -speed_up


class _State(NamedTuple):
    config: Config
    answer: Eligibility
    steps: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The code of the first reason against the backend."""
        return self.answer.reasons[0].code if self.answer.reasons else "no_text"


def advise(
    config: Config,
    backend: str,
    oracle: Oracle,
    choose: ChoiceFunction,
    asked: str = AUTO,
    release: Release | None = None,
) -> tuple[Advice, ...]:
    """Return at most four ways to let a backend compute a config, each with as few steps as
    possible.

    `choose` returns the backend that PyTorch selects under `asked`, which is `auto` or a setting.
    If `asked` is a setting, the code in the advice uses this setting. The code is for the PyTorch
    release `release`, which is the newest by default. The config must have a dtype. If the grammar
    cannot express a change, its `verified` is None. Return () if
    PyTorch already selects the backend, if its eligibility is unknown, or if no change helps.
    """
    answer = oracle(config, backend)
    if answer.eligible is None or (answer.eligible and choose(config) == backend):
        return ()
    if answer.eligible:
        fallback = setting_code(SdpaSetting((backend, "math"), ordered=True))
        return (
            Advice(
                change=(
                    f"allow only {backend} with sdpa_kernel, because {asked} prefers another "
                    f"backend; or keep math as a fallback with {fallback} (PyTorch 2.6 and newer)"
                ),
                code=call_code(config, config, backend),
                config=config.label,
                verified=True,
                choice=backend,
                steps=SELECT,
            ),
        )
    start = _State(config, answer)
    ways = [
        _way(config, state, backend, choose, asked) for state in _search(start, backend, oracle)
    ]
    outside = (make(config, backend, release) for make in OUTSIDE.get(start.code, ()))
    ways += [
        way
        for way in outside
        if way and (way.steps != PACK or oracle(_packed(config), backend).eligible is not False)
    ]
    return tuple(sorted(ways, key=lambda way: way.doubt)[:MAX_ADVICE])


def _search(start: _State, backend: str, oracle: Oracle) -> list[_State]:
    """Return the accepted configs with the fewest changes, which a breadth-first search finds."""
    seen = {start.config}
    level = [start]
    for _ in range(MAX_CHANGES):
        following = [
            state for before in level for state in _steps_from(before, backend, oracle, seen)
        ]
        if goals := [state for state in following if state.answer.eligible]:
            return goals
        level = [state for state in following if state.answer.eligible is False]
    return []


def _steps_from(before: _State, backend: str, oracle: Oracle, seen: set[Config]) -> list[_State]:
    """Return the results of all changes that may remove the first reason against the backend."""
    states: list[_State] = []
    served: set[str] = set()  # groups from which a change has already removed the reason
    for change in CHANGES:
        if before.code not in change.codes or change.group in served:
            continue
        config = change.apply(before.config)
        if config is None or config in seen:
            continue
        seen.add(config)
        text = change.text.format(b=before.config, a=config, **_details(before.config, config))
        sentences = (*before.sentences, text)
        state = _State(config, oracle(config, backend), (*before.steps, change.name), sentences)
        if change.group and (state.answer.eligible or state.code != before.code):
            served.add(change.group)
        states.append(state)
    return states


def _way(config: Config, state: _State, backend: str, choose: ChoiceFunction, asked: str) -> Advice:
    choice = choose(state.config)
    named = asked if choice == backend else backend
    sentences = list(state.sentences)
    if named != asked:  # PyTorch selects another backend even after the change
        sentences.append(
            f"{THEN_SELECT}{backend} with sdpa_kernel, because {asked} would choose {choice}"
        )
    return Advice(
        change="; ".join(sentences),
        code=call_code(config, state.config, named),
        config=state.config.label,
        verified=True,
        choice=choice,
        steps=state.steps,
    )


def _pack(config: Config, _: str, release: Release | None) -> Advice | None:
    """Return the advice to pack the sequences, if the mask may hide padding.

    Such a mask has a batch dimension, but no head dimension. Flash computes packed sequences.
    """
    plain = not config.dropout and not config.causal and config.mask in ("bool", "float")
    sizes = config.head_dim == config.value_dim <= 256 and config.head_dim % 8 == 0
    square = config.seq_len_q == config.seq_len_kv and config.kv_batch is None
    if not (config.mask_shape in ("b1qk", "b11k") and plain and sizes and square):
        return None
    has_varlen = release is None or release >= VARLEN_SINCE
    windowed = release is None or release >= WINDOWED_SINCE
    scale = "" if config.scale is None else f", scale={config.scale!r}"
    if has_varlen and scale and not windowed:
        has_varlen = False  # its scale is fixed
    call = VARLEN_CALL if has_varlen else JAGGED_CALL
    causal = "window_size=(-1, 0)" if windowed else "is_causal=True"
    group = config.num_heads // config.num_kv_heads
    half = config.dtype in ("bf16", "fp16")
    code = PACKED.format(
        imported="from torch.nn.attention.varlen import varlen_attn\n" if has_varlen else "",
        # All keys that are not padding are visible to the last query of a causal mask too.
        real="attn_mask[:, 0, -1]" + ("" if config.mask == "bool" else " == 0"),
        expanded=""
        if group == 1
        else f"k, v = (each.repeat_interleave({group}, dim=1) for each in (k, v))\n",
        cast="" if half else ".to(torch.bfloat16)",
        call=call.format(causal=causal, arguments=scale),
    )
    with_what = (
        "call torch.nn.attention.varlen.varlen_attn"
        if has_varlen
        else "call scaled_dot_product_attention with jagged nested tensors"
    )
    change = (
        f"if the mask hides only padding, pack the sequences without it and {with_what}"
        f"{'' if half else ' in bf16'}, which then computes no padding"
    )
    return Advice(change, code, steps=PACK)


def _packed(config: Config) -> Config:
    """Return the config of the sequences of `_pack`, as if they had no padding."""
    return replace(
        config,
        mask="none",
        mask_shape=None,
        num_kv_heads=config.num_heads,
        dtype=config.dtype if config.dtype in ("bf16", "fp16") else "bf16",
    )


def _flex(config: Config, _: str, _release: Release | None) -> Advice | None:
    if config.sdpa_call().causal or config.dropout:
        return None
    arguments = "" if config.scale is None else f", scale={config.scale!r}"
    arguments += ", enable_gqa=True" if config.num_kv_heads != config.num_heads else ""
    lengths = f"{config.seq_len_q}, {config.seq_len_kv}"
    if config.window is not None:
        change = (
            "call flex_attention with a BlockMask for the window: its kernels skip the blocks "
            f"outside the window; or call the flash-attn package: {_flash_window(config)}"
        )
        condition, sizes = window_condition(config), f"None, None, {lengths}"
        code = FLEX_BLOCKS.format(before="", seen=condition, sizes=sizes, arguments=arguments)
    elif config.mask.startswith("bool"):
        change = (
            "turn the mask into a BlockMask and call flex_attention: its kernels skip the blocks "
            "that the mask hides. For a sliding window, write the window's condition in mask_mod "
            "instead of reading attn_mask"
        )
        # a mask that is broadcast over batch or heads needs one block mask for all of them
        outer = (1, 1, *config.mask_dims)[-4:-2]
        sizes = ", ".join([*("None" if size == 1 else str(size) for size in outer), lengths])
        seen = "seen[b, h, i, j]"
        code = FLEX_BLOCKS.format(before=EXPANDED, seen=seen, sizes=sizes, arguments=arguments)
    else:
        change = "keep the mask and call flex_attention, whose kernels add any mask to the scores"
        code = FLEX_BIAS.format(arguments=arguments)
    return Advice(change, code, steps=FLEX)


def _flash_window(config: Config) -> str:
    """Return the call of the package flash-attn that has this window in its own parameter."""
    left = (config.window or 1) - 1
    right = 0 if config.causal else left
    causal = ", causal=True" if config.causal else ""
    return f"flash_attn_func(q, k, v{causal}, window_size=({left}, {right}))"


def _switch(_: Config, backend: str, _release: Release | None) -> Advice:
    name = {"efficient": "mem_efficient"}.get(backend, backend)
    code = f"import torch\n\ntorch.backends.cuda.enable_{name}_sdp(True)"
    sentence = f"switch on {backend}, which is switched off in this process"
    return Advice(sentence, code, steps=("switch",))


def _enable_experimental(_: Config, backend: str, _release: Release | None) -> Advice:
    code = (
        "import os\n\n"
        "# before the first call of SDPA,\n# because PyTorch reads it only once\n"
        f'os.environ["{EXPERIMENTAL_VARIABLE}"] = "1"'
    )
    sentence = (
        f"set {EXPERIMENTAL_VARIABLE}=1 before the first call: {backend} has kernels for this GPU, "
        "but AOTriton classifies them as experimental"
    )
    return Advice(sentence, code, steps=("experimental",))


def _four_d(config: Config, _: str, _release: Release | None) -> Advice:
    lines = call_code(config, config).split("\n")
    lines.insert(3, "q, k, v = (each.unsqueeze(0) for each in (q, k, v))")
    code = "\n".join([*lines, "out = out.squeeze(0)"])
    return Advice("add a batch dimension to 3-D inputs", code, steps=("four_d",))


# Functions that return advice for reason codes whose remedy is not a change of a config.
OUTSIDE: dict[str, tuple[Callable[[Config, str, Release | None], Advice | None], ...]] = {
    "mask": (_pack, _flex),
    "runtime_disabled": (_switch,),
    "not_4d": (_four_d,),
    "experimental": (_enable_experimental,),
}


@dataclass(frozen=True)
class BackendAnswer:
    """The answer of PyTorch or of the rules for one backend."""

    backend: Annotated[str, column("backend", repeat=False, meaning="the backend")]
    eligible: Annotated[
        bool | None,
        column(
            "eligible",
            importance="answer",
            repeat=False,
            meaning="whether the backend supports the config; null if unknown",
        ),
    ]
    reasons: tuple[Refusal, ...] = ()
    """All known reasons against the backend. PyTorch itself reports only the first reason."""
    advice: tuple[Advice, ...] = ()
    can_use: bool | None = None
    """The result of `can_use_*_attention`. None if PyTorch has no such function or if it was not
    called.
    """
    predicted_ns: Annotated[
        float | None,
        column(
            "predicted µs/call",
            "time",
            repeat=False,
            scale="prediction",
            meaning="the predicted time of a call; null if the backend does not support the config, or "
            "if its time is unknown",
        ),
    ] = None


@dataclass(frozen=True)
class LiveAnswer:
    """PyTorch's answers for one config."""

    cell: str
    """Id of the cell that the answers belong to."""
    config: str
    """The label of the config."""
    choice: str | None = None
    """The backend that PyTorch selects, or `none` if PyTorch raises an exception."""
    priority_order: tuple[str, ...] = ()
    backends: tuple[BackendAnswer, ...] = ()
    error: str | None = None
    """The reason why no backend could be queried."""
