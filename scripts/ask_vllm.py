"""Query the attention selection of a vLLM source tree, and print its rules as JSON.

    python scripts/ask_vllm.py FOLDER SEED COUNT [amd]

With `amd`, the release's selection on AMD GPUs is queried, with and without VLLM_ROCM_USE_AITER.
FOLDER contains the package `vllm` of one release. COUNT random configs are drawn with SEED to check
the rules. `scripts/import_engine_rules.py` runs this script once per release. The script needs
neither a GPU nor vLLM's dependencies. It loads only the modules that select a backend from the
tree, and replaces every other module with an object that accepts any use. All optional libraries,
such as FlashInfer, count as installed.

The script calls the release's own functions: `_get_backend_priorities` for the order of the
candidates, and `AttentionBackend.validate_configuration` for the reasons against each of them.
"""

from __future__ import annotations
import __future__ as future_module

import importlib
import importlib.abc
import importlib.machinery
import inspect
import itertools
import json
import random
import sys
import types
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
# AMD's architectures, with the capability that the release derives from each
ARCHITECTURES = {"gfx90a": (9, 0), "gfx942": (9, 4), "gfx950": (9, 5)}
WITH_AITER = ("gfx942", "gfx950")  # the architectures for which vLLM uses the AITER library
HEAD_DIMS = range(8, 1025, 8)
# The first value of each axis is the base, from which single axes and pairs of axes are varied.
AXES: dict[str, tuple[Any, ...]] = {
    "dtype": ("bf16", "fp16", "fp32"),
    "kv_dtype": ("auto", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"),
    "page": (None, 1, 8, 16, 32, 64, 128, 256),
    "sinks": (False, True),
    "causal": (True, False),
    "window": (False, True),
}
ARGUMENTS = {  # the parameters of validate_configuration that an axis sets
    "head_dim": "head_size",
    "dtype": "dtype",
    "kv_dtype": "kv_cache_dtype",
    "page": "block_size",
    "sinks": "has_sink",
    "window": "has_sliding_window",
}
KV_NAMES = {"fp16": "float16", "bf16": "bfloat16"}
LOADED = (  # modules that are loaded from the tree, with their submodules
    "vllm.config.cache",
    "vllm.envs",
    "vllm.model_executor.layers.attention.mla_attention",
    "vllm.platforms.cuda",
    "vllm.platforms.interface",
    "vllm.platforms.rocm",
    "vllm.utils.flashinfer",
    "vllm.utils.import_utils",
    "vllm.utils.torch_utils",
    "vllm.v1.attention.backend",
    "vllm.v1.attention.backends",
    "vllm.v1.attention.ops.flashmla",
    "vllm.v1.kv_cache_interface",
)
UNQUANTIZED = ("auto", "float16", "bfloat16", "float32")
REPLACED = {  # functions that would ask the host, the network or a running engine
    "has_nvidia_artifactory": lambda: True,
    "vllm_is_batch_invariant": lambda: False,
    "is_quantized_kv_cache": lambda dtype: dtype not in UNQUANTIZED,
}


class Anything:
    """A stand-in that accepts any operation, and returns itself or another stand-in."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made = self.__dict__[name] = Anything(f"{self.name}.{name}")
        return made

    def __call__(self, *args: Any, **options: Any) -> Any:
        # A decorator returns what it decorates.
        alone = len(args) == 1 and not options
        decorated = alone and isinstance(args[0], (types.FunctionType, type))
        return args[0] if decorated else self

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[()]:
        return ()

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return True

    def __int__(self) -> int:
        return 0

    def __lt__(self, _: object) -> bool:
        return False

    def __or__(self, _: object) -> Anything:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __enter__(self) -> Anything:
        return self

    def __add__(self, _: object) -> Anything:
        return self

    def __neg__(self) -> Anything:
        return self

    __gt__ = __le__ = __ge__ = __lt__
    __index__ = __int__
    __ror__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = __or__
    __getitem__ = __or__


class AnyModule(types.ModuleType):
    """A module whose attributes are Anything."""

    __path__: list[str] = []  # noqa: RUF012  a class attribute, which the import system reads

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Anything(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Load the modules of LOADED from the tree, and replace all others outside of the standard library."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        top = fullname.split(".")[0]
        if top in sys.stdlib_module_names or top == "typing_extensions":
            return None
        base = self.root.joinpath(*fullname.split("."))
        wanted = any(fullname == name or fullname.startswith(f"{name}.") for name in LOADED)
        for file in (base.with_suffix(".py"), base / "__init__.py") if wanted else ():
            if file.is_file():
                package = file.name == "__init__.py"
                spec = importlib.machinery.ModuleSpec(fullname, self, is_package=package)
                spec.origin = str(file)
                return spec
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None if spec.origin else AnyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.origin:
            # Annotations are not evaluated, because they name types that are not there.
            flag = future_module.annotations.compiler_flag
            source = Path(spec.origin).read_text()
            exec(compile(source, spec.origin, "exec", flags=flag, dont_inherit=True), vars(module))


class NothingSet:
    """Engine settings without any values: every attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Aiter(SimpleNamespace):
    """Replaces vLLM's functions that report what AITER supports: everything if it is enabled."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self.enabled


def set_architecture(modules: SimpleNamespace, name: str, *, aiter: bool) -> None:
    """Make the release's functions see an AMD GPU, and VLLM_ROCM_USE_AITER as set or unset."""
    rocm, ops = modules.selector, importlib.import_module("vllm._aiter_ops")
    rocm._GCN_ARCH = name
    source = Path(rocm.__spec__.origin).read_text().splitlines()
    # The release evaluates these lines once, when it is imported.
    exec("\n".join(line for line in source if line.startswith("_ON_")), vars(rocm))
    supported = name in WITH_AITER
    ops.is_aiter_found_and_supported = lambda: supported
    ops.rocm_aiter_ops = Aiter(
        enabled=aiter and supported,
        is_rdna_aiter_enabled=lambda: False,
        is_shuffle_kv_cache_enabled=lambda: False,
    )


def load(root: Path, *, amd: bool = False) -> SimpleNamespace:
    """Return the modules that select a backend, and a platform whose capability can be set."""
    sys.meta_path.insert(0, Finder(root))
    config = importlib.import_module("vllm.config")
    settings = SimpleNamespace(
        model_config=None,
        attention_config=NothingSet(),
        cache_config=NothingSet(),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1, decode_context_parallel_size=1
        ),
    )
    config.get_current_vllm_config = lambda: settings
    config.get_current_vllm_config_or_none = lambda: None
    interface = importlib.import_module("vllm.platforms.interface")

    class Cuda(interface.Platform):  # type: ignore[misc, name-defined]
        _enum = interface.PlatformEnum.CUDA
        device_name = device_type = "cuda"
        capability = (9, 0)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:  # noqa: ARG003
            return interface.DeviceCapability(*cls.capability)

    if amd:
        Cuda._enum = interface.PlatformEnum.ROCM
    importlib.import_module("vllm.platforms").current_platform = Cuda()
    return SimpleNamespace(
        platform=Cuda,
        capability=interface.DeviceCapability,
        selector=importlib.import_module(f"vllm.platforms.{'rocm' if amd else 'cuda'}"),
        backend=importlib.import_module("vllm.v1.attention.backend"),
        registry=importlib.import_module(
            "vllm.v1.attention.backends.registry"
        ).AttentionBackendEnum,
        versions=importlib.import_module("vllm.v1.attention.backends.fa_utils"),
        dtypes=importlib.import_module("torch"),
    )


def forget() -> None:
    """Clear all caches of the tree's functions, and replace functions that would query the host."""
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith("vllm"):
            continue
        for name, value in list(vars(module).items()):
            if name in REPLACED:
                setattr(module, name, REPLACED[name])
            clear = None if isinstance(value, Anything) else getattr(value, "cache_clear", None)
            if clear is not None:
                clear()


class Release:
    """The backend selection of one release for one capability and one kind of attention."""

    def __init__(self, modules: SimpleNamespace, capability: tuple[int, int], *, mla: bool) -> None:
        self.modules, self.mla = modules, mla
        self.capability = modules.capability(*capability)
        self.head_dim = 576 if mla else 128
        dtypes = modules.dtypes
        self.dtypes = {"bf16": dtypes.bfloat16, "fp16": dtypes.float16, "fp32": dtypes.float32}
        check = modules.backend.AttentionBackend.validate_configuration
        self.parameters = set(inspect.signature(check).parameters)
        self.axes = dict(AXES)
        # Older releases select a backend before they know the page size.
        source = Path(modules.selector.__spec__.origin).read_text()
        if "_replace(block_size=None)" in source:
            self.axes["page"] = (None,)

    def order(self, **when: Any) -> list[Any]:
        """Return the candidates, in the order in which the release tries them."""
        function = self.modules.selector._get_backend_priorities
        values = {
            "use_mla": self.mla,
            "device_capability": self.capability,
            "num_heads": when.get("heads", 32),
            "kv_cache_dtype": "fp8_e4m3" if when.get("quantized") else "auto",
            "use_non_causal": not when.get("causal", True),
            "head_size": when.get("head_dim", self.head_dim),
            "use_mm_prefix": False,
            "use_sparse": False,
        }
        names = inspect.signature(function).parameters
        return list(function(**{key: value for key, value in values.items() if key in names}))

    def reasons(self, backend: type, **axes: Any) -> list[str]:
        """Return the release's reasons against a backend."""
        chosen = {"head_dim": self.head_dim} | {name: each[0] for name, each in AXES.items()} | axes
        values = {ARGUMENTS[name]: value for name, value in chosen.items() if name in ARGUMENTS}
        values |= {
            "dtype": self.dtypes[chosen["dtype"]],
            "kv_cache_dtype": KV_NAMES.get(chosen["kv_dtype"], chosen["kv_dtype"]),
            "use_mla": self.mla,
            "use_non_causal": not chosen["causal"],
            "use_sparse": False,
            "use_mm_prefix": False,
            "use_per_head_quant_scales": False,
            "attn_type": "decoder",
            "device_capability": self.capability,
        }
        wanted = {name: value for name, value in values.items() if name in self.parameters}
        return list(dict.fromkeys(map(str, backend.validate_configuration(**wanted))))  # type: ignore[attr-defined]

    def refusals(self, backend: type) -> list[dict[str, Any]]:
        """Return the conditions under which the release refuses a backend, with its reasons.

        A refusal names the values of no axis, of one axis or of two axes:
        `{"page": [1, 8], "reason": …}`.
        """
        base = dict.fromkeys(self.reasons(backend))
        axes: dict[str, Any] = {**self.axes, "head_dim": HEAD_DIMS}
        single = {
            (name, value): self.reasons(backend, **{name: value})
            for name, values in axes.items()
            for value in values
        }
        refused: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for (name, value), reasons in single.items():
            for reason in reasons:
                refused[name, reason].append(value)
        # A reason against the base holds always, unless values of one axis avoid it.
        avoided = {
            reason: name
            for (name, reason), values in refused.items()
            if reason in base and len(values) < len(axes[name])
        }
        found: dict[tuple[tuple[str, ...], str, Any], list[Any]] = {}
        for reason in base:
            if reason not in avoided:
                found[(), reason, None] = []
        for (name, reason), values in refused.items():
            if avoided.get(reason, name) == name and ((), reason, None) not in found:
                found[(name,), reason, None] = values
        for (one, ones), (two, twos) in itertools.combinations(axes.items(), 2):
            for first, second in itertools.product(ones, twos):
                known = {
                    reason
                    for (names, reason, _), values in found.items()
                    if not names or (names == (one,) and first in values)
                    or (names == (two,) and second in values)
                    or (len(names) == 1 and names[0] not in (one, two) and axes[names[0]][0] in values)
                }  # fmt: skip
                for reason in self.reasons(backend, **{one: first, two: second}):
                    if reason not in known:
                        found.setdefault(((one, two), reason, first), []).append(second)
        return [
            _refusal(names, reason, first, values)
            for (names, reason, first), values in found.items()
        ]

    def draw(self, random_source: random.Random) -> dict[str, Any]:
        """Return a random config with the candidates of the release and its reasons."""
        axes = {name: random_source.choice(values) for name, values in self.axes.items()}
        axes |= {"head_dim": 576 if self.mla else random_source.choice(HEAD_DIMS)}
        heads = random_source.choice((1, 8, 16, 17, 32, 128))
        quantized = axes["kv_dtype"].startswith("fp8")
        order = self.order(
            heads=heads, quantized=quantized, causal=axes["causal"], head_dim=axes["head_dim"]
        )
        reasons = {each.name: self.reasons(each.get_class(), **axes) for each in order}
        return {"config": {**axes, "heads": heads}, "reasons": reasons}

    def flash_versions(self) -> list[dict[str, Any]]:
        """Return the version of FlashAttention for each head dimension, for FLASH_ATTN."""
        function = self.modules.versions.get_flash_attn_version
        names = inspect.signature(function).parameters
        found: dict[int, list[int]] = defaultdict(list)
        for head_dim in HEAD_DIMS:
            values = {"head_size": head_dim, "supports_fa4_hd256": True}
            wanted = {name: value for name, value in values.items() if name in names}
            version = function(**wanted)
            if version is not None:
                found[version].append(head_dim)
        return [{"version": each, "head_dim": _spans(dims)} for each, dims in found.items()]


def _refusal(names: tuple[str, ...], reason: str, first: Any, values: list[Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if names:
        made[names[-1]] = _spans(values) if names[-1] == "head_dim" else values
    if len(names) == 2:
        made[names[0]] = [first]
    return {**made, "reason": reason}


def _spans(values: list[int]) -> list[list[int]]:
    """Return sorted numbers as spans [first, last, step], as few as a greedy search finds."""
    spans: list[list[int]] = []
    for value in sorted(values):
        if spans and len(spans[-1]) == 2 and spans[-1][0] == spans[-1][1]:
            spans[-1] = [spans[-1][0], value, value - spans[-1][0]]
        elif spans and value == spans[-1][1] + spans[-1][2]:
            spans[-1][1] = value
        else:
            spans.append([value, value, 8])
    return spans


def orders(release: Release) -> list[dict[str, Any]]:
    """Return the order of candidates for each combination of the conditions that it depends on."""
    axes: dict[str, tuple[Any, ...]] = {
        "heads": (32, 16),
        "quantized": (False, True),
        "causal": (True, False),
        "head_dim": (release.head_dim, 512),
    }
    cells = {
        values: [each.name for each in release.order(**dict(zip(axes, values, strict=True)))]
        for values in itertools.product(*axes.values())
    }
    # Keep only the axes that change the order.
    matter = [
        place
        for place in range(len(axes))
        if any(
            cells[values] != cells[(*values[:place], other, *values[place + 1 :])]
            for values in cells
            for other in list(axes.values())[place]
        )
    ]
    names = list(axes)
    made = {}
    for values, order in cells.items():
        made[tuple((names[place], values[place]) for place in matter)] = order
    return [{"when": dict(when), "backends": order} for when, order in made.items()]


def ask_amd(modules: SimpleNamespace, sample: random.Random, count: int) -> dict[str, Any]:
    """Return the rules of a release on AMD GPUs, whose architecture takes the place of the
    capability.
    """
    answer: dict[str, Any] = {"orders": [], "refusals": [], "flash_versions": [], "sample": []}
    for (name, capability), mla in itertools.product(ARCHITECTURES.items(), (False, True)):
        modules.platform.capability = capability
        where = {"capability": name, "mla": mla}
        release = Release(modules, capability, mla=mla)
        found = {}
        for aiter in (False, True):  # the last one stays set, and the refusals are those with AITER
            set_architecture(modules, name, aiter=aiter)
            forget()
            found[aiter] = [each.name for each in release.order()]
            answer["sample"] += [
                {**where, **case, "config": {**case["config"], "aiter": aiter}}
                for case in (release.draw(sample) for _ in range(count))
            ]
        if found[False] == found[True]:
            answer["orders"].append({**where, "when": {}, "backends": found[True]})
        else:
            answer["orders"] += [
                {**where, "when": {"aiter": aiter}, "backends": names}
                for aiter, names in found.items()
            ]
        for each in sorted({*found[False], *found[True]}):
            refusals = release.refusals(modules.registry[each].get_class())
            answer["refusals"].append({**where, "backend": each, "refusals": refusals})
    return answer


def main() -> None:
    amd = sys.argv[4:] == ["amd"]
    modules = load(Path(sys.argv[1]), amd=amd)
    answer: dict[str, Any] = {"orders": [], "refusals": [], "flash_versions": [], "sample": []}
    sample = random.Random(int(sys.argv[2]))
    if amd:
        json.dump(ask_amd(modules, sample, int(sys.argv[3])), sys.stdout)
        return
    for capability in CAPABILITIES:
        modules.platform.capability = capability
        forget()
        for mla in (False, True):
            release = Release(modules, capability, mla=mla)
            where = {"capability": "{}.{}".format(*capability), "mla": mla}
            found = orders(release)
            answer["orders"] += [{**where, **each} for each in found]
            for name in sorted({name for each in found for name in each["backends"]}):
                refusals = release.refusals(modules.registry[name].get_class())
                answer["refusals"].append({**where, "backend": name, "refusals": refusals})
            answer["sample"] += [{**where, **release.draw(sample)} for _ in range(int(sys.argv[3]))]
        answer["flash_versions"].append(
            {"capability": "{}.{}".format(*capability), "versions": release.flash_versions()}
        )
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
