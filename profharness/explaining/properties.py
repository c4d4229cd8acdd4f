"""The properties of configs by the names of the grammar: reading, setting, and which of them vary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from profharness.config import Config
from profharness.errors import UsageError

NUMERIC = ("batch", "heads", "kv_heads", "seq", "seq_q", "seq_kv", "head_dim", "head_dim_v")
WORDS = ("dtype", "causal", "mask", "dropout", "scale", "layout", "bwd", "deterministic")
_FIELDS = {
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "seq_q": "seq_len_q",
    "seq_kv": "seq_len_kv",
}
Value = int | float | str | bool | None


def get(config: Config, name: str) -> Value:
    """A property's value; `seq` is seq_len_q, head_dim_v is filled in where it is head_dim."""
    if name == "head_dim_v":
        return config.value_dim
    field = {"seq": "seq_len_q"}.get(name, _FIELDS.get(name, name))
    value: Value = getattr(config, field)
    return value


def number(config: Config, name: str) -> int:
    """A numeric property's value."""
    return int(str(get(config, name)))


def put(config: Config, name: str, value: int) -> Config | None:
    """The config with a numeric property set: kv_heads follows heads and head_dim_v head_dim where
    they were the same. None where no such config exists (kv_heads that does not divide heads).
    """
    if name == "seq":
        return replace(config, seq_len_q=value, seq_len_kv=value)
    if name == "head_dim_v":
        return replace(config, head_dim_v=None if value == config.head_dim else value)
    changed = replace(config, **{_FIELDS.get(name, name): value})  # type: ignore[arg-type]
    if name == "heads" and config.num_kv_heads == config.num_heads:
        changed = replace(changed, num_kv_heads=value)
    if name == "head_dim" and config.head_dim_v == value:
        changed = replace(changed, head_dim_v=None)
    return changed if changed.num_heads % changed.num_kv_heads == 0 else None


def numeric(name: str) -> str:
    """The name, if it is a numeric property. Raises UsageError otherwise."""
    if name in NUMERIC:
        return name
    told = "is a word, not a number" if name in WORDS else "is no property"
    raise UsageError(f"--bisect {name!r} {told}; numeric properties are {' '.join(NUMERIC)}")


def varying(configs: Sequence[Config]) -> list[str]:
    """The properties that differ among configs, numbers first. seq stands for both lengths where
    they are always equal; kv_heads and head_dim_v count only where they do not just follow.
    """
    names = [*NUMERIC, *WORDS]
    square = all(each.seq_len_q == each.seq_len_kv for each in configs)
    names = [n for n in names if n not in (("seq_q", "seq_kv") if square else ("seq",))]
    if all(each.num_kv_heads == each.num_heads for each in configs):
        names.remove("kv_heads")
    if all(each.head_dim_v is None for each in configs):
        names.remove("head_dim_v")
    return [name for name in names if len({get(each, name) for each in configs}) > 1]
