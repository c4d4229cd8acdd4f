"""One attention problem, and the grammar that names it: `2,8,512,64,bf16,causal` and its label
`b2-h8-s512-d64-bf16-causal`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from profharness.errors import UsageError

DTYPES = ("fp16", "bf16", "fp32")
SDPA_BACKENDS = ("flash", "efficient", "cudnn", "math")  # the ones that SDPA chooses between
OWN_CHOICE = ("auto", "all-disabled")  # settings that leave the choice to PyTorch
MASKS = ("none", "bool", "float", "bool_2d", "float_bh", "float_grad")
LAYOUTS = ("contiguous", "bshd", "strided_last", "offset1", "broadcast_batch")
WORDS = ("causal", "bwd", "deterministic")
KEYS = ("kv_heads", "seq_q", "seq_kv", "head_dim_v", "mask", "dropout", "scale", "layout")
NUMBERS = {
    "kv_heads": "num_kv_heads",
    "seq_q": "seq_len_q",
    "seq_kv": "seq_len_kv",
    "head_dim_v": "head_dim_v",
}
MAX_CONFIGS = 100_000


EXAMPLE = "2,8,512,64,bf16,causal"
GRAMMAR = (
    "batch,heads,seq_len,head_dim then, in any order: a dtype (fp16 bf16 fp32), "
    f"{', '.join(WORDS)}, and key=value of {' '.join(KEYS)}; "
    "any number may be a set {1,2,4} or a range 128:4096:*2, 64:256:+64"
)


@dataclass(frozen=True)
class Config:
    """Shapes in SDPA's layout [batch, heads, seq_len, head_dim]. dtype None: the device's default,
    fp16 on CUDA, fp32 on the CPU.

    head_dim_v is the last dimension of value and output, None where it is head_dim. mask float is
    additive; shapes are [1, 1, seq_len_q, seq_len_kv], but [seq_len_q, seq_len_kv] for bool_2d and
    [batch, heads, seq_len_q, seq_len_kv] for float_bh; float_grad requires a gradient.
    deterministic: under torch.use_deterministic_algorithms. layout says how the three inputs lie
    in memory: `bshd` is a transposed [batch, seq_len, heads, head_dim], `strided_last` has a last
    stride of 2, `offset1` a storage offset of one element, `broadcast_batch` batch stride 0.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    seq_len_q: int
    seq_len_kv: int
    head_dim: int
    dtype: str | None = None
    causal: bool = False
    mask: str = "none"
    dropout: float = 0.0
    scale: float | None = None
    layout: str = "contiguous"
    bwd: bool = False
    head_dim_v: int | None = None
    deterministic: bool = False

    @property
    def value_dim(self) -> int:
        """The last dimension of value and output."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def label(self) -> str:
        """The canonical short text, which `parse_config` reads back; without a dtype if none was
        given.
        """
        parts = [f"b{self.batch}", f"h{self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"kv{self.num_kv_heads}")
        if self.seq_len_q == self.seq_len_kv:
            parts.append(f"s{self.seq_len_q}")
        else:
            parts += [f"sq{self.seq_len_q}", f"skv{self.seq_len_kv}"]
        parts.append(f"d{self.head_dim}")
        parts += [f"dv{self.head_dim_v}"] if self.head_dim_v is not None else []
        parts += [self.dtype] if self.dtype else []
        parts += ["causal"] if self.causal else []
        parts += [f"mask={self.mask}"] if self.mask != "none" else []
        parts += [f"dropout={_plain(self.dropout)}"] if self.dropout else []
        parts += [f"scale={_plain(self.scale)}"] if self.scale is not None else []
        parts += [f"layout={self.layout}"] if self.layout != "contiguous" else []
        parts += ["bwd"] if self.bwd else []
        parts += ["deterministic"] if self.deterministic else []
        return "-".join(parts)

    def __str__(self) -> str:
        return self.label

    def resolve(self, device_type: str) -> Config:
        """The config with its dtype filled in: fp16 on `cuda`, fp32 on `cpu`."""
        return (
            self if self.dtype else replace(self, dtype="fp16" if device_type == "cuda" else "fp32")
        )

    def matches(self, stored: Config) -> bool:
        """Whether a stored config answers a question about this one; no dtype here means any dtype
        there.
        """
        return stored == (self if self.dtype else replace(self, dtype=stored.dtype))


def parse_config(text: str) -> Config:
    """One config from grammar or label. Raises UsageError when it is wrong or stands for more than
    one.
    """
    configs = expand_configs(text)
    if len(configs) != 1:
        raise UsageError(f"config {text!r} stands for {len(configs)} configs; one is wanted here")
    return configs[0]


def split_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """`"flash, math"` or `["flash,math", "auto"]` -> each name once, empty ones left out."""
    texts = [names] if isinstance(names, str) else names
    stripped = (name.strip() for text in texts for name in text.split(","))
    return tuple(dict.fromkeys(name for name in stripped if name))


def expand_configs(text: str) -> list[Config]:
    """Every config that a text stands for, in the order written, without repeats. Raises UsageError
    naming the token.
    """
    text = text.strip()
    if re.fullmatch(r"b\d+-h\d+-.*", text):
        return [_parse_label(text)]
    tokens = _split(text)
    if len(tokens) < 4:
        raise UsageError(
            f"config {text!r}: {len(tokens)} of 4 numbers; expected {GRAMMAR}; for example {EXAMPLE}"
        )
    fields: dict[str, list[object]] = {}
    for name, token in zip(("batch", "num_heads", "seq", "head_dim"), tokens[:4], strict=True):
        fields[name] = list(_numbers(token, text))
    for token in tokens[4:]:
        name, values = _option(token, text)
        if name in fields:
            raise UsageError(f"config {text!r}: {token!r} says {name} a second time")
        fields[name] = values
    return _product(fields, text)


def parse_config_lines(lines: Iterator[str] | list[str], source: str) -> list[Config]:
    """Configs from a text file's lines, `#` comments and blank lines allowed; errors name `source`
    and the line.
    """
    configs: list[Config] = []
    for number, line in enumerate(lines, start=1):
        token = line.split("#", 1)[0].strip()
        if not token:
            continue
        try:
            configs += expand_configs(token)
        except UsageError as error:
            raise UsageError(f"{source}, line {number}: {error}") from None
    return list(dict.fromkeys(configs))


def _product(fields: dict[str, list[object]], text: str) -> list[Config]:
    count = 1
    for values in fields.values():
        count *= len(values)
    if count > MAX_CONFIGS:
        raise UsageError(
            f"config {text!r} stands for {count} configs; at most {MAX_CONFIGS} at once"
        )
    configs = []
    for combination in itertools.product(*fields.values()):
        chosen: dict[str, Any] = dict(zip(fields, combination, strict=True))
        seq = chosen.pop("seq")
        heads = chosen["num_heads"]
        fill = {"num_kv_heads": heads, "seq_len_q": seq, "seq_len_kv": seq}
        configs.append(_checked(Config(**(fill | chosen)), text))
    return list(dict.fromkeys(configs))


def _checked(config: Config, text: str) -> Config:
    if config.num_heads % config.num_kv_heads:
        message = f"kv_heads={config.num_kv_heads} does not divide heads={config.num_heads}"
        raise UsageError(f"config {text!r}: {message}; grouped queries need a divisor")
    if config.head_dim_v == config.head_dim:
        return replace(config, head_dim_v=None)
    return config


def _split(text: str) -> list[str]:
    """Tokens between commas that stand outside braces."""
    tokens = re.findall(r"(?:\{[^{}]*\}|[^,{}])+|(?<=,)(?=,|$)|^(?=,)", text)
    if text.count("{") != text.count("}") or "".join(tokens).count("{") != text.count("{"):
        raise UsageError(f"config {text!r}: braces do not match")
    return [token.strip() for token in tokens]


def _option(token: str, text: str) -> tuple[str, list[object]]:
    if token in DTYPES:
        return "dtype", [token]
    if token in WORDS:
        return token, [True]
    if token.startswith("{"):
        words = [word.strip() for word in token.strip("{}").split(",")]
        if all(word in DTYPES for word in words):
            return "dtype", list(words)
    key, equals, value = token.partition("=")
    if not equals or key not in KEYS:
        raise UsageError(
            f"config {text!r}: cannot read {token!r}; allowed after the four numbers: "
            f"{' '.join(DTYPES)} {' '.join(WORDS)} {' '.join(f'{name}=' for name in KEYS)}"
        )
    if key in NUMBERS:
        return NUMBERS[key], list(_numbers(value, text))
    words = [word.strip() for word in value.strip("{}").split(",")]
    if key in ("dropout", "scale"):
        return key, [_real(key, word, text) for word in words]
    allowed = MASKS if key == "mask" else LAYOUTS
    for word in words:
        if word not in allowed:
            raise UsageError(f"config {text!r}: {key}={word!r}; allowed are {' '.join(allowed)}")
    return key, list(words)


def _real(key: str, word: str, text: str) -> float:
    try:
        value = float(Decimal(word))
    except ArithmeticError:
        raise UsageError(f"config {text!r}: {key}={word!r} is not a number") from None
    if key == "dropout" and not 0 <= value < 1:
        raise UsageError(f"config {text!r}: dropout={word} is outside 0 <= p < 1")
    if not abs(value) < float("inf"):
        raise UsageError(f"config {text!r}: {key}={word!r} is not a finite number")
    return value


def _numbers(token: str, text: str) -> Iterator[int]:
    inner = token[1:-1] if token.startswith("{") and token.endswith("}") else token
    for word in inner.split(",") if inner is not token else [token]:
        yield from _range(word.strip(), text)


def _range(word: str, text: str) -> Iterator[int]:
    """`512`, `128:4096:*2` or `64:256:+64`; both ends count."""
    match = re.fullmatch(r"(\d{1,12})(?::(\d{1,12}):([*+])(\d{1,12}))?", word)
    if not match:
        raise UsageError(
            f"config {text!r}: {word!r} is not a number; allowed are 512, a set {{1,2,4}}, "
            "a range 128:4096:*2 or 64:256:+64"
        )
    start, step = int(match[1]), int(match[4] or 0)
    stop = int(match[2] or start)
    if start < 1:
        raise UsageError(f"config {text!r}: {word!r} must be at least 1")
    if match[2] and (stop < start or step < (2 if match[3] == "*" else 1)):
        raise UsageError(
            f"config {text!r}: range {word!r} never reaches its end; write start:end:*factor or start:end:+step"
        )
    if match[3] == "+" and (stop - start) // step >= MAX_CONFIGS:
        raise UsageError(f"config {text!r}: range {word!r} has more than {MAX_CONFIGS} values")
    value = start
    while value <= stop:
        yield value
        if not match[3]:
            return
        value = value * step if match[3] == "*" else value + step


def _parse_label(text: str) -> Config:
    names = {
        "b": "batch",
        "h": "num_heads",
        "kv": "kv_heads=",
        "s": "seq",
        "sq": "seq_q=",
        "skv": "seq_kv=",
        "d": "head_dim",
        "dv": "head_dim_v=",
    }
    numbers: dict[str, str] = {}
    options: list[str] = []
    for part in re.split(r"-(?![\d.])", text):
        match = re.fullmatch(r"(b|h|kv|sq|skv|s|dv|d)(\d+)", part)
        if match and names[match[1]] not in numbers:
            numbers[names[match[1]]] = match[2]
        else:
            options.append(part)
    numbers.setdefault("seq", numbers.get("seq_q=", ""))
    four = [numbers.get(name, "") for name in ("batch", "num_heads", "seq", "head_dim")]
    if not all(four):
        raise UsageError(f"label {text!r}: wants b…-h…-s…-d…, for example b2-h8-s512-d64-fp16")
    keyed = [f"{name}{value}" for name, value in numbers.items() if name.endswith("=")]
    configs = expand_configs(",".join([*four, *keyed, *options]))
    return configs[0]


def _plain(value: float) -> str:
    """A float without an exponent, so that labels split on `-` and parse back to the same value."""
    return format(Decimal(repr(value)).normalize(), "f")
