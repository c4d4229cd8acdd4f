"""Templates of the script that `repro` writes. They do not import profharness."""

from __future__ import annotations

SCRIPT = """# {title}
{notes}
# Prints PyTorch's choice, every warning, a checksum of each result, and the time of a call. Exits
# with 1 if the call is refused or fails.
import atexit
import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import inspect
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

SEED = {seed}
DEVICE = {device}
DTYPE = {dtype}
WARMUP, CALLS = 3, 30


def normal(*shape):
    return torch.randn(shape, device=DEVICE, dtype=DTYPE, generator=generator)


def kept(*shape):
    return torch.rand(shape, device=DEVICE, generator=generator) < 0.75


def sync():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def checksum(tensor):
    data = tensor.detach().cpu().contiguous()
    count = data.numel() * data.element_size()
    return hashlib.sha256((ctypes.c_char * count).from_address(data.data_ptr())).hexdigest()


def print_choice(**arguments):
    names = {{0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}}
    with warnings.catch_warnings():  # the call repeats these warnings
        warnings.simplefilter("ignore")
        try:
            number = torch._fused_sdp_choice(query, key, value, **arguments)
        except RuntimeError as error:
            print(f"choice: none: {{error}}")
        else:
            print(f"choice: {{names.get(number, number)}}")


print(f"torch {{torch.__version__}}, CUDA {{torch.version.cuda}}, git {{torch.version.git_version}}")
print(torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU")
torch.set_warn_always(True)
torch.use_deterministic_algorithms({deterministic})
torch.utils.deterministic.fill_uninitialized_memory = False

{setup}

generator = torch.Generator(device=DEVICE).manual_seed(SEED)
{inputs}


def forward():
    return attention(query, key, value, {arguments})


def call():
    return {call}


with contextlib.ExitStack() as stack:
    failed = None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            stack.enter_context(context())
        except Exception as error:
            failed = error
    if failed is not None:
        print(f"refused: {{type(failed).__name__}}: {{failed}}")
        sys.exit(1)
{choice}    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            results = call()
            sync()
        except Exception as error:
            failed = error
    for warning in heard:
        print(f"warning: {{warning.message}}")
    if failed is not None:
        print(f"failed: {{type(failed).__name__}}: {{failed}}")
        sys.exit(1)
    for name, result in zip(({names},), results):
        print(f"{{name}}: {{tuple(result.shape)}} {{result.dtype}} sha256 {{checksum(result)}}")
    for _ in range(WARMUP):
        call()
    sync()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    sync()
    print(f"time: {{(time.perf_counter() - begin) / CALLS * 1e6:.2f}} us a call, {{CALLS}} back to back")
"""

PLAIN = """attention = F.scaled_dot_product_attention
context = contextlib.nullcontext
"""

SDPA = """attention = F.scaled_dot_product_attention


def context():
    from torch.nn.attention import SDPBackend, sdpa_kernel

{before}    return {kernel}
"""

FIRST_CHOICE = """    if DEVICE == "cuda":  # the first choice of a process replaces the order of priorities once
        probe = torch.empty(1, 1, 8, 64, device="cuda", dtype=torch.float16)
        torch._fused_sdp_choice(probe, probe, probe)
"""

DISABLED = """attention = F.scaled_dot_product_attention


def context():
    # cuDNN has no switch here and stays enabled
    return torch.backends.cuda.sdp_kernel(
        enable_flash=False, enable_math=False, enable_mem_efficient=False
    )
"""

ACTIVATED = """attention = F.scaled_dot_product_attention


def context():
    from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel

    activate_flash_attention_impl("{impl}")
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION])
"""

FLEX = """from torch.nn.attention.flex_attention import create_block_mask, flex_attention

compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
context = contextlib.nullcontext
masks = []


def attended(_batch, _head, i, j):
    return {attended}


def attention(q, k, v, *, is_causal, scale, enable_gqa, window=None):
    if (is_causal or window) and not masks:
        masks.append(
            create_block_mask(attended, None, None, q.shape[2], k.shape[2], device=q.device)
        )
    return compiled(
        q,
        k,
        v,
        block_mask=masks[0] if masks else None,
        scale=scale,
        enable_gqa=enable_gqa,
        kernel_options={options},
    )
"""

FILE = '''def module_of(files, main):
    """Write the implementation's files to a folder that is deleted at exit, and import `main`."""
    folder = Path(stack_of_folders.enter_context(tempfile.TemporaryDirectory()))
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    path = folder / main
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"_repro_{{path.stem}}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


stack_of_folders = contextlib.ExitStack()
atexit.register(stack_of_folders.close)
{load}
attention = module.{function}
context = contextlib.nullcontext
config = types.SimpleNamespace(
    {properties},
)
config.dtype = {{torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}}[DTYPE]
reason = {reason!r} or getattr(module, "supports", lambda config: None)(config)
if config.window and "window" not in inspect.signature(attention).parameters:
    reason = "does not support a sliding window"
if reason:
    print(f"refused: {{reason}}")
    sys.exit(1)
'''

REFUSED = """print({text!r})
sys.exit(1)
"""

COMPILED = """attention = torch.compile(
    attention, dynamic=False, fullgraph=True, options={"fx_graph_cache": False}
)
"""
