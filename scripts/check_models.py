"""Profile real models, and check that `layers` reports every attention call of them correctly.

python scripts/check_models.py --out FOLDER [--only NAME,…] [--device cpu] [--no-replay]
python scripts/check_models.py --run NAME [--device cpu]     run only the model, as a program for `observe`

The models run with random weights, so nothing is downloaded. A patch around
scaled_dot_product_attention records its calls in a separate run. The trace of another run, or the
run folder of `profharness observe`, is ingested. Calls, configs, modules and backends are compared
with that record, and `capture` replays the configs on the same machine. Needs transformers, except
for `encoder`, `unet` and the flex_attention models.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from profharness.attention.config import parse_config
from profharness.dtypes import OF_TORCH
from profharness.errors import UsageError
from profharness.program.layer_map import actual_backend
from profharness.store import Selection, ingest_path, open_store
from profharness.trace import TensorArgument
from profharness.traces.ops import replay_config

Work = Callable[[], Any]
HEADER = "model           recorded  found  configs  modules  backends  replayed"


def llama(device: str, **more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = device == "cpu"
    config = LlamaConfig(
        vocab_size=4096, hidden_size=256 if small else 2048, intermediate_size=512 if small else 5632,
        num_hidden_layers=3, num_attention_heads=8 if small else 32,
        num_key_value_heads=2 if small else 8, max_position_embeddings=4096,
        attn_implementation=more.pop("attn", "sdpa"),
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device, torch.bfloat16)


def tokens(device: str, batch: int, length: int) -> Any:
    return torch.randint(0, 4096, (batch, 64 if device == "cpu" else length), device=device)


def llama_prefill(device: str) -> Work:
    model, ids = llama(device).eval(), tokens(device, 2, 1024)
    return without_gradient(lambda: model(ids, use_cache=False))


def llama_padded(device: str) -> Work:
    model, ids = llama(device).eval(), tokens(device, 2, 1024)
    mask = torch.ones_like(ids)
    mask[0, : ids.shape[1] // 3] = 0
    return without_gradient(lambda: model(ids, attention_mask=mask, use_cache=False))


def llama_generate(device: str) -> Work:
    model, ids = llama(device).eval(), tokens(device, 2, 256)
    return without_gradient(
        lambda: model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    )


def llama_train(device: str) -> Work:
    model, ids = llama(device), tokens(device, 2, 1024)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def llama_checkpoint(device: str) -> Work:
    model, ids = llama(device).train(), tokens(device, 2, 1024)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return lambda: model(ids, labels=ids, use_cache=False).loss.backward()


def llama_compile(device: str) -> Work:
    model, ids = llama(device).eval(), tokens(device, 2, 1024)
    compiled = torch.compile(model)
    return without_gradient(lambda: compiled(ids, use_cache=False))


def llama_reduce_overhead(device: str) -> Work:
    """Return a step that replays the CUDA graph that torch.compile captured."""
    model, ids = llama(device).eval(), tokens(device, 2, 1024)
    compiled = torch.compile(model, mode="reduce-overhead")
    return without_gradient(lambda: compiled(ids, use_cache=False))


def warmed(work: Work) -> None:
    """Run the work on a side stream, as a graph capture requires."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            work()
    torch.cuda.synchronize()


def captured(work: Work) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def llama_graph(device: str) -> Work:
    work = llama_prefill(device)
    warmed(work)
    replay: Work = captured(work).replay
    return replay


def llama_graph_train(device: str) -> Work:
    """Return a capture and two replays."""
    model, ids = llama(device), tokens(device, 2, 1024)

    def work() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        graph = captured(work)
        graph.replay()
        graph.replay()

    warmed(work)
    return step


def llama_eager(device: str) -> Work:
    model, ids = llama(device, attn="eager").eval(), tokens(device, 2, 1024)
    return without_gradient(lambda: model(ids, use_cache=False))


def bert(device: str, dtype: Any, autocast: bool) -> Work:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(num_hidden_layers=3)).to(device, dtype).eval()
    ids = tokens(device, 8, 384)
    mask = torch.ones_like(ids)
    mask[:, ids.shape[1] // 2 :] = 0

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return model(ids, attention_mask=mask)

    return without_gradient(step)


def vit(device: str) -> Work:
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(num_hidden_layers=3)).to(device, torch.float16).eval()
    pixels = torch.randn(2 if device == "cpu" else 16, 3, 224, 224, device=device).half()
    return without_gradient(lambda: model(pixels))


def whisper(device: str) -> Work:
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(d_model=512, encoder_layers=2, decoder_layers=2,
                           encoder_attention_heads=8, decoder_attention_heads=8)  # fmt: skip
    model = WhisperModel(config).to(device, torch.float16).eval()
    sound = torch.randn(2, 80, 3000, device=device).half()
    ids = torch.randint(0, 1000, (2, 32), device=device)
    return without_gradient(lambda: model(sound, decoder_input_ids=ids, use_cache=False))


def encoder(device: str) -> Work:
    layer = torch.nn.TransformerEncoderLayer(512, 8, 1024, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model = model.to(device, torch.float16).train()
    x = torch.randn(8, 256, 512, device=device).half().requires_grad_()
    return lambda: model(x).float().sum().backward()


class Unet(torch.nn.Module):
    """Self and cross attention at three resolutions, like the denoiser of a diffusion model."""

    class Block(torch.nn.Module):
        def __init__(self, width: int, heads: int, cross: int | None = None) -> None:
            super().__init__()
            self.heads = heads
            self.to_q = torch.nn.Linear(width, width)
            self.to_k = torch.nn.Linear(cross or width, width)
            self.to_v = torch.nn.Linear(cross or width, width)

        def forward(self, x: Any, y: Any = None) -> Any:
            y = x if y is None else y
            q, k, v = (
                made.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for made in (self.to_q(x), self.to_k(y), self.to_v(y))
            )
            return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def __init__(self) -> None:
        super().__init__()
        widths = (320, 640, 1280)
        self.own = torch.nn.ModuleList(self.Block(width, 8) for width in widths)
        self.text = torch.nn.ModuleList(self.Block(width, 8, 768) for width in widths)

    def forward(self, maps: Any, text: Any) -> Any:
        return [
            cross(own(x), text) for own, cross, x in zip(self.own, self.text, maps, strict=True)
        ]


def unet(device: str) -> Work:
    model = Unet().to(device, torch.float16).eval()
    sizes = ((4096, 320), (1024, 640), (256, 1280))
    maps = [torch.randn(2, length, width, device=device).half() for length, width in sizes]
    text = torch.randn(2, 77, 768, device=device).half()
    return without_gradient(lambda: model(maps, text))


class Flex(torch.nn.Module):
    """A layer of causal attention that calls the given function, flex_attention or its compiled
    form.
    """

    def __init__(self, attention: Callable[..., Any], blocks: Any) -> None:
        super().__init__()
        self.attention, self.blocks = attention, blocks
        self.qkv, self.out = torch.nn.Linear(512, 3 * 512), torch.nn.Linear(512, 512)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
        seen = self.attention(q, k, v, block_mask=self.blocks)
        return x + self.out(seen.transpose(1, 2).flatten(2))


def flex(device: str, *, compiled: bool) -> Work:
    """Return a training step, because steps of compiled code are found by the optimizer. On a CPU,
    where flex_attention has no backward, run without gradients.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = 256 if device == "cpu" else 1024
    blocks = create_block_mask(
        lambda _b, _h, row, column: row >= column, None, None, length, length, device=device
    )
    attention = torch.compile(flex_attention) if compiled else flex_attention
    model = torch.nn.Sequential(*(Flex(attention, blocks) for _ in range(3)))
    model = model.to(device, torch.bfloat16)
    x = torch.randn(2, length, 512, device=device, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        with torch.set_grad_enabled(device != "cpu"):
            total = model(x).float().sum()
        if total.requires_grad:
            total.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


MODELS: dict[str, Callable[[str], Work]] = {
    "llama_prefill": llama_prefill,
    "llama_padded": llama_padded,
    "llama_generate": llama_generate,
    "llama_train": llama_train,
    "llama_checkpoint": llama_checkpoint,
    "llama_compile": llama_compile,
    "llama_reduce_overhead": llama_reduce_overhead,
    "llama_graph": llama_graph,
    "llama_graph_train": llama_graph_train,
    "llama_eager": llama_eager,
    "bert_fp32": lambda device: bert(device, torch.float32, autocast=False),
    "bert_autocast": lambda device: bert(device, torch.float32, autocast=True),
    "vit": vit,
    "whisper": whisper,
    "encoder": encoder,
    "unet": unet,
    "flex": lambda device: flex(device, compiled=False),
    "flex_compile": lambda device: flex(device, compiled=True),
}
# Run under `observe` in a separate process; the number of its steps that make up one step of the model.
OBSERVED = {"llama_generate": 8, "flex": 1, "flex_compile": 1}
RUNS = 8  # of such a program: a new kind of call, three steps without one, the recorded steps
# Calls that compiled code and graphs do not pass through the function.
UNTOLD = ("llama_compile", "llama_reduce_overhead", "llama_graph")


def without_gradient(work: Work) -> Work:
    def step() -> Any:
        with torch.no_grad():
            return work()

    return step


@contextlib.contextmanager
def recorded(calls: list[dict[str, Any]]) -> Iterator[None]:
    """Record every call of scaled_dot_product_attention with the class of its module, and the
    module's dotted name.
    """
    real = F.scaled_dot_product_attention
    stack: list[Any] = []
    entered = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: stack.append(module)
    )
    left = torch.nn.modules.module.register_module_forward_hook(lambda *_: stack.pop() and None)

    def noted(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: Any = None, enable_gqa: bool = False) -> Any:  # fmt: skip
        choice = torch._fused_sdp_choice(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        given = [query, key, value, attn_mask]
        cast = torch.get_autocast_dtype(query.device.type) if torch.is_autocast_enabled() else None
        paths = {module: path for path, module in stack[0].named_modules()} if stack else {}
        calls.append(
            {
                "module": type(stack[-1]).__name__ if stack else None,
                "path": paths.get(stack[-1]) if stack else None,
                "tensors": [None if t is None else told(t, cast) for t in given],
                "flags": {"causal": is_causal, "dropout": dropout_p, "scale": scale, "gqa": enable_gqa},
                "backward": torch.is_grad_enabled()
                and any(t is not None and t.requires_grad for t in given),
                "choice": CHOICES.get(int(choice)),
            }
        )  # fmt: skip
        return real(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    F.scaled_dot_product_attention = noted
    try:
        yield
    finally:
        F.scaled_dot_product_attention = real
        entered.remove()
        left.remove()


def told(tensor: Any, cast: Any) -> TensorArgument:
    dtype = tensor.dtype if cast is None or tensor.dtype == torch.bool else cast
    name = (
        "bool"
        if dtype == torch.bool
        else OF_TORCH.get(str(dtype).removeprefix("torch."), str(dtype))
    )
    return TensorArgument(tuple(tensor.shape), tuple(tensor.stride()), name)


CHOICES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


def trace(work: Work, path: Path, device: str) -> None:
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True, with_stack=True) as seen:
        with torch.profiler.record_function("step"):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
    seen.export_chrome_trace(str(path))


def observed(name: str, out: Path, device: str) -> Path:
    """Return the run folder that `observe` makes of the model."""
    runs = out / "observed"
    program = [sys.executable, __file__, "--run", name, "--device", device]
    steps = str(OBSERVED[name])
    done = subprocess.run(
        [sys.executable, "-m", "profharness", "observe", "--steps", steps, "--out", runs,
         "--store", out / "observed.db", "--", *program], capture_output=True, text=True, check=False,
    )  # fmt: skip
    (out / f"{name}.stderr.txt").write_text(done.stderr)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    (folder,) = runs.iterdir()
    shutil.rmtree(out / name, ignore_errors=True)
    return folder.rename(out / name)


def run(name: str, device: str) -> None:
    """Run only the model."""
    torch.manual_seed(0)
    work = MODELS[name](device)
    for _ in range(RUNS):
        work()


def check(name: str, device: str, out: Path, replay: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    work = MODELS[name](device)
    for _ in range(3):
        work()
    calls: list[dict[str, Any]] = []
    if name not in UNTOLD:
        with recorded(calls):
            work()
    if name in OBSERVED:
        source = observed(name, out, device)
    else:
        source = out / f"{name}.json.gz"
        trace(work, source, device)
    store = out / f"{name}.db"
    store.unlink(missing_ok=True)
    (result,) = ingest_path(store, source)
    with open_store(store) as opened:
        found = opened.calls(result.run)
    row = {"model": name, "recorded": len(calls), "found": len(found), "warnings": result.warnings}
    row |= compare(calls, found)
    (out / f"{name}.txt").write_text(
        subprocess.run(
            [sys.executable, "-m", "profharness", "layers", "--store", store, "--torch",
             torch.__version__.split("+")[0]], capture_output=True, text=True, check=False,
        ).stdout
    )  # fmt: skip
    if replay:
        row["replayed"] = replayed(found, store, out / "runs", device)
    return row


def compare(calls: list[dict[str, Any]], found: list[Any]) -> dict[str, Any]:
    """Return how many of the recorded calls were found, with the right config, module and backend.
    The order is ignored, because an observed step may begin in the middle of the program's own
    step.
    """
    wanted = [(label(call), call["choice"], call["path"], call["module"]) for call in calls]
    got = [
        (
            call.config,
            actual_backend(call),
            call.path,
            (call.modules or ("",))[-1].rpartition("_")[0],
        )
        for call in found
        if call.kind in ("sdpa", "fast_path")
    ]
    missing = picked(wanted, (0, 1)) - picked(got, (0, 1))
    for call, times in missing.items():
        print(f"  not found alike: {times} of {call}")
    module = (
        2 if any(call.path for call in found) else 3
    )  # a trace without `observe` only has classes
    places = {"configs": (0,), "modules": (0, module), "backends": (0, 1)}
    return {
        what: sum((picked(wanted, at) & picked(got, at)).values()) for what, at in places.items()
    }


def picked(rows: list[tuple[Any, ...]], places: tuple[int, ...]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row[at] for at in places) for row in rows)


def label(call: dict[str, Any]) -> str | None:
    """Return the config of a recorded call, or None if none replays it."""
    try:
        return replay_config(call["tensors"], backward=call["backward"], **call["flags"]).label
    except UsageError:
        return None


def replayed(found: list[Any], store: Path, runs: Path, device: str) -> str:
    """Return how many configs get the same backend again in `capture`."""
    wanted: dict[str, str | None] = {}
    for call in found:
        if call.config and call.reason is None and call.kind in ("sdpa", "inner", "fast_path"):
            wanted.setdefault(call.config, actual_backend(call))
    if not wanted:
        return "-"
    listing = store.with_suffix(".configs")
    listing.write_text("\n".join(wanted))
    subprocess.run(
        [sys.executable, "-m", "profharness", "capture", "--configs", listing, "--backend", "auto",
         "--store", store, "--out", runs, "--device", device, "--iterations", "1", "--samples", "1"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    same = 0
    with open_store(store) as opened:
        for label, backend in wanted.items():
            selection = Selection(configs=[parse_config(label)])
            cells = [cell for cell in opened.rows(selection)[1] if cell.backend == "auto"]
            same += any(cell.choice == backend for cell in cells)
            if not any(cell.choice == backend for cell in cells):
                print(
                    f"  replayed differently: {label}: {backend}, then {[c.choice for c in cells]}"
                )
    return f"{same}/{len(wanted)}"


def main() -> None:
    """Check the models, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--out", type=Path)
    kinds.add_argument("--run", choices=MODELS, help="run only the model")
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-replay", action="store_true")
    given = parser.parse_args()
    if given.run:
        run(given.run, given.device)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    rows = []
    print(HEADER, flush=True)
    for name in given.only.split(","):
        try:
            row = check(name, given.device, given.out, not given.no_replay)
        except Exception as error:  # an error in one model must not stop the others
            print(f"{name:<15} {type(error).__name__}: {error}"[:300], flush=True)
            continue
        rows.append(row)
        keys = ("recorded", "found", "configs", "modules", "backends", "replayed")
        print(f"{name:<15}" + "".join(f"{row.get(key, '-')!s:>9}" for key in keys), flush=True)
    (given.out / "models.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
