"""Define configs. A config describes one attention problem.

Users write a config in a grammar, for example `2,8,512,64,bf16,causal`. The label of this config is
`b2-h8-s512-d64-bf16-causal`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from profharness.device_types import CPU, DEVICE_TYPES
from profharness.dtypes import CONFIG_DTYPES, DTYPES
from profharness.errors import (
    UsageError,
    choose_from,
    did_you_mean,
    join_and,
    join_few,
    with_clause,
)

SDP_BACKENDS = {  # the backends of SDPA, and their members of torch's SDPBackend enum
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
SDPA_BACKENDS = tuple(SDP_BACKENDS)
AUTO = "auto"  # PyTorch selects the backend, and no flag is changed
ALL_DISABLED = "all-disabled"  # the legacy sdp_kernel context, which leaves only cuDNN enabled
OWN_CHOICE = (AUTO, ALL_DISABLED)  # settings under which PyTorch selects the backend
BACKEND_ORDER = (AUTO, *SDPA_BACKENDS, ALL_DISABLED)
"""The order of PyTorch's own backends in tables, sentences and notes."""
MASKS = ("none", "bool", "float", "bool_2d", "float_bh", "float_grad")
# All shapes that a mask may have, such as `b1qk`. The letters stand for the batch, the heads, the
# queries and the keys, and 1 stands for a dimension that is broadcast. A 3-D mask has no batch
# dimension, and a 2-D mask has no batch dimension and no heads dimension.
MASK_SHAPES = tuple(
    "".join(letters)
    for dims in ("bhqk", "hqk", "qk")
    for letters in itertools.product(*(f"{letter}1" for letter in dims))
)
WHOLE_MASKS = {"bool_2d": "qk", "float_bh": "bhqk"}  # the default shape of all other masks is 11qk
LAYOUTS = ("contiguous", "bshd", "strided_last", "offset1", "broadcast_batch")
CACHE_DTYPES = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")  # the dtypes of a cache of keys and values
MAX_CONFIGS = 100_000


_STRIDES = re.compile(r"(-[a-z]+_strides=[0-9x]+)+")


def without_strides(text: str) -> str:
    """Replace the strides in a config's label with `strides…`."""
    return _STRIDES.sub("-strides…", text)


class ListKind(NamedTuple):
    """A kind of option whose value is a list of numbers."""

    pattern: str  # regular expression of the text
    parse: Callable[[str], tuple[Any, ...]]
    text: Callable[[Any], str]
    meaning: str  # what an error says the text should be


def _parse_lengths(text: str) -> tuple[tuple[int, int], ...]:
    """Parse lengths. Return sorted pairs of a length and its number of requests."""
    found: Counter[int] = Counter()
    for part in text.split("+"):
        length, _, count = part.partition("x")
        found[int(length)] += int(count or 1)
    return tuple(sorted(found.items()))


def _lengths_text(lengths: tuple[tuple[int, int], ...]) -> str:
    return "+".join(f"{length}x{count}" if count > 1 else str(length) for length, count in lengths)


_NUMBER = r"[1-9]\d{0,11}"
LISTS = {
    "strides": ListKind(
        r"\d{1,15}(?:x\d{1,15})*",
        lambda text: tuple(map(int, text.split("x"))),
        lambda value: "x".join(map(str, value)),
        "a list of strides such as 393216x64x1536x1",
    ),
    "sum": ListKind(
        rf"{_NUMBER}\+{_NUMBER}",
        lambda text: tuple(map(int, text.split("+"))),
        lambda value: "+".join(map(str, value)),
        "a sum such as 512+64",
    ),
    "lengths": ListKind(
        rf"{_NUMBER}(?:x{_NUMBER})?(?:\+{_NUMBER}(?:x{_NUMBER})?)*",
        _parse_lengths,
        _lengths_text,
        "a list of lengths such as 1024x8+4096x2 (8 requests of 1024 tokens and 2 of 4096)",
    ),
}


class ConfigOption(NamedTuple):
    """An option of the config grammar, and the field of Config that it sets."""

    name: str
    field: str
    kind: str
    """The kind of value: `number` (also a set or a range), `real`, `choice` (one of `allowed`),
    `word` (one of `allowed`, written without the option's name), `flag`, or a key of LISTS.
    """
    short: str = ""
    """Prefix of the number in a label, such as `kv` in `kv4`. It is empty for options that labels
    spell as in the grammar.
    """
    allowed: tuple[str, ...] = ()
    example: str = ""
    """An example value for the help text."""

    @property
    def default(self) -> Any:
        """The default of the field of Config, or None if the field has no default."""
        return getattr(Config, self.field, None)

    def text(self, value: Any) -> str:
        """Format the option as part of a label, such as `kv4`, `fp16` or `mask=bool`."""
        if self.short:
            return f"{self.short}{value}"
        if self.kind == "flag":
            return self.name
        if self.kind == "word":
            return str(value)
        if self.kind == "real":  # write no exponent, because labels are split at `-`
            value = format(Decimal(repr(value)).normalize(), "f")
        if self.kind in LISTS:
            value = LISTS[self.kind].text(value)
        return f"{self.name}={value}"


# The options, in the order in which a label lists them. All other lists of options are derived from
# this table.
OPTIONS = (
    ConfigOption("batch", "batch", "number", "b"),
    ConfigOption("heads", "num_heads", "number", "h"),
    ConfigOption("kv_heads", "num_kv_heads", "number", "kv"),
    ConfigOption("kv_batch", "kv_batch", "number", "kb"),
    ConfigOption("seq", "seq_len_q", "number", "s"),  # this option sets both sequence lengths
    ConfigOption("seq_q", "seq_len_q", "number", "sq"),
    ConfigOption("seq_kv", "seq_len_kv", "number", "skv"),
    ConfigOption("head_dim", "head_dim", "number", "d"),
    ConfigOption("head_dim_v", "head_dim_v", "number", "dv"),
    ConfigOption("dtype", "dtype", "word", allowed=CONFIG_DTYPES),
    ConfigOption("causal", "causal", "flag"),
    ConfigOption("window", "window", "number"),
    ConfigOption("lens", "lens", "lengths", example="1024x8+4096x2"),
    ConfigOption("page", "page", "number"),
    ConfigOption("kv_dtype", "kv_dtype", "choice", allowed=CACHE_DTYPES),
    ConfigOption("mla", "mla", "sum", example="512+64"),
    ConfigOption("softcap", "softcap", "real", example="30"),
    ConfigOption("sinks", "sinks", "flag"),
    ConfigOption("mask", "mask", "choice", allowed=MASKS),
    ConfigOption("mask_shape", "mask_shape", "choice", allowed=MASK_SHAPES),
    ConfigOption("dropout", "dropout", "real", example="0.1"),
    ConfigOption("scale", "scale", "real", example="0.125"),
    ConfigOption("layout", "layout", "choice", allowed=LAYOUTS),
    ConfigOption("q_strides", "q_strides", "strides", example="393216x64x1536x1"),
    ConfigOption("k_strides", "k_strides", "strides"),
    ConfigOption("v_strides", "v_strides", "strides"),
    ConfigOption("mask_strides", "mask_strides", "strides"),
    ConfigOption("bwd", "bwd", "flag"),
    ConfigOption("deterministic", "deterministic", "flag"),
)
POSITIONS = ("batch", "heads", "seq", "head_dim")  # the four numbers that every config has
KEYED = {
    option.name: option
    for option in OPTIONS
    if option.kind not in ("word", "flag") and option.name not in POSITIONS
}
FIELDS = {option.name: option.field for option in OPTIONS}
FEATURES = ("window", "lens", "page", "kv_dtype", "mla", "softcap", "sinks")
"""Options that change what a call computes, or how its cache is stored, beyond the arguments of
`scaled_dot_product_attention`.
"""
NUMERIC = tuple(option.name for option in OPTIONS if option.kind == "number")
SHORT = {option.short: option for option in OPTIONS if option.short}
_SHORT_TOKEN = re.compile(rf"({'|'.join(SHORT)})(\d+)")
FLAGS = tuple(option.name for option in OPTIONS if option.kind == "flag")
STRIDES = tuple(option.field for option in OPTIONS if option.kind == "strides")
EXAMPLE = "2,8,512,64,bf16,causal"
ALL_OPTIONS = "to list all options of a config, use: profharness capture --help"
MAX_DIGITS = 12
CACHE_ALIASES = {"fp8": "fp8_e4m3"}
# Maps other names of options to the names in the grammar, which error messages suggest.
OTHER_NAMES = {"kv": "kv_heads", "gqa": "kv_heads", "backward": "bwd", "grad": "bwd"}
# Maps other names of the dtypes to the names in the grammar, which error messages suggest.
DTYPE_ALIASES = {
    alias: name for name in CONFIG_DTYPES for alias in (DTYPES[name].torch, *DTYPES[name].aliases)
}
DTYPE_LIKE = re.compile(r"(?:fp|bf|float|bfloat|int|uint)[0-9]\w*", re.IGNORECASE)


def grammar_lines() -> list[str]:
    """Return the lines of the help text that list the options."""
    keyed = KEYED.values()
    numbers = " ".join(f"{option.name}=" for option in keyed if option.kind == "number")
    reals = [f"{option.name}={option.example}" for option in keyed if option.kind == "real"]
    strides = " ".join(f"{option.name}=" for option in keyed if option.kind == "strides")
    return [
        "  ".join([" ".join(CONFIG_DTYPES), *FLAGS]),
        numbers.rstrip(),
        "  ".join(reals),
        *(
            f"{option.name}={'|'.join(option.allowed)}"
            for option in keyed
            if option.allowed and option.allowed != MASK_SHAPES
        ),
        "mask_shape=b1qk (bhqk, hqk or qk, with 1 in place of each dimension to broadcast)",
        f"{strides} in elements, such as 393216x64x1536x1",
        "  ".join(
            f"{option.name}={option.example}"
            for option in keyed
            if option.kind in ("sum", "lengths")
        ),
        "kv8 sq1 skv4096 kb1 dv128 (in labels, short for kv_heads=8 seq_q=1 and so on)",
    ]


@dataclass(frozen=True)
class Config:
    """One attention problem. Its tensors have SDPA's layout [batch, heads, seq_len, head_dim]."""

    batch: int
    num_heads: int
    num_kv_heads: int
    seq_len_q: int
    seq_len_kv: int
    head_dim: int
    dtype: str | None = None
    """None means the default dtype of the device."""
    causal: bool = False
    mask: str = "none"
    """A `bool` mask selects scores, a `float` mask is added to the scores, and a `float_grad` mask
    also requires a gradient. The default shape is [1, 1, seq_len_q, seq_len_kv], except for
    `bool_2d` ([seq_len_q, seq_len_kv]) and `float_bh` ([batch, heads, seq_len_q, seq_len_kv]).
    """
    dropout: float = 0.0
    scale: float | None = None
    layout: str = "contiguous"
    """The memory layout of query, key and value. `bshd` is a transposed [batch, seq_len, heads,
    head_dim]. `strided_last` has a stride of 2 in the last dimension. `offset1` has a storage
    offset of one element. `broadcast_batch` has a batch stride of 0.
    """
    bwd: bool = False
    head_dim_v: int | None = None
    """The last dimension of the value and the output. None means that it equals head_dim."""
    deterministic: bool = False
    """Whether the call runs under torch.use_deterministic_algorithms."""
    kv_batch: int | None = None
    """Batch size of the key and the value. None means that it equals `batch`."""
    mask_shape: str | None = None
    """The shape of the mask, such as `b1qk`. None means the default shape of the kind of mask."""
    q_strides: tuple[int, ...] | None = None
    k_strides: tuple[int, ...] | None = None
    v_strides: tuple[int, ...] | None = None
    mask_strides: tuple[int, ...] | None = None
    """These four fields are strides in elements. None means that `layout` determines the strides of
    query, key or value, and that the mask is contiguous.
    """
    window: int | None = None
    """The size N of a sliding window. Query row i attends to the keys j with i - N < j <= i if the
    config is causal, and with i - N < j < i + N otherwise. None means that there is no window.
    """

    lens: tuple[tuple[int, int], ...] | None = None
    """The lengths of the requests of a batch, as sorted pairs of a number of keys and a number of
    requests. A request has `seq_len_q` new tokens, or all of its tokens if it is shorter. None means
    that every request has `seq_len_kv` keys.
    """
    page: int | None = None
    """The number of tokens in a page of a paged cache of keys and values. None means that the keys
    and values of a request are contiguous.
    """
    kv_dtype: str | None = None
    """The dtype of the cache of keys and values. None means that it equals `dtype`."""
    mla: tuple[int, int] | None = None
    """The dimensions of the latent vector and of the rotary part of multi-head latent attention with
    absorbed projections. For each token, all heads share one key that consists of both parts. The
    latent part of the key is also the value.
    """
    softcap: float | None = None
    """The limit c of the scores, which become c·tanh(score / c). None means no limit."""
    sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax, but has no value."""

    @property
    def is_served(self) -> bool:
        """Whether the config has properties that only serving engines use. If so, the causal mask
        and the window are aligned to the last key of each request, not to the first.
        """
        return bool(self.lens or self.page or self.kv_dtype or self.mla)

    @property
    def requests(self) -> tuple[tuple[int, int, int], ...]:
        """The numbers of queries and of keys of each kind of request, and the number of requests."""
        if self.lens is None:
            return ((self.seq_len_q, self.seq_len_kv, self.output_batch),)
        return tuple((min(self.seq_len_q, keys), keys, count) for keys, count in self.lens)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of keys of each request of the batch."""
        return tuple(keys for _, keys, count in self.requests for _ in range(count))

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """The number of queries of each request of the batch."""
        return tuple(queries for queries, _, count in self.requests for _ in range(count))

    @property
    def key_batch(self) -> int:
        """The batch size of the key and the value."""
        return self.batch if self.kv_batch is None else self.kv_batch

    @property
    def output_batch(self) -> int:
        """The batch size of the output. If query and key have different batch sizes, one of the
        sizes is 1 and is broadcast to the other size.
        """
        return max(self.batch, self.key_batch)

    @property
    def mask_dims(self) -> tuple[int, ...]:
        """The shape of the mask. It is empty if the config has no mask."""
        if self.mask == "none":
            return ()
        letters = self.mask_shape or WHOLE_MASKS.get(self.mask, "11qk")
        sizes = {"b": self.batch, "h": self.num_heads, "q": self.seq_len_q, "k": self.seq_len_kv}
        return tuple(sizes.get(letter, 1) for letter in letters)

    @property
    def value_dim(self) -> int:
        """The size of the last dimension of the value and the output."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def label(self) -> str:
        """The canonical short text of the config, which `parse_config` can parse."""
        square = self.seq_len_q == self.seq_len_kv
        unsaid = ["seq_q", "seq_kv"] if square else ["seq"]
        if self.num_kv_heads == self.num_heads or self.mla:
            unsaid.append("kv_heads")
        if self.mla:
            unsaid.append("head_dim_v")
        return "-".join(
            option.text(value)
            for option in OPTIONS
            if option.name not in unsaid
            and (value := getattr(self, option.field)) != option.default
        )

    def __str__(self) -> str:
        return self.label

    def resolve(self, device_type: str) -> Config:
        """Return the config, with the default dtype of the device if it has no dtype."""
        row = DEVICE_TYPES.get(device_type, DEVICE_TYPES[CPU])
        return self if self.dtype else replace(self, dtype=row.default_dtype)

    @property
    def features(self) -> dict[str, str]:
        """The options in FEATURES that are set, as texts such as `page=16`, by name."""
        values = {option: getattr(self, option.field) for option in OPTIONS}
        return {
            option.name: option.text(value)
            for option, value in values.items()
            if option.name in FEATURES and value != option.default
        }

    def contiguous(self) -> Config:
        """Return the config with a contiguous query, key and value."""
        return replace(self, layout="contiguous", q_strides=None, k_strides=None, v_strides=None)

    def sdpa_call(self) -> Config:
        """Return the config of the SDPA call that computes this config. SDPA has no parameter for a
        window, so a window becomes a bool mask [seq_len_q, seq_len_kv], which includes `causal`.
        """
        if self.window is None:
            return self
        return replace(self, window=None, causal=False, mask="bool_2d")

    def matches(self, stored: Config) -> bool:
        """Return whether a stored config equals this config. If this config has no dtype, it
        matches any dtype.
        """
        return stored == (self if self.dtype else replace(self, dtype=stored.dtype))


MOST_DIFFERENT = 3
"""A config is similar to another one if they differ in at most this many properties."""
_MOST_APART = 8
"""Maximum product of the factors by which the numbers of similar configs differ."""
_SAME_PROPERTY = {"seq_len_kv": "seq_len_q", "num_kv_heads": "num_heads"}
_OFTEN_LEFT_OUT = ("dtype", "layout", "q_strides", "k_strides", "v_strides", "mask_strides")
MOST_NAMED = 8
"""Maximum number of configs or backends that an error names."""


def nearest_config(config: Config, labels: Iterable[str]) -> list[str]:
    """Return the label of the most similar config in a list, or an empty list if none is similar.

    It has the fewest properties that differ and, of several such configs, the closest numbers. A
    dtype or layout that the config leaves out does not count.
    """
    ranked: list[tuple[int, float, str]] = []
    for label in labels:
        other = parse_config(label)
        factors: dict[str, float] = {}  # 1 for a property that is not a number
        for each in fields(Config):
            mine, theirs = getattr(config, each.name), getattr(other, each.name)
            left_out = each.name in _OFTEN_LEFT_OUT and mine == each.default
            if mine == theirs or left_out:
                continue
            name = _SAME_PROPERTY.get(each.name, each.name)
            numbers = isinstance(mine, int) and isinstance(theirs, int) and mine and theirs
            factor = max(mine / theirs, theirs / mine) if numbers else 1.0
            factors[name] = max(factor, factors.get(name, 1.0))
        apart = math.prod(factors.values())
        if len(factors) <= MOST_DIFFERENT and apart <= _MOST_APART:
            ranked.append((len(factors), apart, label))
    return [label for _, _, label in sorted(ranked, key=lambda each: each[:2])[:1]]


def held_configs_text(config: Config, labels: Sequence[str]) -> str:
    """Return the end of an error about a config that a run lacks: a similar one, and all configs."""
    near = nearest_config(config, labels)
    if not near:
        return f"it has {join_few(labels, MOST_NAMED)}"
    others = [label for label in labels if label not in near]
    also = f"it also has {join_few(others, MOST_NAMED)}"
    return with_clause(did_you_mean(near), also) if others else did_you_mean(near)


def outside_sdpa(config: Config) -> str | None:
    """Return why `scaled_dot_product_attention` cannot compute a config, or None if the config is
    supported. A window is no obstacle, because the window is passed as a mask.
    """
    texts = [text for name, text in config.features.items() if name != "window"]
    return f"scaled_dot_product_attention has no parameter for {join_and(texts)}" if texts else None


def parse_config(text: str) -> Config:
    """Parse one config, written in the grammar or as a label. Raise UsageError if the text is
    invalid or expands to several configs.
    """
    configs = expand_configs(text)
    if len(configs) != 1:
        raise UsageError(
            f"config {text!r} expands to {len(configs)} configs, but only one is allowed here"
        )
    return configs[0]


class SdpaSetting(NamedTuple):
    """The backends that a call of `sdpa_kernel` permits: one or more of SDPA_BACKENDS."""

    backends: tuple[str, ...]
    ordered: bool = False
    """Whether PyTorch tries the backends in this order (`sdpa_kernel` with set_priority=True)."""

    @property
    def name(self) -> str:
        """The canonical name: `flash+math` for a set of backends, `cudnn>flash` for an order."""
        return (">" if self.ordered else "+").join(self.backends)


def sdpa_setting(backend: str) -> SdpaSetting | None:
    """Parse the name of one SDPA backend (`math`), of a set (`flash+math`) or of an order
    (`cudnn>flash` or `cudnn-then-flash`). `all-disabled` permits only cuDNN.

    Return None for `auto` and for names that contain no SDPA backend. Raise UsageError if a set or
    an order is invalid.
    """
    if backend == ALL_DISABLED:
        return SdpaSetting(("cudnn",))
    words = re.split(r"(\+|>|-then-)", backend)
    names, marks = words[::2], set(words[1::2])
    # Names of files, packages and implementations are not settings, although they may contain `+`
    # or `>`.
    if re.search(r"[./:]", backend) or not {*names} & {*SDPA_BACKENDS}:
        return None
    wrong = [name for name in names if name not in SDPA_BACKENDS]
    if wrong or len({*names}) < len(names):
        what = f"contains {wrong[0]!r}" if wrong else "names a backend twice"
        raise UsageError(
            f"backend {backend!r} {what}; a set such as flash+math or an order such as "
            f"'cudnn>flash' may contain only {', '.join(SDPA_BACKENDS)}"
        )
    if "+" in marks and len(marks) > 1:
        raise UsageError(
            f"backend {backend!r} mixes + and >; join all names with + (a set) or all with > (an "
            "order)"
        )
    if len(names) == 1 or "+" not in marks:
        return SdpaSetting(tuple(names), ordered=len(names) > 1)
    return SdpaSetting(tuple(name for name in SDPA_BACKENDS if name in names))


def in_usual_order(backends: Iterable[str]) -> list[str]:
    """Return PyTorch's own backends in the order of BACKEND_ORDER, and then all others as given."""
    place = {name: at for at, name in enumerate(BACKEND_ORDER)}
    return sorted(backends, key=lambda name: place.get(name, len(place)))


def setting_name(backend: str) -> str:
    """Return the canonical name of a set or an order of backends. Return other names unchanged."""
    setting = sdpa_setting(backend)
    return backend if backend == ALL_DISABLED or setting is None else setting.name


def pytorch_chooses(backend: str) -> bool:
    """Return whether the name lets PyTorch select the backend, as `auto`, `all-disabled` and
    `flash+math` do.
    """
    setting = sdpa_setting(backend)
    return backend in OWN_CHOICE or (setting is not None and len(setting.backends) > 1)


def split_names(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Split `"flash, math"` or `["flash,math", "auto"]` into names, without empty names and
    duplicates. Raise UsageError for values that are not text.
    """
    if names is None:
        return ()
    texts = [names] if isinstance(names, str) or not isinstance(names, Iterable) else [*names]
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(
                f"{text!r} is not a name; give names as text, and your own implementation as "
                "file.py:function or package.module:function"
            )
    stripped = (name.strip() for text in texts for name in text.split(","))
    return tuple(dict.fromkeys(name for name in stripped if name))


def expand_configs(text: str) -> list[Config]:
    """Return the configs that a text describes, in the order of the text and without duplicates.
    Raise UsageError, which names the wrong token, if the text is invalid.
    """
    text = text.strip()
    if re.fullmatch(r"b\d+-h\d+-.*", text):
        return [_parse_label(text)]
    try:
        return _expand(text)
    except UsageError as error:
        raise UsageError(f"config {text!r}: {error}") from None


def require_configs(configs: Sequence[Config], *, runs: bool = False) -> None:
    """Raise UsageError if there is no config. `runs` tells whether the command accepts a run, too."""
    if not configs:
        or_run = ", a run (such as latest)" if runs else ""
        raise UsageError(
            f"no config given; name a config (such as 2,8,512,64,bf16){or_run} or --configs FILE"
        )


def parse_config_lines(lines: Iterator[str] | list[str], source: str) -> list[Config]:
    """Parse the lines of a file that contains configs and `#` comments. Error messages contain
    `source` and the line number.
    """
    configs: dict[Config, None] = {}
    count = 0  # duplicates count too, because expanding them takes time
    for number, line in enumerate(lines, start=1):
        token = line.split("#", 1)[0].strip()
        if not token:
            continue
        try:
            expanded = expand_configs(token)
        except UsageError as error:
            raise UsageError(f"{source}, line {number}: {error}") from None
        configs |= dict.fromkeys(expanded)
        count += len(expanded)
        if count > MAX_CONFIGS:
            raise UsageError(
                f"{source}, line {number}: more than {MAX_CONFIGS} configs in one file"
            )
    return list(configs)


def _expand(text: str) -> list[Config]:
    tokens = _split(text)
    if re.fullmatch(r"\d+([x:; ]\d+){3,}", text):
        written = re.sub(r"\D", ",", text)
        raise UsageError(f"separate the numbers by commas; write {written}")
    if tokens and re.fullmatch(r"b\d+", tokens[0]):
        tokens = _positions_first(tokens, text)
    if len(tokens) < 4:
        raise UsageError(
            f"found only {len(tokens)} of the 4 numbers batch,heads,seq_len,head_dim; for example "
            f"{EXAMPLE}; {ALL_OPTIONS}"
        )
    if match := re.fullmatch(r"(\d+)/(\d+)", tokens[1]):
        numbers = [tokens[0], match[1], *tokens[2:4], f"kv_heads={match[2]}"]
        written = ",".join([*numbers, *tokens[4:]])
        raise UsageError(f"{tokens[1]!r} is not a number; write {written}")
    for token in tokens[:4]:
        if match := _SHORT_TOKEN.fullmatch(token.replace("=", "", 1)):
            raise UsageError(_of_label(token, SHORT[match[1]].name, match[2]))
    positions = ("batch", "num_heads", "seq", "head_dim")
    fields: dict[str, list[Any]] = {
        name: list(_numbers(token)) for name, token in zip(positions, tokens[:4], strict=True)
    }
    for token in tokens[4:]:
        name, values = _option(token)
        if name in fields:
            raise UsageError(f"{token!r} sets {name} a second time")
        fields[name] = values
    count = math.prod(map(len, fields.values()))
    if count > MAX_CONFIGS:
        raise UsageError(f"expands to {count} configs; the limit is {MAX_CONFIGS}")
    configs = []
    for combination in itertools.product(*fields.values()):
        chosen: dict[str, Any] = dict(zip(fields, combination, strict=True))
        seq = chosen.pop("seq")
        lens, mla = chosen.get("lens"), chosen.get("mla")
        fill = {
            "num_kv_heads": 1 if mla else chosen["num_heads"],
            "seq_len_q": seq,
            "seq_len_kv": lens[-1][0] if lens else seq,
            "head_dim_v": mla[0] if mla else None,
        }
        configs.append(_canonical(Config(**(fill | chosen))))
    # remove duplicates, because a set may contain a value twice
    return list(dict.fromkeys(configs))


def _canonical(config: Config) -> Config:
    """Replace values with None where None has the same meaning. Raise UsageError if values
    contradict each other.
    """
    if config.num_heads % config.num_kv_heads:
        message = f"kv_heads={config.num_kv_heads} does not divide heads={config.num_heads}"
        raise UsageError(f"{message}, as grouped-query attention requires")
    if config.head_dim_v == config.head_dim:
        config = replace(config, head_dim_v=None)
    if config.kv_batch == config.batch:
        config = replace(config, kv_batch=None)
    if config.kv_batch is not None and 1 not in (config.kv_batch, config.batch):
        message = f"kv_batch={config.kv_batch} differs from batch={config.batch}"
        raise UsageError(f"{message}; one of them must be 1, so that it can be broadcast")
    if (config.mask_shape or config.mask_strides) and config.mask == "none":
        raise UsageError("mask_shape and mask_strides require mask=")
    if config.window is not None and config.mask != "none":
        raise UsageError(f"window={config.window} cannot be combined with mask={config.mask}")
    config = _canonical_serving(config)
    if config.mask_shape == WHOLE_MASKS.get(config.mask, "11qk"):
        config = replace(config, mask_shape=None)
    for name in STRIDES:
        given = getattr(config, name)
        wanted = len(config.mask_dims) if name == "mask_strides" else 4
        if given and len(given) != wanted:
            raise UsageError(f"{name} has {len(given)} numbers; expected {wanted}")
    strides = (config.q_strides, config.k_strides, config.v_strides)
    if any(strides) and config.layout != "contiguous":
        raise UsageError(f"strides cannot be combined with layout={config.layout}")
    return config


def _canonical_serving(config: Config) -> Config:
    """Check the properties of a config that only serving engines use, and its limit on scores."""
    if config.kv_dtype == config.dtype:
        config = replace(config, kv_dtype=None)
    if config.lens:
        requests, longest = sum(count for _, count in config.lens), config.lens[-1][0]
        if requests != config.batch:
            raise UsageError(f"lens= has {requests} requests, but batch is {config.batch}")
        if longest != config.seq_len_kv:
            raise UsageError(
                f"the longest length in lens= is {longest}, but seq_kv is {config.seq_len_kv}"
            )
        if len(config.lens) == 1:
            config = replace(config, lens=None)
    if config.mla and (config.num_kv_heads, config.head_dim, config.value_dim) != (
        *(1, sum(config.mla)),
        config.mla[0],
    ):
        raise UsageError(
            f"mla={config.mla[0]}+{config.mla[1]} requires kv_heads=1, head_dim {sum(config.mla)} "
            f"and head_dim_v={config.mla[0]}"
        )
    if config.softcap is not None and config.softcap <= 0:
        raise UsageError(f"softcap={config.softcap:g} must be above 0")
    training = {"bwd": config.bwd, "dropout=": config.dropout, "mask=": config.mask != "none"}
    if config.is_served and any(training.values()):
        name = next(name for name, is_set in training.items() if is_set)
        raise UsageError(f"{name} cannot be combined with lens=, page=, kv_dtype= or mla=")
    return config


def _split(text: str) -> list[str]:
    """Split the text at each comma that is not inside braces."""
    tokens = re.findall(r"(?:\{[^{}]*\}|[^,{}])+|(?<=,)(?=,|$)|^(?=,)", text)
    if text.count("{") != text.count("}") or "".join(tokens).count("{") != text.count("{"):
        raise UsageError("braces do not match")
    return [token.strip() for token in tokens]


def _option(token: str) -> tuple[str, list[Any]]:
    """Return the name of the field that a token sets, and the values for the field."""
    dtypes = _elements(token) if token.startswith("{") else [token]
    if all(dtype in CONFIG_DTYPES for dtype in dtypes):
        return "dtype", dtypes
    if token in FLAGS:
        return token, [True]
    if match := _SHORT_TOKEN.fullmatch(token):
        short = SHORT[match[1]]
        if short.name in POSITIONS:
            raise UsageError(f"{token!r} sets {short.name} a second time")
        return short.field, list(_numbers(match[2]))
    key, equals, value = token.partition("=")
    option = KEYED.get(key) if equals else None
    if option is None:
        raise UsageError(_unknown(token))
    if option.kind == "number":
        return option.field, list(_numbers(value))
    words = _elements(value)
    if option.kind == "real":
        return option.field, [_real(key, word) for word in words]
    if kind := LISTS.get(option.kind):
        for word in words:
            if not re.fullmatch(kind.pattern, word):
                raise UsageError(f"{key}={word!r} is not {kind.meaning}")
        return option.field, list(map(kind.parse, words))
    if key == "kv_dtype":
        words = [CACHE_ALIASES.get(word, word) for word in words]
    for word in words:
        if option.allowed and word not in option.allowed:
            raise UsageError(f"{key}={word!r} is unknown; {choose_from(word, option.allowed)}")
    return option.field, words


def _unknown(token: str) -> str:
    """Return the error text for a token that is not an option."""
    if not token:
        return "nothing follows a comma; remove the comma"
    key, equals, value = token.partition("=")
    if equals and key in FLAGS:
        return f"cannot read {token!r}; write {key} without a value"
    elements = _elements(token.removeprefix("dtype="))
    if not set(FLAGS).isdisjoint(elements):
        return (
            f"cannot read {token!r}: a set cannot contain flags; give a separate config for each "
            "flag"
        )
    meant = [DTYPE_ALIASES.get(word.lower(), word.lower()) for word in elements]
    if all(word in CONFIG_DTYPES for word in meant):
        hint = meant[0] if len(meant) == 1 else f"{{{','.join(meant)}}}"
        return f"cannot read {token!r}; write {hint}"
    if all(map(DTYPE_LIKE.fullmatch, elements)):
        return (
            f"cannot read {token!r}; the dtypes are {join_and(CONFIG_DTYPES)}; kv_dtype= sets the "
            "dtype of a paged cache"
        )
    if equals and key in SHORT:
        key = SHORT[key].name
    if equals and key in POSITIONS:
        return (
            f"cannot read {token!r}; {key} is one of the four numbers at the start, as in {EXAMPLE}"
        )
    import difflib  # needed only for this error

    options = (*CONFIG_DTYPES, *FLAGS, *KEYED)
    near = difflib.get_close_matches(key.lower(), options, n=1)
    name = OTHER_NAMES.get(key.lower()) or next(iter(near), None)
    if name is None:
        return f"cannot read {token!r}; {ALL_OPTIONS}"
    written = f"{name}={value or '…'}" if name in KEYED else name
    return f"cannot read {token!r}; did you mean {written}? {ALL_OPTIONS}"


def _of_label(token: str, name: str, number: str) -> str:
    """Return the error text for a part of a label, such as `kv8`, in place of one of four numbers."""
    after = "after the four numbers batch,heads,seq_len,head_dim"
    written = number if name in POSITIONS else f"{name}={number} {after}"
    return (
        f"{token!r} is not a number; write {written}, or write the whole config as a label, as in "
        "b4-h32-kv8-s2048-d128"
    )


def _elements(value: str) -> list[str]:
    return [word.strip() for word in value.strip("{}").split(",")]


def _real(key: str, word: str) -> float:
    try:
        value = float(Decimal(word))
    except (ArithmeticError, ValueError):  # float() raises ValueError for a signalling NaN
        raise UsageError(f"{key}={word!r} is not a number") from None
    if key == "dropout" and not 0 <= value < 1:
        raise UsageError(f"dropout={word} is outside 0 <= p < 1")
    if not math.isfinite(value):
        raise UsageError(f"{key}={word!r} is not a finite number")
    return value


def _numbers(token: str) -> Iterator[int]:
    inner = token[1:-1] if token.startswith("{") and token.endswith("}") else token
    words = inner.split(",") if inner is not token else [token]
    values = itertools.chain.from_iterable(_range(word.strip()) for word in words)
    for count, value in enumerate(values):
        if count == MAX_CONFIGS:
            raise UsageError(f"{token!r} has more than {MAX_CONFIGS} values")
        yield value


def _range(word: str) -> Iterator[int]:
    """Yield the numbers in a text such as `512`, `128:4096:*2` or `64:256:+64`, including both ends."""
    if re.fullmatch(r"[+-]?\d+\.?\d*", word) and not word.isdecimal():
        raise UsageError(f"{word!r} must be a positive integer")
    match = re.fullmatch(r"(\d+)(?::(\d+):([*+])(\d+))?", word)
    if not match:
        raise UsageError(
            f"{word!r} is not a number; write 512, a set {{1,2,4}} or a range 128:4096:*2 or "
            "64:256:+64"
        )
    if any(len(part) > MAX_DIGITS for part in re.findall(r"\d+", word)):
        raise UsageError(f"{word!r} is too large; a number has at most {MAX_DIGITS} digits")
    start, step = int(match[1]), int(match[4] or 0)
    stop = int(match[2] or start)
    if start < 1:
        raise UsageError(f"{word!r} must be a positive integer")
    if match[2] and (stop < start or step < (2 if match[3] == "*" else 1)):
        raise UsageError(
            f"range {word!r} never reaches its end; write start:end:*factor or start:end:+step"
        )
    if not match[2]:
        yield start
    elif match[3] == "+":
        yield from range(start, stop + 1, step)
    else:
        while start <= stop:
            yield start
            start *= step


@lru_cache(maxsize=4096)  # cached, because many rows of a store have the same label
def _parse_label(text: str) -> Config:
    tokens = _positions_first(re.split(r"-(?![\d.])", text), text)
    return expand_configs(",".join(tokens))[0]


def _positions_first(tokens: Sequence[str], label: str) -> list[str]:
    """Return the tokens of a label in the order of the grammar, which starts with four numbers.

    The number of a token such as `b2` moves to its position. All other tokens remain unchanged.
    """
    numbers: dict[str, str] = {}
    queries = ""
    others: list[str] = []
    for token in tokens:
        match = _SHORT_TOKEN.fullmatch(token)
        name = SHORT[match[1]].name if match else ""
        if match and name in POSITIONS and name not in numbers:
            numbers[name] = match[2]
        else:
            others.append(token)
        if match and name == "seq_q":
            queries = match[2]
    numbers.setdefault("seq", queries)
    if not all(map(numbers.get, POSITIONS)):
        raise UsageError(
            f"invalid label {label!r}; write b…-h…-s…-d…, for example b2-h8-s512-d64-fp16"
        )
    return [*(numbers[name] for name in POSITIONS), *others]
