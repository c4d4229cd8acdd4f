"""An observed program has the same results as without observation: graphs, bits, caches, pickles,
subclasses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import observe, run_unobserved, write

CHECKS = r"""
import copy, hashlib, inspect, json, pickle, warnings
from torch._dynamo.utils import counters

told = {}

def digest(x):
    return hashlib.sha256(x.detach().numpy().tobytes()).hexdigest()

model, x = Model(), torch.randn(2, 16, 32)
told["eager"] = digest(model(x))
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
y = compiled(x)
y.sum().backward()
told["compiled"] = digest(y)
told["gradient"] = digest(model.layers[0].attn.qkv.weight.grad)
told["graphs"] = counters["stats"]["unique_graphs"]
told["breaks"] = dict(counters["graph_break"])
seen = []
def keep(graph, _):
    seen.extend(str(n.target) for n in graph.graph.nodes if "scaled" in str(n.target))
    return graph.forward
torch._dynamo.reset()
torch.compile(model, fullgraph=True, backend=keep)(x)
told["targets"] = seen

def plain(q):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)

q = torch.randn(1, 2, 8, 8)
told["script"] = digest(torch.jit.script(plain)(q))
told["trace"] = str(torch.jit.trace(plain, (q,)).graph).split(" # ")[0]  # then the source's line
told["export"] = [str(n.target) for n in torch.export.export(model, (x,)).graph.nodes]
told["fx"] = [str(n.target) for n in torch.fx.symbolic_trace(plain).graph.nodes]
told["vmap"] = digest(torch.vmap(plain)(q[None]))

class Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in {F.scaled_dot_product_attention: 1}:
            told["handled"] = True
        return super().__torch_function__(func, types, args, kwargs or {})

plain(q.as_subclass(Own))
names = []
class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        names.append(func.__name__)
        return func(*args, **(kwargs or {}))

class Every(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        names.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})

with Mode():
    F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(8, 8, dtype=torch.bool))
F.scaled_dot_product_attention(q, q.as_subclass(Every), q)
told["dispatched"] = names
again = pickle.loads(pickle.dumps(F.scaled_dot_product_attention))
told["pickle"] = again == F.scaled_dot_product_attention
told["copy"] = copy.deepcopy(F.scaled_dot_product_attention) == again
told["hash"] = len({again, F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention})
told["name"] = [F.scaled_dot_product_attention.__name__, repr(again).split(" at ")[0]]
with torch.inference_mode():
    told["inference"] = digest(model(x))
with torch.autocast("cpu"):
    told["autocast"] = digest(model(x).float())
try:
    F.scaled_dot_product_attention(q)
except TypeError as error:
    told["error"] = str(error)

from torch.nn.attention.flex_attention import create_block_mask, flex_attention

def lower(b, h, i, j):
    return i >= j

class Flex(nn.Module):
    def forward(self, q, k, mask):
        return flex_attention(q, k, k, block_mask=mask, scale=0.5, enable_gqa=True)

flex, q, k = Flex(), torch.randn(1, 4, 256, 16), torch.randn(1, 2, 256, 16)
mask = create_block_mask(lower, None, None, 256, 256, device="cpu")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # eager flex_attention is slow
    told["flex"] = [digest(flex(q, k, mask)) for _ in range(2)]
torch._dynamo.reset()
counters.clear()
seen.clear()
def keep(graph, _):
    seen.append([str(n.target) for n in graph.graph.nodes if "0x" not in str(n.target)])
    return graph.forward
compiled = torch.compile(flex, backend=keep, fullgraph=True)
told["flex"] += [digest(compiled(q, k, mask)) for _ in range(2)]
compiled = torch.compile(flex_attention, backend=keep, fullgraph=True)
compiled(q, q, q), compiled(q, q, value=q), compiled(q, q, q, scale=None)  # one call, three ways
told["flex"] += [seen, counters["stats"]["unique_graphs"], dict(counters["graph_break"])]
told["flex"] += [torch._dynamo.explain(flex)(q, k, mask).graph_break_count]
told["flex"] += [pickle.loads(pickle.dumps(flex_attention)) is flex_attention]
told["flex"] += [str(inspect.signature(flex_attention)), flex_attention.__code__.co_name]
told["random"] = torch.rand(1).item()
print(json.dumps(told))
"""


CACHED = """
import json
import torch._inductor.config
from torch._dynamo.utils import counters
torch._inductor.config.cpp.simdlen = 1  # or a C++ compiler is asked what the processor can do
compiled = torch.compile(lambda *a: F.scaled_dot_product_attention(*a, is_causal=True))
compiled(*torch.randn(3, 1, 2, 16, 8).unbind())
names = ("fxgraph_cache_hit", "fxgraph_cache_miss")
told = {name: counters["inductor"][name] for name in names}
names = ("autograd_cache_hit", "autograd_cache_miss")
print(json.dumps(told | {name: counters["aot_autograd"][name] for name in names}))
"""


def unobserved(program: Path, **variables: str) -> dict[str, Any]:
    done = run_unobserved(program, **variables)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_results_are_the_same_as_without_observation(tmp_path: Path) -> None:
    program = write(tmp_path, CHECKS)
    before = unobserved(program)
    seen = observe(tmp_path, program)
    assert seen.code == 0, seen.stderr
    assert "no longer recorded" not in seen.stderr
    assert json.loads(seen.stdout.splitlines()[-1]) == before
    assert before["graphs"] == 1
    assert before["handled"] is before["pickle"] is True
    graphs, breaks, broken, pickled, _, name = before["flex"][-6:]
    assert (graphs, breaks, broken, pickled, name) == (2, {}, 0, True, "flex_attention")
    (called,) = [call for call in seen.calls if call.call.kind == "flex" and call.count]
    assert (called.count, called.ran, called.mask, called.asked) == (2, "flex", "block_mask", None)
    assert called.call.modules == ("Flex",) and called.lengths == (((1, 256, 256), 2),)
    assert any(call.call.kind == "flex" and call.call.compiled for call in seen.calls)
    compiled = [call.call.path for call in seen.calls if call.call.compiled]
    assert {"layers.0.attn", "layers.1.attn"} <= set(compiled)


def test_cached_compiled_code_is_reused(tmp_path: Path) -> None:
    program = write(tmp_path, CACHED)
    cache = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    hit, miss = [
        {"fxgraph_cache_hit": n, "fxgraph_cache_miss": 1 - n}
        | {"autograd_cache_hit": n, "autograd_cache_miss": 1 - n}
        for n in (1, 0)
    ]
    assert unobserved(program, **cache) == miss
    seen = observe(tmp_path, program, environment=cache)
    assert json.loads(seen.stdout.splitlines()[-1]) == hit
    assert any(call.call.compiled for call in seen.calls)


def test_a_block_returns_its_calls(tmp_path: Path) -> None:
    body = """
import profharness
from torch.nn.attention import SDPBackend, sdpa_kernel

with profharness.observe() as seen:
    infer(3)
assert [call["count"] for call in seen.calls] == [3, 3], seen.calls
assert seen.calls[0]["path"] == "layers.0.attn"
assert seen.backends == {"flash"}
infer(1)
with profharness.observe() as inner, sdpa_kernel(SDPBackend.MATH):
    infer(1)
assert inner.backends == {"math"}
assert inner.calls[0]["enabled"]["flash"] is False
assert [call["count"] for call in seen.calls] == [3, 3]
def one(q):
    F.scaled_dot_product_attention(q, q, q)
def other(q):
    F.scaled_dot_product_attention(q, q, q)
x = torch.randn(4, 2, 4, 8)
with profharness.observe() as seen:
    for each in (x, x[:2], x[:2], x[:, :1]):
        one(each), other(each)
told = [(call["function"], call["count"]) for call in seen.calls]
assert told == [("one", 3), ("other", 3), ("one", 1), ("other", 1)], told
print("held")
"""
    done = run_unobserved(write(tmp_path, body))
    assert (done.stdout, done.stderr) == ("held\n", "")


def test_a_block_names_the_modules_whose_calls_it_misses(tmp_path: Path) -> None:
    body = (
        "from torch.nn.functional import scaled_dot_product_attention as early\nimport profharness\n"
        "q = torch.randn(1, 2, 4, 8)\nwith profharness.observe() as seen:\n    early(q, q, q)\n"
        "assert not seen.calls"
    )
    done = run_unobserved(write(tmp_path, body))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("profharness: __main__ imported scaled_dot_product_attention by")


def test_the_fixture_is_available_to_tests(tmp_path: Path) -> None:
    tests = (
        "def test_one(attention):\n    infer(1)\n    assert attention.backends == {'flash'}\n"
        "def test_two():\n    assert type(F.scaled_dot_product_attention).__name__\n"
    )
    write(tmp_path, tests, "test_it.py")
    plugins = ("-p", "no:cacheprovider", "-p", "profharness.recording.observer.fixture")
    done = run_unobserved("-m", "pytest", "-q", *plugins, "test_it.py", folder=tmp_path)
    if "already registered" in done.stdout + done.stderr:
        pytest.skip("the package is installed with its entry point")
    assert "2 passed" in done.stdout, done.stdout + done.stderr
