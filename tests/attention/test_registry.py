"""The registry of built-in backends: reasons for refusals without a GPU, and configs that they
cannot compute.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import PATIENCE_S

from profharness.attention.backends import (
    BACKENDS,
    LIBRARY_BACKENDS,
    SDPA_ROWS,
    SERVING_BACKENDS,
    TORCH_ROWS,
    find_backend,
)
from profharness.attention.backends.base import RefusedError, check_limits
from profharness.attention.config import MASKS, Config, expand_configs, parse_config
from profharness.commands.backends import show
from profharness.dtypes import CONFIG_DTYPES
from profharness.recording.capture import capture
from profharness.recording.probe import BackendState, probe_backends
from profharness.render.terminal import render_table
from profharness.run import CaptureOptions, Protocol, read_run

OTHERS = (*TORCH_ROWS, *LIBRARY_BACKENDS, *SERVING_BACKENDS)
ROOT = Path(__file__).resolve().parents[2]
QUICK = Protocol(iterations=1, warmup=0, samples=0, timeout_s=PATIENCE_S, device="cpu")


def test_every_backend_is_refused_without_a_gpu_and_never_fails(tmp_path: Path) -> None:
    configs = expand_configs("1,2,16,16,fp16,causal") + expand_configs("1,2,16,16,mask=bool,bwd")
    names = [backend.name for backend in OTHERS]
    record = read_run(capture(configs, names, CaptureOptions(("events",), tmp_path, QUICK)))
    for cell in record.cells:
        codes = [refusal.code for refusal in cell.refusals]
        assert (cell.status, "no_device" in codes) == ("refused", True), cell
        assert set(codes) <= {"absent", "no_device", "unsupported"}
        unpaged = cell.backend in {backend.name for backend in SERVING_BACKENDS}
        assert ("unsupported" in codes) == (unpaged or cell.config.mask == "bool"), cell
        for refusal in cell.refusals:
            assert refusal.message in str(cell.message)
    absent = {
        cell.backend: cell.refusals[0].message
        for cell in record.cells
        if cell.refusals[0].code == "absent"
    }
    for name in ("flash-attn", "xformers", "sage", "flashinfer"):
        if name in absent:
            assert "pip install" in absent[name]
    assert {"fa3", "fa4", "flex-flash"} <= set(absent)


def test_a_broken_library_is_absent_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "sageattention.py").write_text("raise OSError('libfoo.so: undefined symbol')\n")
    code = (
        "from profharness.attention.backends import BACKENDS\n"
        "from profharness.attention.backends.base import RefusedError\n"
        "backend = BACKENDS['sage']\n"
        "assert backend.absent() is None\n"
        "try: backend.load()\n"
        "except RefusedError as error: print(error.code, error)\n"
    )
    argv = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("absent sageattention is installed but cannot be loaded: OSError")
    assert "undefined symbol" in done.stdout


LIMITS = st.fixed_dictionaries(
    {
        "dtypes": st.sampled_from([(), ("fp16", "bf16")]),
        "square_causal": st.booleans(),
        "same_head_dim": st.booleans(),
        "max_head_dim": st.sampled_from([None, 64]),
        "forward_only": st.booleans(),
        "one_batch": st.booleans(),
    }
)
CONFIGS = st.builds(
    Config,
    batch=st.integers(1, 2),
    num_heads=st.just(2),
    num_kv_heads=st.integers(1, 2),
    seq_len_q=st.integers(1, 2),
    seq_len_kv=st.integers(1, 2),
    head_dim=st.sampled_from([64, 128]),
    dtype=st.sampled_from(CONFIG_DTYPES),
    causal=st.booleans(),
    mask=st.sampled_from(MASKS),
    dropout=st.sampled_from([0.0, 0.5]),
    bwd=st.booleans(),
    head_dim_v=st.sampled_from([None, 32]),
)


@settings(max_examples=300)
@given(LIMITS, CONFIGS)
def test_a_limit_refuses_only_its_configs(limits: dict[str, object], c: Config) -> None:
    against = (
        c.mask != "none"
        or c.dropout > 0
        or (bool(limits["dtypes"]) and c.dtype == "fp32")
        or (limits["square_causal"] and c.causal and c.seq_len_q != c.seq_len_kv)
        or (limits["same_head_dim"] and c.head_dim_v == 32)
        or (limits["max_head_dim"] == 64 and c.head_dim == 128)
        or (limits["forward_only"] and c.bwd)
        or (limits["one_batch"] and c.batch == 2)
    )
    assert (check_limits(**limits)(c) is not None) == against  # type: ignore[arg-type]


def test_the_registry_has_unique_names_and_sdpa_first() -> None:
    assert list(BACKENDS)[: len(SDPA_ROWS)] == [backend.name for backend in SDPA_ROWS]
    assert len(BACKENDS) == len(SDPA_ROWS) + len(OTHERS)
    assert all(backend.load is None for backend in SDPA_ROWS)
    for backend in OTHERS:
        assert backend.load is not None
        assert backend.refuses == (Exception,)
        assert backend.supports(parse_config("1,2,16,16,fp16,dropout=0.5")) == (
            "does not support dropout"
        )


def test_backends_lists_all_with_their_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "broken.py").write_text("import gone_for_good\n")
    monkeypatch.chdir(tmp_path)
    states = {state.backend: state for state in probe_backends()}
    own = [path.stem for path in sorted((ROOT / "kernels").glob("[!_]*.py"))]
    assert {"naive", "single_query", "flash_triton", "tiled"} <= set(own)
    assert [*BACKENDS, "broken", *own] == list(states)
    assert (states["math"].runs, states["math"].status, states["math"].code) == (True, "ok", None)
    assert (states["broken"].runs, states["broken"].status) == (False, "error")
    assert "gone_for_good" in str(states["broken"].reason)
    assert states["naive"].runs
    for name in {*own} - {"naive"}:  # without a GPU none of them is an error
        assert (states[name].runs, states[name].status) == (False, "refused"), states[name]
    document = show(list(states.values()))
    assert document.fields[:5] == ("backend", "runs", "reason", "device", "summary")
    assert [row["backend"] for row in document.records] == list(states)


def test_the_list_of_backends_has_reasons_only_if_it_is_full() -> None:
    """Bug: the list of 25 backends and their reasons took 97 lines of 80 columns."""
    reason = "does not run here; supports only fp16 and bf16, not fp32, on any of the devices"
    states = [
        BackendState(
            *(name, BACKENDS[name].summary, False, f"{name} {reason}", "cpu"),
            "refused",
            "no_device",
        )
        for name in ("flex", "varlen", "flash-attn")
    ]
    brief, full = (
        render_table(show(states, full=each), width=80, cut=True).splitlines()
        for each in (False, True)
    )
    lines = [line for line in brief if "requires a GPU" in line]
    assert [line.split()[0] for line in lines] == ["flex", "varlen", "flash-attn"]
    assert max(map(len, brief)) <= 80 and "does not run here" not in " ".join(brief)
    assert "does not run here" in " ".join(full)
    assert len(brief) <= 11  # a summary may take two lines


def test_refusals_have_codes() -> None:
    error = RefusedError("absent", "not here")
    assert (error.code, str(error)) == ("absent", "not here")


def test_naive_is_right_in_every_dtype() -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    load = find_backend("naive").load
    assert load is not None
    naive = load()
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        q = torch.randn(2, 4, 5, 16, dtype=dtype)
        k, v = torch.randn(2, 2, 9, 16, dtype=dtype), torch.randn(2, 2, 9, 8, dtype=dtype)
        arguments = {"is_causal": True, "scale": 0.3, "enable_gqa": True}
        out = naive(q, k, v, **arguments)
        wide = (each.double() for each in (q, k, v))
        want = scaled_dot_product_attention(*wide, **arguments)
        assert out.dtype == dtype
        assert (out.double() - want).abs().max() < limit
    with pytest.raises(ValueError, match="enable_gqa"):
        naive(q, k, v)
