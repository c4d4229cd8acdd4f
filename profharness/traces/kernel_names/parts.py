"""Describe the name of a kernel: the family, the library and the meaning of each part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from profharness.columns import column
from profharness.traces.kernel_names import ATTENTION_FAMILIES, canonical, parse_kernel_name
from profharness.traces.kernel_names.attention import fa2_flags, fa3_flags, flashinfer_flags
from profharness.traces.kernel_names.by_source import SourceFact, facts_by_source
from profharness.traces.kernel_names.meanings import (
    FA2_COMBINE,
    FAMILIES,
    FLAG_TABLES,
    FLAGS,
    LAYOUTS,
    LIBRARIES,
    TILED,
    TILED_FLAGS,
)
from profharness.traces.kernel_names.serving import subject
from profharness.traces.kernel_names.text import (
    WRAPPER,
    Head,
    KernelName,
    integer,
    normalise,
    short_type,
    split_head,
    template_arguments,
)

Word = tuple[str, str, Mapping[str, object]]
"""A row has a pattern that matches a token in a name, the meaning of the token, and the fields of a
KernelName that the token implies. A named group of the pattern also sets the field of that name. In
the meaning, {0} stands for the token, and {1} for the first group.
"""


def _words(*rows: tuple[str, str], **values: object) -> tuple[Word, ...]:
    return tuple((pattern, meaning, values) for pattern, meaning in rows)


_ARCH = _words((r"(?P<arch>sm\d+)[a-z]?", "code for NVIDIA GPUs of this architecture"))
_PLAIN_TYPES = (
    *_words((r"fp16|f16|half", "16-bit floats (fp16)"), dtype="fp16"),
    *_words((r"bf16|bfloat16", "16-bit floats (bf16)"), dtype="bf16"),
    *_words((r"fp32|f32|float", "32-bit floats"), dtype="fp32"),
    *_words((r"fp64|double", "64-bit floats"), dtype="fp64"),
    *_words(
        (r"(?:(?:fp|bf)\d+/)+(?:fp|bf)\d+", "types of inputs, outputs and sums, each listed once")
    ),
)
_DIRECTIONS = (
    *_words((r"fwd|forward|fprop", "forward"), direction="fwd"),
    *_words((r"bwd|backward|bprop", "backward"), direction="bwd"),
)
_PACKED = "packed sequences of different lengths"
_COMBINES = "combines the partial outputs for the split keys"
_ROW_SUMS = (
    "before the backward pass, sums the product of the output and its gradient over each row"
)
_SIZES = "tile of {1} queries x {2} keys"
_LETTERS = (
    "one letter for each type (h for fp16, t for bf16, s for fp32); NVIDIA does not document which "
    "operands the letters describe"
)
_LAYOUT = "which operands are transposed (t) and which are not (n)"
_PRODUCT_TILE = (
    r"(?:tilesize|tile|MT)?(?P<tile_m>\d{2,})x(?P<tile_n>\d+)(?:x(?P<tile_k>\d+))?",
    "size of an output tile, in rows x columns; a third number is the depth of a step",
)
# The words in the path of a function, by library. The path is parsed from left to right. At each
# position, the first row that matches is used.
WORDS: dict[str, tuple[Word, ...]] = {
    "efficient": (
        *_words(
            (r"fmha", "fused multi-head attention"),
            (r"aligned", "the tensors are aligned for wide loads"),
            (r"notaligned", "the tensors are not aligned for wide loads"),
            (r"(?P<tile_m>\d+)x(?P<tile_n>\d+)", _SIZES),
            (r"rf", "the output is summed in registers"),
            (r"gmem", "the output is summed in device memory"),
            (r"k65536", "compiled for any head dimension"),
            (r"k(?P<head_dim>\d+)", "compiled for head dimensions up to {1}"),
            (r"seqaligned", "both sequence lengths are multiples of the tile size"),
        ),
        *_words((r"cutlassF", "on CUTLASS, forward"), direction="fwd"),
        *_words((r"cutlassB", "on CUTLASS, backward"), direction="bwd"),
        *_words((r"dropout", "dropout of the weights"), dropout=True),
    ),
    "cudnn": (
        *_words(
            (r"f16", "16-bit floats; the name does not show whether they are fp16 or bf16"),
            dtype="fp16/bf16",
        ),
        *_words(
            (r"cudnn", "NVIDIA cuDNN"),
            (r"generated", "written by a generator, not by hand"),
            (r"fort_native", "cuDNN's own engine"),
            (r"oss", "the open-source engine of cudnn-frontend"),
            (r"sdpa", "scaled dot product attention"),
            (r"flash", "no S x S matrix in memory"),
            (r"wgmma", "tensor-core instructions of a warp group (Hopper)"),
            (r"wmma", "tensor-core instructions of a warp"),
            (r"mxfp8|f8", "8-bit floats"),
            (
                r"knob_(\d+)",
                "cuDNN's number for a variant; NVIDIA does not document the meaning of the number",
            ),
            (
                r"(?P<tile_m>\d{2,})x(?P<tile_n>\d{2,})x(?P<tile_k>\d{2,})",
                "tile of {1} queries x {2} keys, head dimension {3}",
            ),
            (r"cga(\d+x\d+x\d+)", "blocks per cluster: {1}"),
            (r"kernel\d+(?:_\d+)?", "the number that cuDNN gives to the kernel in its plan"),
            (r"compute_dot_do_o", _ROW_SUMS),
            (r"convert_dq_to_16bits", "converts the fp32 gradient of the queries to 16 bits"),
            (r"fmha_reduce_head", "sums gradients over the query heads of a group"),
            (r"ragged", _PACKED),
        ),
    ),
    "cublas": _words(
        (r"(ampere|volta|turing|maxwell|hopper|blackwell)", "generation of the code: {1}"),
        (
            r"cutlass(?:3x)?(?:_\d+)?",
            "a CUTLASS kernel in cuBLAS; the number after _, if any, is the architecture",
        ),
        (r"tensorop|tensor\d+x\d+x\d+", "runs on tensor cores"),
        (r"simt|ffma", "runs on CUDA cores, without tensor cores"),
        (r"xmma", "generated by NVIDIA's generator for matrix-product kernels"),
        (r"nvjet", "generated by cuBLAS's generator for matrix-product kernels (since Hopper)"),
        (
            r"[sdch]gemm",
            "matrix product in the type that the first letter of {0} stands for (s is fp32, d is "
            "fp64, h is fp16)",
        ),
        (
            r"([shd])(?:1688|16816|161616|884)gemm",
            "tensor-core product whose sums have the type {1} (s is fp32, h is fp16)",
        ),
        (r"gemm", "matrix product"),
        (r"[a-z\d]+f32f32|f32f32|bf16bf16|f16f16|tf32tf32", "type of both operands"),
        (r"tf32(?:f32)?", "fp32 rounded to 19 bits for tensor cores"),
        (
            r"(?P<tile_m>\d{2,})x(?P<tile_n>\d+)_(\d+)x(?P<stages>\d)",
            "tile of the output: {1} rows x {2} columns, in steps of depth {3}, with {4} buffers",
        ),
        _PRODUCT_TILE,
        (r"(?<=nvjet_)[hts]{3}|(?<=sm\d\d_)[hts]{3}|(?<=sm\d\d\d_)[hts]{3}", _LETTERS),
        (
            r"stages?_?\d+(?:x\d+)?",
            "depth of a step x number of buffers, or only the number of buffers",
        ),
        (r"sliced\d+x\d+", "warps that share the depth of a tile"),
        (r"warpsize\d+x\d+x\d+", "warps per block along rows, columns and depth"),
        (r"[nt]{2}|[NT]{3}", _LAYOUT),
        (r"ldg\d+", "elements per load"),
        (
            r"align[a-c]?\d+|aligna\d+|alignc\d+",
            "alignment of the operands, in elements",
        ),
        (r"split_?[kK]\w*?", "the K dimension of the matrix product is split across blocks"),
        (r"relu", "can apply a ReLU to the output; the name does not show whether it does"),
        (r"bias", "adds a bias"),
        (r"2cta", "two blocks share a tensor-core instruction"),
        (r"kernel|internal|cublas", ""),
        (r"gemvx?|gemv2\w", "matrix-vector product"),
        (r"splitKreduce(?:_kernel)?", "sums the parts of a product that was split along its depth"),
    ),
    "triton": _words(
        (r"triton", "Triton code that Inductor generated"),
        (r"tem", "from a template"),
        (r"fused_(\w*?[a-z])(?=_\d+$|$)", "the ATen ops in it: {1}"),
        (r"fused", "several ATen ops, fused into one kernel"),
        (r"poi", "operation on each element"),
        (r"red", "reduction in a loop"),
        (r"per", "reduction in which a block holds a whole row"),
        (r"for", "one operation on a list of tensors"),
        (r"flex_attention", "flex_attention"),
        (r"flex_decoding", "flex_attention for few queries"),
        (r"\d+", "number of the kernel in its graph"),
        (r"attn|attention", "attention"),
        (r"d[qkv](?:_?d[qkv])*|delta", "gradients, or the sums from which they are computed"),
        (r"kernel", ""),
    ),
    "aotriton": _words(
        (r"attn", "attention"),
        (r"dk_dv", "gradients of keys and values"),
        (r"dq", "gradient of queries"),
        (r"fuse", "all gradients in one kernel"),
        (r"preprocess", _ROW_SUMS),
        (r"postprocess", "converts the fp32 gradient of the queries to the type of the tensors"),
        (r"varlen", _PACKED),
        (r"debug", "for tests of dropout"),
        (r"fill_dropout_rng(?:_tensor)?", "writes the random numbers used for dropout"),
        (
            r"simulate_encoded_softmax",
            "writes the random numbers used for dropout, in the format of a softmax result",
        ),
        (r"kernel", ""),
    ),
    "aiter": (
        *_words(
            (r"fmha", "fused multi-head attention"),
            (r"mla", "multi-head latent attention"),
            (r"pa", "paged attention"),
            (
                r"hd(?P<head_dim>\d+)(?:_hd\d+)?",
                "head dimension {1}; a second number is the head dimension of the values",
            ),
            (r"group", _PACKED),
            (
                r"rtn[ea]|rtz",
                "rounding of sums to bf16: to the nearest value, with ties to even (rtne) or away "
                "from zero (rtna), or toward zero (rtz)",
            ),
            (r"a(?:16|32)", "gradient of the queries, summed with the number of bits in {0}"),
            (r"odo", _ROW_SUMS),
            (r"dq_convert", "converts the fp32 gradient of the queries to 16 bits"),
            (r"gqa(\d+)", "{1} query heads share a head of keys"),
            (
                r"stage1",
                "computes attention for each part of the keys; the results are combined later",
            ),
            (r"dec|decode", "one query token at a time"),
            (r"pfl|prefill", "the prompt (prefill)"),
            (r"reduce\w*", _COMBINES),
            (r"pertokenFp8", "8-bit floats with a scale for each token"),
            (r"kn|kernel", ""),
        ),
        *_words((r"causal", "a query does not attend to later keys"), causal=True),
    ),
    "ck": (
        *_words(
            (r"Fmha", "fused multi-head attention"),
            (r"Fwd", "forward"),
            (r"Bwd", "backward"),
            (r"SplitKVCombine", _COMBINES),
            (r"SplitKV", "the keys are split over blocks"),
            (r"PagedKV|WithPagedKVCache", "keys and values are stored in pages"),
            (r"BatchPrefill", "the prompts of a batch (prefill)"),
            (r"AppendKV", "writes new keys and values into the cache"),
            (r"DQDKDV", "gradients of queries, keys and values"),
            (r"OGradDotO", _ROW_SUMS),
            (r"ConvertQGrad", "converts the fp32 gradient of the queries to 16 bits"),
            (r"Gemm", "matrix product"),
            (r"Kernel", ""),
        ),
    ),
    "tensile": _words(
        (r"Custom", "tuned by hand"),
        (r"Cijk", "matrix product with row index i, column index j and batch index k"),
        (r"Alik", "A is transposed"),
        (r"Ailk", "A is not transposed"),
        (r"Bjlk", "B is transposed"),
        (r"Bljk", "B is not transposed"),
        (r"BH?", "the old output is added; H means that the sums have a wider type"),
        (
            r"[SDC]B",
            "type of operands, output and sums (S is fp32, D is fp64); B means that the old output "
            "is added",
        ),
        (
            r"(?:[BHSDZC]|F8|B8|I8|X){2,4}",
            "types of operands, output and sums (B is bf16, H fp16, S fp32, D fp64, F8 e4m3 and "
            "B8 e5m2)",
        ),
        (r"Bias[A-Z]*", "can add a bias"),
        (r"HA_S|HAS?|AS", "can apply an activation"),
        (r"SAB", "can scale A and B"),
        (r"SAV|ScaleAlphaVec", "can scale rows by a vector"),
        (r"UserArgs", "can read its arguments from device memory"),
        (r"PostGSU\d*", "sums the parts of a product that was split along its depth"),
        _PRODUCT_TILE,
    ),
    "trtllm": _words(
        (r"fmha", "fused multi-head attention"),
        (r"(?:Sm|sm)(?P<sm>1\d\d)[a-z]?", "code for this architecture"),
        (r"H(?P<head_dim>\d+)", "head dimension {1}"),
        (
            r"HQk(?P<head_dim>\d+)HV\d+",
            "head dimension of queries and keys, and head dimension of values",
        ),
        (r"Q(?P<tile_m>\d+)", "tile: {1} queries"),
        (r"Kv(?P<tile_n>\d+)", "tile: {1} keys"),
        (r"Kernel", ""),
        (r"PagedKv", "keys and values are stored in pages"),
        (r"SeparateQkv|PackedQkv", "memory layout of queries, keys and values"),
        (r"VarSeq", "sequences of different lengths"),
        (r"Persistent", "persistent blocks that process one tile after another"),
        (r"Context", "the prompt (prefill)"),
        (r"Gen|ForGen", "generation of one token at a time"),
        (r"Dense", "no causal mask"),
        (r"Causal", "a query does not attend to later keys"),
        (r"Qk?v?E4m3", "8-bit float inputs (e4m3)"),
        (r"Qk?v?Bfloat16", "bf16 in"),
        (r"OBfloat16", "bf16 out"),
    ),
}
WORDS["xformers"] = WORDS["efficient_any"] = WORDS["efficient"]
WORDS["flex"] = WORDS["triton"]
COMMON = (*_ARCH, *_DIRECTIONS, *_PLAIN_TYPES)
_FLASH_BASE = _words(
    (r"flash", "FlashAttention"),
    (r"splitkv", "the keys may be split over blocks"),
    (r"combine(?:_kernel)?", _COMBINES),
    (r"dq_dk_dv", "gradients of queries, keys and values"),
    (r"loop", "a loop over tiles"),
    (r"seqk_parallel", "the keys are divided among the blocks"),
    (r"dot_do_o", _ROW_SUMS),
    (r"convert_dq|convert_dkv", "converts fp32 gradients to the type of the tensors"),
    (r"kernel", ""),
)
WORDS.update(dict.fromkeys(("flash2", "flash2_pip", "flash2_any"), _FLASH_BASE))
WORDS["fa3"] = _words(
    (r"prepare_varlen_num_blocks_kernel", "counts the tiles for sequences of different lengths"),
    (r"FlashAttn", "FlashAttention 3"),
    (r"Fwd", "forward"),
    (r"Bwd", "backward"),
    (r"Sm(?P<sm>\d+)", "code for this architecture"),
    (r"Combine", _COMBINES),
    (r"Preprocess", _ROW_SUMS),
    (r"PostprocessConvertdQ", "converts fp32 gradients to the type of the tensors"),
)
# Maps a library to a less specific one, because short names do not show the build of the library.
SHORT_LIBRARIES = {"flash2": "flash2_any", "efficient": "efficient_any"}
CAMEL = frozenset({"fa3", "trtllm", "ck"})  # libraries whose words begin with a capital letter
_FLASH = r"flash_|FlashAttn"
_FLASHINFER = r"(?:FP8|Batch|Single)?(?:Prefill|Decode)With\w*KVCache"
_ATTENTION_WORDS = _words(
    (r"(?P<tile_m>\d+)x(?P<tile_n>\d+)", _SIZES),
    (r"s(?P<stages>\d+)", "{1} buffers for keys and values in shared memory"),
    (r"w(?P<warps>\d+)", "{1} warps per block"),
    (r"m(\d+)", "{1} rows per block"),
    (r"split(\d+)", "combines the outputs for at most {1} parts of the keys"),
)
_TILED_WORDS = _words(
    (r"(?P<tile_m>\d+)x(?P<tile_n>\d+)", _SIZES),
    *((shown, TILED[name].removesuffix(": {}")) for name, shown in TILED_FLAGS.items()),
)
_TILED_NUMBERS = tuple(
    TILED[name].replace("{}", "{0}")
    for name in ("BK", "CHUNK", "PC", "STAGES", "VALUE_STAGES", "PER_SM")
)
_LOG = (r"log", "logarithm of the softmax")
_COMPUTED = "the operation, or the type of its operands"
# The meanings of the tokens between the brackets of a short name. Each row contains a pattern that
# matches the beginning of the name, the meanings of the numbers in order, the words, and the
# meaning of all other tokens.
BRACKETS: tuple[tuple[str, tuple[str, ...], tuple[Word, ...], str | None], ...] = (
    (_FLASH, ("head dimension: up to {0}",), _ATTENTION_WORDS, None),
    (_FLASHINFER, ("head dimension: {0}",), _ATTENTION_WORDS, None),
    (r"tiled_attention", _TILED_NUMBERS, _TILED_WORDS, None),
    (r"(?:vectorized|unrolled)_elementwise", ("{0} elements per thread at once",), (), _COMPUTED),
    (r"\w*elementwise", ("{0} threads per block", "{0} elements per thread"), (), _COMPUTED),
    (
        r"reduce_(?:1Block_)?kernel",
        ("{0} threads per block", "results per block: {0}"),
        (),
        _COMPUTED,
    ),
    (
        r"softmax_warp|masked_softmax_warp|log_softmax_warp",
        ("rows of up to 2^{0} columns",),
        _words(_LOG, (r"masked", "with a mask")),
        None,
    ),
    (r"cunn_", ("elements per load: {0}",), _words(_LOG), None),
    (r"\w*[Gg]emm", (), _words(_PRODUCT_TILE), None),
    (r"", (), (), None),
)
# Patterns that match short or incomplete names, and the replacement for the match. The rules for
# whole names can parse the result.
WHOLE = tuple(
    (re.compile(pattern, re.ASCII), text)
    for pattern, text in (
        (r"(Flash_(fwd|bwd)_kernel_traits<.*>)$", r"flash_\2_kernel<\1>"),
        (r"(?=FlashAttn(?:Fwd|Bwd)|prepare_varlen_num_blocks)", "flash::"),
        (rf"(?={_FLASHINFER})", "flashinfer::"),
        (r"(?=FlashAttention(?:Forward|Decode))", "flash_attn_cute_flash_fwd_"),
        (r"(?=FlashAttentionBackward)", "flash_attn_cute_flash_bwd_"),
        (r"fmha_sm(1\d\d[a-z]?)_", r"fmhaSm\1Kernel_"),
        (r"cudnn_(oss_)?sdpa_(sm\d+[a-z]?)_(?=[fb]prop)", r"cudnn_\1sdpa_\2_flash_"),
        (r"((?:vectorized_|unrolled_|legacy_)?elementwise)(?=<)", r"\1_kernel"),
        (r"(?=Gemm(?:Universal|Batched|Array|SplitKParallel)?(?:<|$))", "cutlass::Kernel<"),
    )
)


@dataclass(frozen=True, slots=True)
class NamePart:
    """A word or a template parameter in a kernel's name, and its meaning."""

    token: Annotated[
        str,
        column("part", shrink=True, meaning="the part, as it appears in the name of the kernel"),
    ]
    parameter: Annotated[
        str, column("is", meaning="name of the template parameter; empty if the part is a word")
    ]
    meaning: Annotated[
        str | None,
        column(
            "means", importance="answer", wrap=True, meaning="meaning of the part; null if unknown"
        ),
    ]


@dataclass(frozen=True, slots=True)
class Description:
    """The properties of a kernel that its name shows, and the meaning of each part of the name."""

    kernel: KernelName
    """The parsed name, including the fields that were found only by parsing the parts."""
    library: str
    parts: tuple[NamePart, ...]
    untold: tuple[str, ...]
    """The properties that names in this family usually contain, but that this name does not
    contain.
    """
    by_source: tuple[SourceFact, ...] = ()
    """The facts about stages and warp roles in the source code of the library."""

    @property
    def is_known(self) -> bool:
        """Whether a rule matches the name."""
        return self.kernel.family != "other" or self.library != "unknown"

    @property
    def meaning(self) -> str:
        """A phrase that describes the kernel."""
        library, family = LIBRARIES[self.library], FAMILIES[self.kernel.family]
        if not self.is_known:
            return "profharness has no rule for this name"
        return library if self.library == "profharness" else f"{family}; from {library}"

    @property
    def unknown(self) -> tuple[str, ...]:
        """The tokens whose meaning is unknown."""
        return tuple(part.token for part in self.parts if part.meaning is None)


# The properties of a kernel, and their descriptions. A property is listed separately only if no
# single part of the name contains it.
FACTS = {
    "direction": {"fwd": "forward", "bwd": "backward"},
    "arch": "code for this architecture; newer GPUs may also run it",
    "dtype": "type of the tensors",
    "head_dim": "head dimension for which the code was compiled",
    "tile": "size of a tile: rows x columns, or rows x columns x depth",
    "stages": "buffers in shared memory",
    "warps": "warps of a block",
    "causal": {True: "a query does not attend to later keys", False: "no causal mask"},
    "dropout": {True: "dropout of the weights", False: "no dropout"},
}
# The properties that are shown even if the template parameters are described, because no template
# parameter contains them.
_ALWAYS = ("direction", "arch")
# The properties that names in a family usually contain. A description lists missing ones as
# `untold`.
_EXPECTED = {
    "gemm": ("dtype", "tile"),
    **dict.fromkeys(("gemv", "softmax", "norm", "flash_combine", "fmha_combine"), ("dtype",)),
}
_SHORT_TOKEN = re.compile(r"\d+x\d+|(?:fp|bf)\d+(?:/\w+)*")
_SHORT = re.compile(r"[^():&*]+")
_WRAPPED = re.compile(r"<\s?(?:\d+, ?)*(?:typename )?(?:\w+::)*(\w+)", re.ASCII)
_FA3_BASE = re.compile(r"FlashAttn\w+", re.ASCII)
_EXTENTS = re.compile(r"(?:C<|int, )(\d+)>")


def describe(name: str) -> Description:
    """Describe a kernel name or the name of an ATen op.

    The kernel name may be mangled, demangled or short. This function never raises an exception.
    """
    given = name.strip()
    name = canonical(given)
    kernel, library = _parsed(name)
    text = normalise(name)
    is_short = _SHORT.fullmatch(text) is not None
    library = SHORT_LIBRARIES.get(library, library) if is_short else library
    parts = list(_template(text, kernel)) if library != "cuda" else []
    shown = _ALWAYS if parts else tuple(FACTS)
    values: dict[str, object] = {}
    if not parts:
        source = text if is_short else kernel.short
        parts = [*_path(text, library, values), *_bracket(source, values)]
    if "sm" in values:
        values["arch"] = f"sm{values.pop('sm')}"
    found = {
        field: value
        for field, value in values.items()
        if getattr(kernel, field, "") is None and len(str(value)) < 10
    }
    short = given if is_short else kernel.short
    kernel = replace(kernel, name=given, short=short, **found)  # type: ignore[arg-type]
    expected = _EXPECTED.get(kernel.family, ())
    if kernel.family in ATTENTION_FAMILIES and not expected:
        expected = ("dtype", "head_dim", "tile", "direction", "causal")
    if library == "aten_op":
        expected = ()
    untold = tuple(field for field in expected if getattr(kernel, field) is None)
    found_by_source = facts_by_source(kernel, library)
    told = (*_facts(kernel, values, shown), *parts)
    return Description(kernel, library, told, untold, found_by_source)


def _parsed(name: str) -> tuple[KernelName, str]:
    """Parse a name and determine the library. A short name is first completed by means of WHOLE."""
    made = (pattern.sub(text, name, count=1) for pattern, text in WHOLE if pattern.match(name))
    for candidate in (*made, name):
        if candidate.startswith("aten::"):
            return parse_kernel_name(candidate, "op"), "aten_op"
        kernel = parse_kernel_name(candidate)
        if (kernel.family, kernel.backend) != ("other", "unknown"):
            return kernel, kernel.backend
        if kernel.direction is not None:  # a CUDA kernel from kernels/, whose family is `other`
            return kernel, "profharness"
    if re.fullmatch(r"\w+", name, re.ASCII):
        op = parse_kernel_name(f"aten::{name}", "op")
        if op.family != "other":
            return op, "aten_op"
    return parse_kernel_name(name), "unknown"


def _template(text: str, kernel: KernelName) -> Iterator[NamePart]:
    """Yield the template parameters in a name. Yield nothing if no layout matches the name."""
    is_fa2, is_flashinfer = kernel.backend.startswith("flash2"), kernel.backend == "flashinfer"
    if is_flashinfer and kernel.tile is None:
        return  # the layouts are those of other releases
    head = split_head(text, "")
    table = {flag.name: flag for flag in FLAG_TABLES.get(kernel.backend, ())}
    read_flags = flashinfer_flags if is_flashinfer else fa3_flags
    states = fa2_flags(head.base, text) if is_fa2 else read_flags(text)
    flags = [
        NamePart("true" if is_set else "false", name, table[name].on if is_set else table[name].off)
        for name, is_set in states.items()
    ]
    for opening, parameters in LAYOUTS.items():
        at = text.find(opening)
        if at < 0 or (at and (text[at - 1].isalnum() or text[at - 1] == "_")):
            continue
        arguments = template_arguments(text, at + len(opening) - 1)
        if any(_SHORT_TOKEN.fullmatch(each) for each in arguments):
            return  # this is a short name, whose parameters do not have fixed positions
        yield from _arguments(arguments, parameters, flags)
        if kernel.family == "flash_combine" and is_fa2:
            yield from _arguments(template_arguments(text, head.end)[1:], FA2_COMBINE, flags)
        elif FLAGS not in parameters:
            yield from flags
        return


def _arguments(
    arguments: list[str], parameters: Mapping[str, str], flags: list[NamePart]
) -> Iterator[NamePart]:
    at = 0
    for parameter, meaning in parameters.items():
        if parameter == FLAGS:
            yield from flags
            at += len(flags)
            continue
        if at >= len(arguments) or arguments[at] == "...":
            return
        argument = arguments[at]
        extents = _EXTENTS.findall(argument) if "tuple<" in argument else None
        value = "x".join(extents) if extents else short_type(argument)
        word = {"true": "yes", "false": "no"}.get(value, value)
        yield NamePart(value, parameter, meaning.format(word))
        at += 1


def _path(text: str, library: str, values: dict[str, object]) -> Iterator[NamePart]:
    """Yield the words in the name of a function. Add the fields that they imply to `values`."""
    rows = WORDS.get(library)
    if rows is None:
        return
    base = _subject(text, split_head(text, ""), library)
    is_camel = library in CAMEL
    end = r"(?=[A-Z_:]|$)" if is_camel else r"(?=[_:]|$)"
    other = re.compile(r"[A-Z]?[a-z\d]+|[A-Z]+" if is_camel else r"[^_:]+", re.ASCII)
    at = 0
    while at < len(base):
        part, at = _word(base, at, (*rows, *COMMON), end, values)
        if part is None:
            match = other.match(base, at)
            part = NamePart(match[0], "", None) if match else None
            at = match.end() if match else at + 1
        if part is not None and part.meaning != "":
            yield part


def _word(
    base: str, at: int, rows: Iterable[Word], end: str, values: dict[str, object]
) -> tuple[NamePart | None, int]:
    """Find the first row that matches the word at base[at].

    Return the described word and the position after the word, or None and `at` if no row matches.
    """
    for pattern, meaning, implied in rows:
        match = re.compile(f"(?:{pattern}){end}", re.ASCII).match(base, at)
        if match and match.end() > at:
            for name, value in {**match.groupdict(), **implied}.items():
                if value is not None:
                    number = integer(str(value))
                    values.setdefault(name, value if number is None else number)
            return NamePart(match[0], "", meaning.format(match[0], *match.groups())), match.end()
    return None, at


def _subject(text: str, head: Head, library: str) -> str:
    """Return the name of the function, without wrappers such as `cutlass::device_kernel<…>`."""
    if library == "fa3":
        match = _FA3_BASE.search(text)
        return match[0] if match else head.base
    if library == "tensile":  # the rest of the name contains about sixty settings
        return parse_kernel_name(text).short
    if head.path.startswith("_ZN"):
        return subject(text, head)[0].rpartition("::")[2]
    inner = _WRAPPED.match(text, head.end) if WRAPPER.search(head.path) else None
    if inner:
        return inner[1]
    return head.path if head.base == "kernel" else head.base


def _bracket(short: str, values: dict[str, object]) -> Iterator[NamePart]:
    """Yield the parts between the brackets of a short name. Add the fields that the parts imply to
    `values`.
    """
    at = short.find("<")
    base, numbers, words, rest = next(row for row in BRACKETS if re.match(row[0], short, re.ASCII))
    is_flash = base in (_FLASH, _FLASHINFER)
    meanings = iter(numbers)
    flags = [flag for table in FLAG_TABLES.values() for flag in table] if is_flash else []
    states = {flag.shown: flag.on for flag in flags} | {flag.unset: flag.off for flag in flags}
    for token in template_arguments(short, at) if at >= 0 else []:
        if token in ("", "..."):
            continue
        number = integer(token)
        if number is not None and (meaning := next(meanings, None)):
            if is_flash:
                values.setdefault("head_dim", number)
            yield NamePart(token, "", meaning.format(token))
        elif token in states:
            values |= {token: True} if token in ("causal", "dropout") else {}
            yield NamePart(token, "", states[token])
        else:
            part, end = _word(token, 0, (*words, *COMMON), "$", values)
            is_rest = not token.isdigit() and "…" not in token
            found = part if end == len(token) else None
            yield found or NamePart(token, "", rest if is_rest else None)


def _facts(
    kernel: KernelName, values: Mapping[str, object], names: Iterable[str]
) -> Iterator[NamePart]:
    """Yield the properties of a kernel that no single part of its name contains."""
    implied = {"tile_m": "tile", "tile_k": "head_dim"}
    shown = {*values, *(implied[name] for name in implied if name in values)}
    for name in names:
        value = getattr(kernel, name)
        if value is None or name in shown:
            continue
        meaning = FACTS[name]
        text = meaning if isinstance(meaning, str) else meaning[value]  # type: ignore[index]
        if str(value).startswith("gfx"):  # other than SASS or PTX, it does not run on newer GPUs
            text = "code for AMD GPUs of this architecture"
        yield NamePart(str(value).lower() if isinstance(value, bool) else str(value), name, text)
