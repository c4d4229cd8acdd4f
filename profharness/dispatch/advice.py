"""The smallest change that makes a backend take a config: a search over changes, in which every
answer comes from the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from profharness.config import AUTO, SDP_BACKENDS, Config, Setting, sdpa_setting
from profharness.dispatch.perturb import Choose, Oracle, rounded_up, with_dims
from profharness.dispatch.predict import Verdict
from profharness.rows import Refusal

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


def _padded(config: Config, head_dim: int, value_dim: int) -> Config:
    """The scale stays that of the real head_dim."""
    scale = config.scale
    if head_dim != config.head_dim and scale is None:
        scale = config.head_dim**-0.5
    return with_dims(replace(config, scale=scale), head_dim, value_dim)


def _pad_both(config: Config, dim: int) -> Config | None:
    return _padded(config, dim, dim) if max(config.head_dim, config.value_dim) <= dim else None


def _causal_instead(config: Config) -> Config | None:
    square = config.seq_len_q == config.seq_len_kv
    return replace(config, mask="none", causal=True) if square and not config.causal else None


def _fewer_keys(config: Config) -> Config | None:
    shorter = 1 < config.seq_len_q < config.seq_len_kv
    plain = config.causal and config.mask == "none"
    return replace(config, seq_len_kv=config.seq_len_q) if shorter and plain else None


def _pad_queries(config: Config) -> Config | None:
    one_query = config.seq_len_q == 1 and config.mask == "none"
    return replace(config, seq_len_q=PADDED_LENGTH) if one_query else None


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
    Change("contiguous", ("last_dim_stride",), Config.contiguous,
           "make the last dimension of q, k and v contiguous (a copy of each)"),
    Change("aligned copy", ("alignment",), Config.contiguous,
           "copy q, k and v with clone(), so that their storage offset is 0"),
    Change("pad head_dim", ("head_dim_multiple",),
           lambda c: _padded(c, rounded_up(c.head_dim), rounded_up(c.value_dim)),
           "pad head_dim from {b.head_dim} to {a.head_dim} (head_dim_v from {b.value_dim} to {a.value_dim}), "
           "keep the scale and slice the output"),
    Change("equal head_dim_v", ("head_dim",), lambda c: _pad_both(c, max(c.head_dim, c.value_dim)),
           "pad head_dim ({b.head_dim}) and head_dim_v ({b.value_dim}) to the same {a.head_dim}, keep the scale "
           "and slice the output"),
    Change("pad head_dim to 256", ("head_dim_training",), lambda c: _pad_both(c, LARGEST_DIM),
           "pad head_dim from {b.head_dim} to 256 and head_dim_v from {b.value_dim} to 256, keep the scale and "
           "slice the output"),
    Change("expand kv heads", ("num_heads",), lambda c: replace(c, num_kv_heads=c.num_heads),
           "repeat the {b.num_kv_heads} key and value heads to {a.num_kv_heads} instead of enable_gqa (more memory "
           "for k and v)"),
    Change("detach mask", ("mask_grad",),
           lambda c: replace(c, mask="float") if c.mask == "float_grad" else None,
           "detach attn_mask, if its gradient is not needed"),
    Change("slice keys", ("causal_non_square",), _fewer_keys,
           "cut k and v to the first {a.seq_len_kv} keys: is_causal starts at the first key, so later ones never "
           "count (for a mask that ends at the last key see torch.nn.attention.bias.causal_lower_right)"),
    Change("no causal", ("causal_non_square",),
           lambda c: replace(c, causal=False) if c.seq_len_q == 1 else None,
           "leave is_causal out, if the one query may see all keys (is_causal lets it see the first alone)",
           exact=False),
    Change("pad queries", ("seq_len_one", "decode_disabled"), _pad_queries,
           "pad the one query to {a.seq_len_q} and slice the output"),
    Change("pad keys", ("seq_len_one", "known_bug"), _pad_keys,
           "pad k and v from {b.seq_len_kv} to {a.seq_len_kv} keys and mask the added ones"),
    Change("triangle in the mask", ("causal_mask",), lambda c: replace(c, causal=False),
           "put the triangle of is_causal into attn_mask, and leave is_causal out"),
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
TORCH_DTYPES = {"fp16": "torch.float16", "bf16": "torch.bfloat16", "fp32": "torch.float32"}


def call_code(before: Config, after: Config, backend: str = AUTO) -> str:
    """Code that has `before`'s tensors and makes `after`'s call, with an output of the shape and
    dtype of `before`'s. backend: only what that name permits may run it (`sdpa_kernel`).
    """
    imports = ["import torch", "import torch.nn.functional as F"]
    contexts = ["torch.inference_mode()"] if before.bwd and not after.bwd else []
    setting = sdpa_setting(backend)
    if setting is not None:
        imports.append("from torch.nn.attention import SDPBackend, sdpa_kernel")
        contexts.append(setting_code(setting))
    first = [FIRST_CHOICE] if setting is not None and setting.ordered else []
    call = f"out = F.scaled_dot_product_attention({', '.join(['q', 'k', 'v', *_arguments(after)])})"
    if contexts:
        call = f"with {', '.join(contexts)}:\n    {call}"
    lines = [*imports, "", *_before_call(before, after), *first, call]
    if after.seq_len_q > before.seq_len_q:
        lines.append(f"out = out[:, :, :{before.seq_len_q}]")
    if after.value_dim > before.value_dim:
        lines.append(f"out = out[..., :{before.value_dim}]")
    if before.dtype != after.dtype:
        lines.append(f"out = out.to({TORCH_DTYPES[str(before.dtype)]})")
    return "\n".join(lines)


FIRST_CHOICE = "torch._fused_sdp_choice(q, k, v)  # a process's first choice would undo a set order"


def setting_code(setting: Setting) -> str:
    """The call of `sdpa_kernel` that permits these backends."""
    members = ", ".join(f"SDPBackend.{SDP_BACKENDS[name]}" for name in setting.backends)
    return f"sdpa_kernel([{members}]{', set_priority=True' if setting.ordered else ''})"


def _arguments(config: Config) -> Iterator[str]:
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
        # contiguous() gives a tensor back as it is where only its storage offset is odd
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
        dtype = TORCH_DTYPES[str(after.dtype)]
        yield f"q, k, v = (each.to({dtype}) for each in (q, k, v))"
        if before.mask.startswith("float") and after.mask.startswith("float"):
            yield f"attn_mask = attn_mask.to({dtype})"
    if before.causal and before.mask != "none" and after.mask == before.mask and not after.causal:
        above = f"{after.seq_len_q}, {after.seq_len_kv}, dtype=torch.bool, device=q.device).triu(1)"
        hidden = "False" if after.mask.startswith("bool") else '-float("inf")'
        yield f"attn_mask = attn_mask.masked_fill(torch.ones({above}, {hidden})"
    if before.mask == "float_grad" and after.mask == "float":
        yield "attn_mask = attn_mask.detach()"


MOST = 3
DEEPEST = 6
FLEX = """\
import torch
from torch.nn.attention.flex_attention import flex_attention

bias = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

def score_mod(score, b, h, i, j):
    return {score}

out = torch.compile(flex_attention)(q, k, v, score_mod=score_mod{arguments})"""


@dataclass(frozen=True)
class Advice:
    """One change that makes a backend take a config.

    change is a sentence, code the Python to write. config is the changed config's label, None where
    the grammar cannot say it. verified: asked again, with the change, the backend was eligible
    (None: could not be asked). choice: what `auto`, or the setting asked about, takes then. gain:
    time before over time after, where both were measured. steps: the names of the changes.
    """

    change: str
    code: str
    config: str | None = None
    verified: bool | None = None
    choice: str | None = None
    gain: float | None = None
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class _State:
    config: Config
    answer: Verdict
    steps: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The reason that stands in the way first."""
        return self.answer.reasons[0].code if self.answer.reasons else "no_text"


def advise(
    config: Config, backend: str, oracle: Oracle, choose: Choose, asked: str = AUTO
) -> tuple[Advice, ...]:
    """At most three ways, of as few changes as there are; none where the backend runs anyhow, where
    nothing is known, or where no change helps. asked: `auto`, or the setting under which `choose`
    answers, which the code then sets too.

    config's dtype must be filled in. Ways outside of the grammar have verified None and come last.
    """
    answer = oracle(config, backend)
    if answer.eligible is None:
        return ()
    if answer.eligible:
        return () if choose(config) == backend else (_name_it(config, backend, asked),)
    start = _State(config, answer)
    ways = [
        _way(config, state, backend, choose, asked) for state in _search(start, backend, oracle)
    ]
    if (outside := OUTSIDE.get(start.code)) and (advice := outside(config, backend)):
        ways.append(advice)
    return tuple(ways[:MOST])


def _search(start: _State, backend: str, oracle: Oracle) -> list[_State]:
    """Breadth first, so that the fewest changes come first. Only the reason that PyTorch stops at
    has to be removed: without that, nothing else can help.
    """
    seen = {start.config}
    level = [start]
    for _ in range(DEEPEST):
        following = [
            state for before in level for state in _steps_from(before, backend, oracle, seen)
        ]
        if goals := [state for state in following if state.answer.eligible]:
            return goals
        level = [state for state in following if state.answer.eligible is False]
    return []


def _steps_from(before: _State, backend: str, oracle: Oracle, seen: set[Config]) -> list[_State]:
    states: list[_State] = []
    served: set[str] = set()  # groups of which one change has removed the reason
    for change in CHANGES:
        if before.code not in change.codes or change.group in served:
            continue
        config = change.apply(before.config)
        if config is None or config in seen:
            continue
        seen.add(config)
        sentences = (*before.sentences, change.text.format(b=before.config, a=config))
        state = _State(config, oracle(config, backend), (*before.steps, change.name), sentences)
        if change.group and (state.answer.eligible or state.code != before.code):
            served.add(change.group)
        states.append(state)
    return states


def _way(config: Config, state: _State, backend: str, choose: Choose, asked: str) -> Advice:
    """Where another backend is taken even then, the code also names the wanted one."""
    choice = choose(state.config)
    named = asked if choice == backend else backend
    sentences = list(state.sentences)
    if named != asked:
        sentences.append(f"then name {backend} with sdpa_kernel, since {asked} takes {choice}")
    return Advice(
        change="; ".join(sentences),
        code=call_code(config, state.config, named),
        config=state.config.label,
        verified=True,
        choice=choice,
        steps=state.steps,
    )


def _name_it(config: Config, backend: str, asked: str) -> Advice:
    """Eligible, but not what is taken. The one verified way: asked under sdpa_kernel it is."""
    return Advice(
        change=f"nothing to change: {backend} can take it, but {asked} prefers another; allow {backend} alone with "
        "sdpa_kernel (PyTorch 2.6 and newer: or put it first and keep the others as a fallback, with "
        f"{setting_code(Setting((backend, 'math'), ordered=True))})",
        code=call_code(config, config, backend),
        config=config.label,
        verified=True,
        choice=backend,
        steps=("name it",),
    )


def _flex(config: Config, _: str) -> Advice | None:
    if config.causal or config.dropout:
        return None
    score = "score + bias[b, h, i, j]"
    if config.mask.startswith("bool"):
        score = 'torch.where(bias[b, h, i, j], score, -float("inf"))'
    arguments = "" if config.scale is None else f", scale={config.scale!r}"
    arguments += ", enable_gqa=True" if config.num_kv_heads != config.num_heads else ""
    return Advice(
        "keep the mask and call flex_attention, which takes any mask (its own kernels, not those of flash)",
        FLEX.format(score=score, arguments=arguments),
        steps=("flex",),
    )


def _switch(_: Config, backend: str) -> Advice:
    name = {"efficient": "mem_efficient"}.get(backend, backend)
    code = f"import torch\n\ntorch.backends.cuda.enable_{name}_sdp(True)"
    sentence = f"{backend} is switched off in this process; switch it on"
    return Advice(sentence, code, steps=("switch",))


def _four_d(config: Config, _: str) -> Advice:
    lines = call_code(config, config).split("\n")
    lines.insert(3, "q, k, v = (each.unsqueeze(0) for each in (q, k, v))")
    code = "\n".join([*lines, "out = out.squeeze(0)"])
    return Advice("give 3-D inputs a batch dimension", code, steps=("four_d",))


# Reasons with a way that no config can say.
OUTSIDE: dict[str, Callable[[Config, str], Advice | None]] = {
    "mask": _flex,
    "runtime_disabled": _switch,
    "not_4d": _four_d,
}
ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True)
class BackendAnswer:
    """One backend's side of an answer. eligible None: not known. reasons are all that stand in the
    way, the one that PyTorch stops at first. can_use: what `can_use_*_attention` says, None where
    there is no such function or it was not asked.
    """

    backend: str
    eligible: bool | None
    reasons: tuple[Refusal, ...] = ()
    advice: tuple[Advice, ...] = ()
    can_use: bool | None = None


@dataclass(frozen=True)
class LiveAnswer:
    """One config's answers; cell is the id that the question came with, config its label. choice is
    a backend or `none` where PyTorch raises. error: why nothing could be asked.
    """

    cell: str
    config: str
    choice: str | None = None
    priority_order: tuple[str, ...] = ()
    backends: tuple[BackendAnswer, ...] = ()
    error: str | None = None
