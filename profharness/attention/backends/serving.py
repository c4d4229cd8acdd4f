"""Backends of serving engines, which read the keys and values from a paged cache.

An engine plans a step once and then calls attention in every layer. Accordingly, the cache and the
plan are prepared before a call is timed. The prepared call launches kernels only, so that it can be
captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from profharness.attention.backends.base import (
    Attention,
    GpuBackend,
    Inputs,
    Prepared,
    needs_module,
    outside_contract,
    refuse_if_unloadable,
)
from profharness.attention.config import Config
from profharness.dtypes import DTYPES, HALF

WORKSPACE_BYTES = 256 << 20  # FlashInfer's documentation recommends 128 MiB; long caches need more
PAGE_SEED = 20  # the seed for the random order of the pages in the cache
HEAD_DIMS = (64, 128, 256)
FLEX_PAGES = (16, 32, 64, 128)  # a page is a block of the mask, which kernels read as one tile
TRTLLM_PAGES = (16, 32, 64, 128)  # `page_size` of flashinfer.xqa.xqa
TRTLLM_CAPABILITIES = (9, 10, 12)  # the same function refuses other compute capabilities
# Prefill runs on trtllm-gen, whose kernels exist only for SM 10.x.
TRTLLM_PREFILL_CAPABILITIES = (10,)
CACHE = ("lens", "page", "kv_dtype")
INSTALL = "pip install flashinfer-python"


@dataclass(frozen=True)
class PageTable:
    """The locations of the keys and values of each request in a paged cache.

    Request i has the pages `pages[starts[i]:starts[i + 1]]` in this order. The last page contains
    `last[i]` tokens.
    """

    pages: Any  # int32 [total pages], shuffled
    starts: Any  # int32 [requests + 1]
    last: Any  # int32 [requests]

    def of_requests(self) -> list[Any]:
        """Return the pages of each request, as int32."""
        starts = self.starts.tolist()
        return [self.pages[low:high] for low, high in itertools.pairwise(starts)]

    def padded(self) -> Any:
        """Return the pages as int32 [requests, maximum pages per request], padded with zeros."""
        from torch.nn.utils.rnn import pad_sequence

        return pad_sequence(self.of_requests(), batch_first=True)


def page_table(lengths: tuple[int, ...], page: int, device: Any = None) -> PageTable:
    """Return a page table for requests of these lengths.

    The pages of a request are scattered over the cache in a random order, as in a server that has
    run for some time.
    """
    import torch

    counts = [math.ceil(length / page) for length in lengths]
    generator = torch.Generator().manual_seed(PAGE_SEED)
    order = torch.randperm(sum(counts), generator=generator)

    def int32(values: Any) -> Any:
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    last = [length - (count - 1) * page for length, count in zip(lengths, counts, strict=True)]
    return PageTable(int32(order), int32([0, *itertools.accumulate(counts)]), int32(last))


def fill_pages(tensor: Any, lengths: tuple[int, ...], page: int, table: PageTable) -> Any:
    """Return a cache [pages, page, Hkv, D] with the rows of a tensor [B, Hkv, Skv, D].

    Slots after the last token of a request contain zeros.
    """
    cache = tensor.new_zeros((len(table.pages), page, tensor.shape[1], tensor.shape[3]))
    for at, (length, pages) in enumerate(zip(lengths, table.of_requests(), strict=True)):
        mine = pages.long()
        rows = tensor.new_zeros((len(mine) * page, tensor.shape[1], tensor.shape[3]))
        rows[:length] = tensor[at, :, :length].transpose(0, 1)
        cache[mine] = rows.view(len(mine), page, *rows.shape[1:])
    return cache


def packed_queries(config: Config, query: Any) -> Any:
    """Return the new tokens [tokens, Hq, D] of all requests from a query [B, Hq, Sq, D]."""
    import torch

    parts = [query[at, :, :rows].transpose(0, 1) for at, rows in enumerate(config.new_tokens)]
    return torch.cat(parts).contiguous()


def unpacked(config: Config, output: Any) -> Any:
    """Return an output [tokens, Hq, Dv] as [B, Hq, Sq, Dv], with zeros after the last new token."""
    made = output.new_zeros((config.batch, output.shape[1], config.seq_len_q, output.shape[2]))
    first = 0
    for at, rows in enumerate(config.new_tokens):
        made[at, :, :rows] = output[first : first + rows].transpose(0, 1)
        first += rows
    return made


def _cached(config: Config, tensor: Any) -> Any:
    """Return a tensor in the dtype of the cache."""
    import torch

    return tensor.to(getattr(torch, DTYPES[config.kv_dtype or str(config.dtype)].torch))


def _scale(config: Config) -> float:
    return 1 / math.sqrt(config.head_dim) if config.scale is None else config.scale


def _paged(kernels: str, config: Config, inputs: Inputs) -> Prepared:
    """Prepare FlashInfer's paged prefill wrapper, or its wrapper with sinks. The kernels of both
    wrappers also decode.
    """
    import torch
    from flashinfer import (
        BatchAttentionWithAttentionSinkWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
    )

    device, page = inputs.query.device, config.page or 1
    table = page_table(config.lengths, page, device)
    cache = tuple(
        _cached(config, fill_pages(tensor, config.lengths, page, table))
        for tensor in (inputs.key, inputs.value)
    )
    query = packed_queries(config, inputs.query)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    window_left = -1 if config.window is None else config.window - 1
    extra: tuple[Any, ...] = ()
    if inputs.sinks is None:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernels)
    else:
        wrapper = BatchAttentionWithAttentionSinkWrapper(
            workspace,
            backend=kernels,
            q_data_type=query.dtype,
            kv_data_type=cache[0].dtype,
            head_dim_qk=config.head_dim,
            head_dim_vo=config.head_dim,
            window_left=window_left,
        )
        extra = inputs.sinks.float(), _scale(config)
    wrapper.plan(
        _starts(config.new_tokens, device),
        *(table.starts, table.pages, table.last),
        *(config.num_heads, config.num_kv_heads, config.head_dim, page),
        causal=config.causal,
        window_left=window_left,
        logits_soft_cap=config.softcap,
        sm_scale=_scale(config),
        q_data_type=query.dtype,
        kv_data_type=cache[0].dtype,
    )
    out = torch.empty_like(query)
    return Prepared(
        lambda: wrapper.run(query, cache, *extra, out=out), functools.partial(unpacked, config)
    )


def _cudnn(config: Config, inputs: Inputs) -> Prepared:
    """Prepare cuDNN's attention over a paged cache, as FlashInfer calls it."""
    import torch
    from flashinfer.cudnn import cudnn_batch_prefill_with_kv_cache

    device, page = inputs.query.device, config.page or 1
    table = page_table(config.lengths, page, device)
    # cuDNN numbers the dimensions of a page as heads, tokens, head_dim, with any strides.
    keys, values = (
        fill_pages(tensor, config.lengths, page, table).transpose(1, 2)
        for tensor in (inputs.key, inputs.value)
    )
    pages = table.padded()

    def per_request(values: Any) -> Any:
        return torch.as_tensor(values, dtype=torch.int32, device=device).view(-1, 1, 1, 1)

    query = packed_queries(config, inputs.query)
    row = config.num_heads * config.head_dim
    offsets = per_request(_starts(config.new_tokens, device) * row)
    out = torch.empty_like(query)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    lengths = per_request(config.new_tokens), per_request(config.lengths)

    def call() -> Any:
        cudnn_batch_prefill_with_kv_cache(
            *(query, keys, values, _scale(config), workspace),
            max_token_per_sequence=max(config.new_tokens),
            max_sequence_kv=max(config.lengths),
            actual_seq_lens_q=lengths[0],
            actual_seq_lens_kv=lengths[1],
            block_tables=pages,
            causal=config.causal,
            return_lse=False,
            batch_offsets_q=offsets,
            batch_offsets_o=offsets,
            out=out,
            is_cuda_graph_compatible=True,
        )
        return out

    return Prepared(call, functools.partial(unpacked, config))


def _trtllm(config: Config, inputs: Inputs) -> Prepared:
    """Prepare TensorRT-LLM's kernels. Decoding uses trtllm-gen on SM 10.x, and XQA on SM 9.x and
    12.x. Prefill uses trtllm-gen, which has a causal mask.
    """
    import torch
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache
    from flashinfer.prefill import trtllm_batch_context_with_kv_cache

    device, page = inputs.query.device, config.page or TRTLLM_PAGES[0]
    table = page_table(config.lengths, page, device)
    cache = tuple(
        _cached(config, fill_pages(tensor, config.lengths, page, table))
        .transpose(1, 2)
        .contiguous()
        for tensor in (inputs.key, inputs.value)
    )
    query = packed_queries(config, inputs.query)
    common = {
        "query": query,
        "kv_cache": cache,
        "workspace_buffer": torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "block_tables": table.padded(),
        "seq_lens": torch.tensor(config.lengths, dtype=torch.int32, device=device),
        "bmm1_scale": _scale(config),
        "bmm2_scale": 1.0,
        "window_left": -1 if config.window is None else config.window - 1,
        "sinks": None if inputs.sinks is None else inputs.sinks.float(),
        "out": torch.empty_like(query),
    }
    if config.seq_len_q == 1:
        call = functools.partial(
            trtllm_batch_decode_with_kv_cache, max_seq_len=max(config.lengths), **common
        )
    else:
        call = functools.partial(
            trtllm_batch_context_with_kv_cache,
            max_q_len=max(config.new_tokens),
            max_kv_len=max(config.lengths),
            batch_size=config.batch,
            cum_seq_lens_q=_starts(config.new_tokens, device),
            cum_seq_lens_kv=_starts(config.lengths, device),
            **common,
        )
    return Prepared(call, functools.partial(unpacked, config))


def _flex(config: Config, inputs: Inputs) -> Prepared:
    """Prepare flex_attention with a block mask that follows the page table.

    All requests share the cache as one sequence of slots. The mask of a request covers its own
    pages, so the kernels skip all other pages.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device, page = inputs.query.device, config.page or FLEX_PAGES[0]
    table = page_table(config.lengths, page, device)
    keys, values = (
        fill_pages(tensor, config.lengths, page, table).flatten(0, 1).transpose(0, 1)[None]
        for tensor in (inputs.key, inputs.value)
    )
    slots = keys.shape[2]
    owner = torch.full((slots,), -1, dtype=torch.int32, device=device)
    place = torch.zeros(slots, dtype=torch.int32, device=device)
    for at, (length, mine) in enumerate(zip(config.lengths, table.of_requests(), strict=True)):
        slots_of = mine.long()[:, None] * page + torch.arange(page, device=device)
        own = slots_of.flatten()[:length]
        owner[own] = at
        place[own] = torch.arange(length, dtype=torch.int32, device=device)
    lengths = torch.tensor(config.lengths, device=device)
    fresh = torch.tensor(config.new_tokens, device=device)
    causal, window, softcap = config.causal, config.window, config.softcap

    def seen(batch: Any, _: Any, row: Any, slot: Any) -> Any:
        ours = owner[slot] == batch
        position = lengths[batch] - fresh[batch] + row
        if causal:
            ours = ours & (place[slot] <= position)
        if window is not None:
            ours = ours & (place[slot] > position - window)
        return ours

    def capped(score: Any, *_: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    rows = config.seq_len_q
    mask = create_block_mask(
        seen, config.batch, None, rows, slots, device=device, BLOCK_SIZE=(128, page)
    )
    shape = (config.batch, -1, -1, -1)
    call = functools.partial(
        torch.compile(flex_attention, dynamic=False),
        *(inputs.query, keys.expand(shape), values.expand(shape)),
        score_mod=capped if softcap else None,
        block_mask=mask,
        scale=_scale(config),
        enable_gqa=config.num_heads != config.num_kv_heads,
        kernel_options={"BLOCK_N": page},
    )

    def in_slots(output: Any) -> Any:
        """Return the output with zeros after the last new token of each request."""
        valid = torch.arange(rows, device=device) < fresh[:, None]
        return output.where(valid[:, None, :, None], 0)

    return Prepared(call, in_slots)


def _latent(kernels: str, config: Config, inputs: Inputs) -> Prepared:
    """Prepare BatchMLAPagedAttentionWrapper."""
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    assert config.mla is not None
    latent, rotary = config.mla
    device, page = inputs.query.device, config.page or 1
    table = page_table(config.lengths, page, device)
    cache = fill_pages(inputs.key, config.lengths, page, table)[:, :, 0]
    parts = [part.contiguous() for part in cache.split((latent, rotary), -1)]
    query = packed_queries(config, inputs.query)
    queries = [part.contiguous() for part in query.split((latent, rotary), -1)]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=kernels)
    wrapper.plan(
        *(_starts(config.new_tokens, device), table.starts, table.pages),
        torch.tensor(config.lengths, dtype=torch.int32, device=device),
        *(config.num_heads, latent, rotary, page, config.causal, _scale(config)),
        *(query.dtype, cache.dtype),
    )
    out = torch.empty_like(queries[0])
    return Prepared(
        lambda: wrapper.run(*queries, *parts, out=out), functools.partial(unpacked, config)
    )


def _starts(counts: tuple[int, ...], device: Any) -> Any:
    """Return the number of the first row of each request, and the number of rows, as int32."""
    import torch

    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)


def paged_supports(kernels: str, config: Config) -> str | None:
    """Return why FlashInfer's paged attention cannot compute the config, or None if the call is
    supported.
    """
    takes = (*CACHE, "mla") if config.mla else (*CACHE, "window", "softcap", "sinks")
    if reason := outside_contract(config, takes):
        return reason
    if config.page is None:
        return "requires a paged cache; add page=16"
    if config.bwd:
        return "does not compute gradients; leave out bwd"
    if config.dtype not in HALF:
        return f"supports only {' and '.join(HALF)}, not {config.dtype}"
    if config.kv_dtype and (config.mla or kernels == "fa3"):
        return (
            f"the {kernels} kernels need a cache with the same dtype as the query ({config.dtype})"
        )
    if config.mla:
        return None if config.mla == (512, 64) else "supports only mla=512+64"
    if config.window is not None and not config.causal:
        return "supports a window only with a causal mask"
    if config.head_dim not in HEAD_DIMS or config.head_dim_v is not None:
        dims = ", ".join(map(str, HEAD_DIMS))
        return f"supports only head_dim {dims}, which must be the same for key and value"
    return None


def cudnn_supports(config: Config) -> str | None:
    """Return why cuDNN's paged attention cannot compute the config, or None if the call is
    supported.
    """
    if reason := outside_contract(config, ("lens", "page")):
        return reason
    return paged_supports("fa2", config)


def trtllm_supports(config: Config) -> str | None:
    """Return why TensorRT-LLM's kernels cannot compute the config, or None if the call is
    supported.
    """
    if reason := outside_contract(config, (*CACHE, "window", "sinks")):
        return reason
    if config.seq_len_q != 1:
        if reason := _needs_capability(TRTLLM_PREFILL_CAPABILITIES):
            return f"supports only decoding here (seq_q=1), because its prefill kernels {reason}"
        if not config.causal:
            return "supports prefill only with a causal mask"
    if reason := paged_supports("fa2", replace(config, window=None)):
        return reason
    if config.page not in TRTLLM_PAGES:
        return f"supports only pages of {', '.join(map(str, TRTLLM_PAGES))} tokens"
    return None


def flex_supports(config: Config) -> str | None:
    """Return why flex_attention cannot compute the config over a paged cache, or None if it can."""
    if reason := outside_contract(config, ("lens", "page", "window", "softcap")):
        return reason
    if reason := paged_supports("fa2", config):
        return reason
    if config.page not in FLEX_PAGES:
        return f"supports only pages of {', '.join(map(str, FLEX_PAGES))} tokens"
    return None


def _of_flex() -> Attention:
    """Return the paged attention of flex_attention. Raise ImportError if torch lacks it."""
    import torch
    from torch.nn.attention import flex_attention

    return _prepared(_flex, f"{flex_attention.__name__} of torch {torch.__version__}")


def _of_trtllm() -> Attention:
    """Return TensorRT-LLM's paged attention. Raise ImportError if FlashInfer is not installed."""
    import flashinfer

    return _prepared(_trtllm, flashinfer.__version__)


def _of_cudnn() -> Attention:
    """Return cuDNN's paged attention. Raise ImportError if FlashInfer or cuDNN's front end is not
    installed.
    """
    import cudnn
    import flashinfer

    return _prepared(_cudnn, f"{flashinfer.__version__}, cuDNN frontend {cudnn.__version__}")


def _prepared(prepare: Callable[[Config, Inputs], Prepared], version: str) -> Attention:
    def attention(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("paged attention is called through `prepare`")

    attention.prepare = prepare  # type: ignore[attr-defined]
    attention.version = version  # type: ignore[attr-defined]
    return attention


def _load(kernels: str) -> Attention:
    """Return FlashInfer's paged attention. Raise ImportError if FlashInfer is not installed."""
    import flashinfer

    def prepare(config: Config, inputs: Inputs) -> Prepared:
        return (_latent if config.mla else _paged)(kernels, config, inputs)

    return _prepared(prepare, flashinfer.__version__)


def _absent(*majors: int) -> Callable[[], str | None]:
    """Return an `absent` function for kernels that run only on these major compute capabilities."""

    def absent() -> str | None:
        if reason := needs_module("flashinfer", INSTALL)():
            return reason
        reason = _needs_capability(majors)
        return f"its kernels {reason}" if reason else None

    return absent


def _needs_capability(majors: tuple[int, ...]) -> str | None:
    """Return a clause if this GPU has none of these major compute capabilities, otherwise None."""
    import torch

    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if found is None or found[0] in majors:
        return None
    wanted = " or ".join(f"{major}.x" for major in majors)
    return f"require compute capability {wanted}; this GPU has {found[0]}.{found[1]}"


SERVING_BACKENDS = (
    *(
        GpuBackend(
            f"flashinfer-{kernels}",
            f"FlashInfer's paged attention and MLA, computed by the {kernels} kernels",
            load=refuse_if_unloadable("flashinfer", functools.partial(_load, kernels)),
            supports=functools.partial(paged_supports, kernels),
            absent=absent,
            packages=("flashinfer-python",),
            isolated=True,
        )
        for kernels, absent in (
            ("fa2", needs_module("flashinfer", INSTALL)),
            ("fa3", _absent(9)),
        )
    ),
    GpuBackend(
        "flashinfer-cudnn",
        "cuDNN's paged attention, called through FlashInfer",
        load=refuse_if_unloadable("cudnn", _of_cudnn),
        supports=cudnn_supports,
        absent=needs_module("cudnn", "pip install flashinfer-python nvidia-cudnn-frontend"),
        packages=("flashinfer-python", "nvidia-cudnn-frontend"),
        isolated=True,
    ),
    GpuBackend(
        "flashinfer-trtllm",
        "TensorRT-LLM's paged attention, called through FlashInfer",
        load=refuse_if_unloadable("flashinfer", _of_trtllm),
        supports=trtllm_supports,
        absent=_absent(*TRTLLM_CAPABILITIES),
        packages=("flashinfer-python",),
        isolated=True,
    ),
    GpuBackend(
        "flex-paged",
        "flex_attention over a paged cache, with a block mask that follows the page table",
        load=refuse_if_unloadable("flex_attention", _of_flex),
        supports=flex_supports,
        isolated=True,
    ),
)
