"""Names as Kineto prints them, and names that would keep a demangler busy forever."""

from __future__ import annotations

import os
import resource

from nsys_make import FLASH, FLASH_CANONICAL

from profharness.traces.demangle import MAX_DEMANGLED, canonical_names
from profharness.traces.demangle import _expands as expands
from profharness.traces.kernel_names import canonical
from profharness.traces.nsys_export import memcpy_name, memset_name

REFERENCES = 40  # more than this process demangles itself


def bomb(levels: int) -> str:
    """Return a function of `levels` parameters, each a pair of the previous one, so that the text
    doubles with each level.
    """
    text = "_Z1f4pairIiiE"
    text += "S_IS0_S0_E"
    for level in range(levels - 1):
        digits = base36(level)
        text += f"S_IS{digits}_S{digits}_E"
    return text


def base36(number: int) -> str:
    number += 1
    digits = ""
    while number:
        number, rest = divmod(number, 36)
        digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[rest] + digits
    return digits or "0"


def test_transfers_are_named_as_kineto_names_them() -> None:
    assert memcpy_name(1, 1, 2) == "Memcpy HtoD (Pinned -> Device)"
    assert memcpy_name(2, 2, 0) == "Memcpy DtoH (Device -> Pageable)"
    assert memcpy_name(8, 2, 2) == "Memcpy DtoD (Device -> Device)"
    assert memcpy_name(10, 2, 2) == "Memcpy PtoP (Device -> Device)"
    assert memcpy_name(99, -1, 9) == "Memcpy <unknown> (Unknown -> Unknown)"
    assert memset_name(2) == "Memset (Device)"


def test_plain_names_are_demangled_in_process() -> None:
    names, warnings = canonical_names([FLASH, "plain", "_Znonsense"])
    assert names == {FLASH: FLASH_CANONICAL, "plain": "plain", "_Znonsense": "_Znonsense"}
    assert warnings == []


def test_a_name_with_many_references_is_demangled_in_a_child() -> None:
    name = "_Z1f" + "3abc" + "S_" * (REFERENCES)
    names, warnings = canonical_names([name, FLASH])
    assert names[name] == canonical(name) != name
    assert (names[FLASH], warnings) == (FLASH_CANONICAL, [])


def cpu_seconds() -> float:
    """Return the processor time of this process and its finished children."""
    return sum(os.times()[:4])


def test_a_bomb_stays_mangled_within_bounded_memory() -> None:
    begun = cpu_seconds()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    good = "_Z1f" + "3abc" + "S_" * (REFERENCES)
    bombs = [bomb(40), bomb(60)]
    names, warnings = canonical_names([*bombs, good])
    assert [names[name] for name in bombs] == bombs
    assert names[good] == canonical(good)
    assert warnings == ["2 kernel names are too complex to demangle and remain mangled"]
    assert cpu_seconds() - begun < 30
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 50_000  # KiB


def test_a_demangled_name_beyond_the_limit_stays_mangled() -> None:
    """So few references are demangled in this process, and the result is not kept."""
    name = bomb(8).replace("4pair", "400" + "a" * 400)
    assert not expands(name)
    assert len(canonical(name)) > MAX_DEMANGLED
    names, warnings = canonical_names([name, FLASH])
    assert names == {name: name, FLASH: FLASH_CANONICAL}
    assert warnings == ["1 kernel names are too complex to demangle and remain mangled"]


def test_types_that_old_demanglers_do_not_know_are_demangled() -> None:
    names = {
        "_ZN7ck_tile6kentryIDF16_EEvT_": "void ck_tile::kentry<_Float16>(_Float16)",
        "_ZN7ck_tile6kentryIDF16bDF16_EEvT_T0_": (
            "void ck_tile::kentry<__bf16, _Float16>(__bf16, _Float16)"
        ),
        "_ZN7ck_tile6kentryIDF16_": "_ZN7ck_tile6kentryIDF16_",  # cut off
    }
    assert {name: canonical(name) for name in names} == names
