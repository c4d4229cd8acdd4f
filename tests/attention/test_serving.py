"""Paged caches, configs of serving engines, and the reference that verifies them."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from profharness.attention.backends import BACKENDS  # noqa: E402
from profharness.attention.backends.base import Inputs, Prepared  # noqa: E402
from profharness.attention.backends.serving import (  # noqa: E402
    PageTable,
    fill_pages,
    packed_queries,
    page_table,
    paged_supports,
    trtllm_supports,
    unpacked,
)
from profharness.attention.config import Config, outside_sdpa, parse_config  # noqa: E402
from profharness.attention.costs import compulsory_bytes, flops, tensor_bytes  # noqa: E402
from profharness.program.phases import HeadShape, part_work  # noqa: E402
from profharness.recording.worker.attention import make_inputs, make_output  # noqa: E402
from profharness.recording.worker.verify import attend  # noqa: E402
from profharness.traces.engine_steps import BatchPart  # noqa: E402

SERVED = (
    "3,4,1,8,fp32,kv_heads=2,lens=5+9+16,page=4",
    "3,4,6,8,fp32,kv_heads=2,lens=5+9+16,page=4,causal",
    "3,4,16,8,fp32,kv_heads=4,lens=5+9+16,page=4,causal,window=3",
    "2,4,3,8,fp32,seq_kv=11,page=4,causal,softcap=2",
    "2,4,3,8,fp32,seq_kv=11,page=4,causal,sinks",
    "2,4,3,24,fp32,seq_kv=11,page=4,causal,mla=16+8",
    "2,4,3,8,bf16,seq_kv=11,page=4,kv_dtype=fp8",
)


def brute_force(config: Config, inputs: Inputs) -> Any:
    """Compute attention one query at a time, in fp64."""
    out = torch.zeros(config.batch, config.num_heads, config.seq_len_q, config.value_dim).double()
    group = config.num_heads // config.num_kv_heads
    scale = 1 / math.sqrt(config.head_dim)
    for at, head in itertools.product(range(config.batch), range(config.num_heads)):
        queries, keys = config.new_tokens[at], config.lengths[at]
        for row in range(queries):
            own = keys - queries + row  # the position of the query among the keys
            seen = [
                key
                for key in range(keys)
                if (not config.causal or key <= own)
                and (config.window is None or key > own - config.window)
            ]
            key, value = (
                tensor[at, head // group, seen].double() for tensor in (inputs.key, inputs.value)
            )
            scores = key @ inputs.query[at, head, row].double() * scale
            if config.softcap:
                scores = config.softcap * torch.tanh(scores / config.softcap)
            weights = scores.exp()
            extra = inputs.sinks[head].double().exp() if config.sinks else 0
            out[at, head, row] = (weights / (weights.sum() + extra)) @ value
    return out


@pytest.mark.parametrize("text", SERVED)
def test_the_reference_equals_a_computation_row_by_row(text: str) -> None:
    config = parse_config(text)
    inputs = make_inputs(config, "cpu", 7)
    found = attend(config, inputs, torch.float64)[0]["out"]
    torch.testing.assert_close(found, brute_force(config, inputs), rtol=1e-12, atol=1e-12)


def gather(table: PageTable, cache: Any, at: int) -> Any:
    """Return the rows [tokens, H, D] of a request as its pages list them."""
    starts = table.starts.tolist()
    rows = cache[table.pages[starts[at] : starts[at + 1]].long()].flatten(0, 1)
    whole = (starts[at + 1] - starts[at] - 1) * cache.shape[1]
    return rows[: whole + int(table.last[at])]


def test_every_token_is_in_the_page_that_the_table_names() -> None:
    config = parse_config("3,4,1,8,fp32,kv_heads=2,lens=5+8+130,page=4")
    table = page_table(config.lengths, 4)
    assert sorted(table.pages.tolist()) == list(range(2 + 2 + 33))
    assert table.pages.tolist() != sorted(table.pages.tolist())
    assert table.last.tolist() == [1, 4, 2]
    key = make_inputs(config, "cpu", 1).key
    cache = fill_pages(key, config.lengths, 4, table)
    for at, length in enumerate(config.lengths):
        assert torch.equal(gather(table, cache, at), key[at, :, :length].transpose(0, 1))


def paged_in_torch(table_of: Any = page_table) -> Any:
    """Return attention over a paged cache in plain torch, prepared as FlashInfer's is."""

    def prepare(config: Config, inputs: Inputs) -> Prepared:
        page = config.page or 1
        own = page_table(config.lengths, page)
        caches = [
            fill_pages(tensor, config.lengths, page, own) for tensor in (inputs.key, inputs.value)
        ]
        table, query = table_of(config.lengths, page), packed_queries(config, inputs.query)

        def call() -> Any:
            made, first = [], 0
            for at, rows in enumerate(config.new_tokens):
                group = config.num_heads // config.num_kv_heads
                key, value = (
                    gather(table, cache, at).repeat_interleave(group, 1).transpose(0, 1)
                    for cache in caches
                )
                mine = query[first : first + rows].transpose(0, 1)
                scores = mine @ key.transpose(1, 2) / math.sqrt(config.head_dim)
                hidden = torch.ones(rows, key.shape[1]).triu(key.shape[1] - rows + 1).bool()
                made.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ value)
                first += rows
            return torch.cat([each.transpose(0, 1) for each in made])

        return Prepared(call, lambda output: unpacked(config, output))

    return SimpleNamespace(prepare=prepare)


def test_prepared_attention_is_compared_request_by_request() -> None:
    config = parse_config("3,4,6,8,fp32,kv_heads=2,lens=5+9+16,page=4,causal")
    inputs = make_inputs(config, "cpu", 7)
    wanted = attend(config, inputs, torch.float64)[0]["out"]
    found = make_output(config, inputs, paged_in_torch())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)

    def off_by_one(lengths: tuple[int, ...], page: int) -> PageTable:
        table = page_table(lengths, page)
        return PageTable((table.pages + 1) % len(table.pages), table.starts, table.last)

    wrong = make_output(config, inputs, paged_in_torch(off_by_one))
    assert float((wrong.double() - wanted).abs().max()) > 0.1


def test_fp8_inputs_are_values_that_the_cache_can_hold() -> None:
    inputs = make_inputs(parse_config("2,4,3,8,bf16,seq_kv=11,page=4,kv_dtype=fp8"), "cpu", 3)
    assert inputs.key.dtype == torch.bfloat16
    assert torch.equal(inputs.key, inputs.key.to(torch.float8_e4m3fn).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2,8,1,128,bf16,seq_kv=64", "add page=16"),
        ("2,8,1,128,fp32,seq_kv=64,page=16", "supports only fp16 and bf16"),
        ("2,8,1,96,bf16,seq_kv=64,page=16", "supports only head_dim 64, 128, 256"),
        ("2,8,1,576,bf16,seq_kv=64,page=16,mla=512+64,sinks", "does not support sinks"),
        ("2,8,4,128,bf16,seq_kv=64,page=16,window=8", "a window only with a causal mask"),
        ("2,8,1,48,bf16,seq_kv=64,page=16,mla=32+16", "supports only mla=512+64"),
        (
            "2,8,1,128,bf16,seq_kv=64,page=16,kv_dtype=fp8",
            "a cache with the same dtype as the query",
        ),
    ],
)
def test_a_backend_says_why_it_cannot_compute_a_config(text: str, reason: str) -> None:
    assert reason in str(paged_supports("fa3", parse_config(text)))


def test_other_backends_refuse_what_only_engines_use() -> None:
    config = parse_config("2,8,1,128,bf16,seq_kv=64,page=16,softcap=30")
    assert outside_sdpa(config) == (
        "scaled_dot_product_attention has no parameter for page=16 and softcap=30"
    )
    able = {name for name, each in BACKENDS.items() if each.supports(config) is None}
    assert able == {"flashinfer-fa2", "flashinfer-fa3", "flex-paged"}
    without = parse_config("2,8,1,128,bf16,seq_kv=64,page=16")
    able = {name for name, each in BACKENDS.items() if each.supports(without) is None}
    assert able == {f"flashinfer-{each}" for each in ("fa2", "fa3", "cudnn", "trtllm")} | {
        "flex-paged"
    }


def test_work_of_a_config_equals_the_work_of_its_sums_of_lengths() -> None:
    config = parse_config("3,8,6,64,bf16,kv_heads=2,lens=5+9+16,page=4,causal,kv_dtype=fp8")
    pairs = [(queries, keys) for queries, keys, count in config.requests for _ in range(count)]
    sums = [sum(q for q, _ in pairs), sum(k for _, k in pairs)]
    sums += [sum(q * q for q, _ in pairs), sum(q * k for q, k in pairs)]
    work = part_work(BatchPart(3, *sums), HeadShape(8, 2, 64, 64, 2, 1))
    assert (flops(config), compulsory_bytes(config)) == work


def test_latent_attention_reads_one_vector_per_token() -> None:
    config = parse_config("2,16,1,576,bf16,seq_kv=100,mla=512+64,page=64")
    sizes = tensor_bytes(config)
    assert (sizes.key, sizes.value) == (2 * 100 * 576 * 2, 0)
    inputs = make_inputs(config, "cpu", 0)
    assert inputs.value.data_ptr() == inputs.key.data_ptr()


@pytest.mark.parametrize(
    ("capability", "more", "reason"),
    [
        ((9, 0), ",causal", "prefill kernels require compute capability 10.x; this GPU has 9.0"),
        ((12, 0), ",causal", "prefill kernels require compute capability 10.x; this GPU has 12.0"),
        ((10, 0), "", "supports prefill only with a causal mask"),
        ((10, 3), ",causal", None),
        ((10, 0), ",causal,window=77,sinks", None),
    ],
)
def test_trtllm_computes_prefill_only_on_some_gpus(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], more: str, reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    prefill = parse_config(f"4,32,512,128,bf16,kv_heads=8,seq_kv=2048,page=16{more}")
    found = trtllm_supports(prefill)
    assert found == reason or (reason and reason in str(found))
    assert trtllm_supports(parse_config("4,32,1,128,bf16,kv_heads=8,seq_kv=2048,page=16")) is None
