"""`profharness explain`: explain PyTorch's choice of a backend, and what would change it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import click

from profharness.attention.config import (
    AUTO,
    SDPA_BACKENDS,
    Config,
    outside_sdpa,
    parse_config,
    require_configs,
    sdpa_setting,
    split_names,
)
from profharness.attention.dispatch import rocm
from profharness.attention.dispatch.advice import Advice, BackendAnswer, LiveAnswer
from profharness.attention.dispatch.by_rule import (
    ALLOW_SET,
    COMPILED,
    CPU_IGNORES,
    FIRST_CHOICE,
    LEGACY,
    Explanation,
    Platform,
    choices_by_rule,
    chosen,
    environment_text,
    explain_by_rule,
    flat_record,
    matrix,
    named_platforms,
    requested_setting,
    settle,
    sides_by_rule,
    skipped_text,
    window_texts,
)
from profharness.attention.dispatch.machine import (
    from_config,
    machine_of,
    permitted,
    release_text,
    skipped_releases,
    with_flags,
)
from profharness.attention.dispatch.predict import hazards, predict
from profharness.attention.engines import ENGINES, Selection, engine_releases
from profharness.commands._command import command, declaration_of, document, gate, usage
from profharness.commands._options import Option
from profharness.commands._output import (
    capture_progress,
    hint,
    hint_cpu,
    hint_sentence,
    shared_release,
)
from profharness.commands._runs import has_run, run_text
from profharness.commands._types import (
    DEFAULT_RELEASE,
    ConfigOrRunArguments,
    Names,
    PathLike,
    RunAmongConfigs,
    Store,
    complete_backends,
    complete_engine_releases,
    complete_releases,
    config_list,
    device_option,
    gpu_option,
    require_one,
    store_path,
    timeout_option,
    tool_backends,
)
from profharness.commands.explain.answer import Way, advised_way, limit_advice
from profharness.commands.explain.engines import candidate_rows, engine_document, selections_of
from profharness.commands.explain.maps import bisect_all, draw_maps, numeric_name
from profharness.commands.explain.tables import (
    CODE_FOLLOWS,
    bisect_document,
    explain_document,
    map_document,
    matrix_document,
    program_document,
    unexplained_document,
)
from profharness.device_types import CPU, device_name, is_gpu, on_gpu
from profharness.devices import Gpu, find_gpu
from profharness.environment import gpu_name, no_gpu_text
from profharness.errors import CaptureError, UsageError, counted, join_and
from profharness.measurements.agreement import (
    backend_seen,
    replaced_by,
    replacement_text,
)
from profharness.render.document import Block, Code, Document, Note
from profharness.rows import (
    CALL_MEASUREMENTS,
    NAIVE_COMPILED,
    CellRow,
    KernelRow,
    Refusal,
    shared_measurement,
)
from profharness.run import CaptureOptions, Protocol, gpu_names, require_distinct
from profharness.store import frame

if TYPE_CHECKING:
    import pandas as pd

    from profharness.commands.explain.calls import ProgramCalls, RunConfigs
    from profharness.recording.probe import AskProgress
    from profharness.store import Store as OpenStore


def with_store(answers: Sequence[Explanation], path: Path) -> list[Explanation]:
    """Return the explanations, completed by stored cells of the same configs.

    The cells provide the backend that was observed, whether it agrees with the explanation, and the
    gain of each advised change. Raise StoreError if the file is not a store.
    """
    if not path.exists():
        return list(answers)
    # Imported here because it loads sqlite, which is not needed if no store exists.
    from profharness.store import open_store

    with open_store(path) as store:
        cells = _StoredCells(store, answers)
        return [settle(cells.join(answer)) for answer in answers]


class _StoredCells:
    """The stored cells of the explained configs and of the configs that the advice proposes."""

    def __init__(self, store: OpenStore, answers: Sequence[Explanation]) -> None:
        self.store = store
        self.environment = cache(store.environment)
        self.cells: dict[str, list[CellRow]] = {}
        labels = [answer.config for answer in answers]
        labels += [label for answer in answers for _, label in _advised(answer)]
        configs = [parse_config(label) for label in dict.fromkeys(labels)]
        for cell in store.cells("all", configs=configs):
            self.cells.setdefault(cell.config, []).append(cell)

    def join(self, answer: Explanation) -> Explanation:
        """Return the explanation with the data that stored cells provide.

        These are the backend that was observed, the gains of advised changes, and a caveat if
        torch.compile replaced the plain attention of `naive-compiled`.
        """
        cells = self._alike(answer.config, answer)
        seen = (
            backend_seen(cell, self._kernels(cell))
            for cell in cells
            if cell.backend == answer.asked
        )
        compiled = [cell for cell in cells if cell.backend == NAIVE_COMPILED]
        caveats = (
            f"{cell.backend}: {replacement_text(backend)}, in run {cell.run}"
            for cell in compiled
            if (backend := replaced_by(cell, self._kernels(cell))) is not None
        )
        return replace(
            answer,
            observed=answer.observed or next(filter(None, seen), None),
            backends=tuple(
                replace(
                    side, advice=tuple(self._gain(a, side.backend, answer) for a in side.advice)
                )
                for side in answer.backends
            ),
            caveats=(*answer.caveats, *itertools.islice(caveats, 1)),
        )

    def _alike(self, label: str, answer: Explanation) -> list[CellRow]:
        """Return the cells of a config that ran on the device and release of the explanation.

        The newest run comes first. The GPU's capability and the cuDNN version must be equal too, if
        both environments have them.
        """
        target, alike = answer.environment, []
        for cell in self.cells.get(label, []):
            run = self.environment(cell.run)
            releases = {str(each.get("torch", "")).split("+")[0] for each in (run, target)}
            if len(releases) == 1 and run.get("device_type") == target.get("device_type"):
                pairs = ((run.get(key), target.get(key)) for key in ("capability", "cudnn"))
                if all(None in pair or pair[0] == pair[1] for pair in pairs):
                    alike.append(cell)
        return alike

    def _kernels(self, cell: CellRow) -> list[KernelRow]:
        return self.store.kernels(cell.run, cells=[cell.cell])

    def _gain(self, advice: Advice, backend: str, answer: Explanation) -> Advice:
        """Return the advice with its gain, which is the time before the change over the time after
        it.

        Both times come from the same run if possible, or else from two runs on equal devices. The
        gain stays None if there are no such times.
        """
        if advice.config is None or advice.gain is not None:
            return advice
        advised = self._alike(advice.config, answer)
        before = _timed(self._alike(answer.config, answer), answer.asked, chosen(answer))
        after = _timed(advised, backend)
        if not after and advice.choice == backend:
            after = _timed(advised, answer.asked)
        pairs = [(old, new) for old in before for new in after]
        pairs.sort(key=lambda pair: pair[0].run != pair[1].run)
        for old, new in pairs:
            devices = {device_name(self.environment(cell.run)) for cell in (old, new)}
            name = shared_measurement([old.samples.get, new.samples.get], CALL_MEASUREMENTS)
            if name and len(devices) == 1:
                gain = median(old.samples[name]) / median(new.samples[name])
                runs = dict.fromkeys(self.store.run_name(cell.run) for cell in (old, new))
                where = f"run{'s' if len(runs) > 1 else ''} {join_and(runs)}"
                return replace(advice, gain=gain, gain_source=f"{name} median in {where}")
        return advice


def _advised(answer: Explanation) -> list[tuple[str, str]]:
    """Return (backend, label of the changed config) for each advised change of the config."""
    return [
        (side.backend, advice.config)
        for side in answer.backends
        for advice in side.advice
        if advice.config is not None
    ]


def _timed(cells: Sequence[CellRow], *backends: str) -> list[CellRow]:
    """Return the cells of these backends that have samples, in the order of the backends."""
    ran = [cell for cell in cells if cell.status == "ok" and cell.samples]
    return [cell for name in backends for cell in ran if cell.backend == name]


def require_answer(answers: Sequence[Explanation]) -> None:
    """Raise CaptureError if PyTorch gave no answer for any of the configs."""
    if not answers or any(answer.error is None for answer in answers):
        return
    more = f" (and {len(answers) - 1} more)" if len(answers) > 1 else ""
    raise CaptureError(
        f"querying PyTorch failed for {answers[0].config}{more} ({answers[0].error}); allow "
        "more time with --timeout DURATION, or use the dispatch rules with --torch and --gpu"
    )


def to_measure(answers: Sequence[Explanation]) -> dict[tuple[str, ...], list[Config]]:
    """Return the captures that are necessary to measure the gain of each advised change.

    The result maps a tuple of backends to the configs to capture on these backends.
    """
    backends_of: dict[Config, dict[str, None]] = {}
    for answer in answers:
        for backend, label in _advised(answer):
            backends_of.setdefault(parse_config(answer.config), {})[answer.asked] = None
            backends_of.setdefault(parse_config(label), {})[backend] = None
    jobs: dict[tuple[str, ...], list[Config]] = {}
    for config, backends in backends_of.items():
        jobs.setdefault(tuple(backends), []).append(config)
    return jobs


CUDNN_SWITCHES = "TORCH_CUDNN_SDPA_"
DECIDING = (
    "torch",
    "torch_cuda",
    "gpu",
    "capability",
    "cudnn",
    "device_type",
    "flash_attention_impl",
)


def explain_live(
    configs: Sequence[Config],
    *,
    backends: Sequence[str] = (),
    advice: bool = True,
    device: str = "auto",
    timeout_s: float = 120.0,
    progress: AskProgress | None = None,
    asked: str = AUTO,
) -> list[Explanation]:
    """Return one explanation per config, by querying PyTorch on this machine.

    `asked` is `auto`, or a set or an order of backends. If `backends` is not empty, only these
    backends get advice. Raise CaptureError if no worker starts or replies.
    """
    # Imported here because only a live query needs the code that starts workers.
    from profharness.recording.probe import ask

    inside = [config for config in configs if outside_sdpa(config) is None]
    # Ask PyTorch about some config in any case, because the answer contains the environment.
    answers, environment = ask(
        inside or [Config(1, 1, 1, 16, 16, 16)],
        device=device,
        advice=advice,
        timeout_s=timeout_s,
        progress=progress,
        asked=asked,
    )
    found = dict(zip(inside, answers, strict=False))
    return [
        _explanation(config, asked, found[config], environment, backends or SDPA_BACKENDS)
        if config in found
        else _outside(config, asked, environment)
        for config in configs
    ]


def _outside(config: Config, asked: str, environment: Mapping[str, Any]) -> Explanation:
    """Return the explanation of a config that PyTorch cannot be asked about."""
    device = str(environment["device_type"])
    refusals = (Refusal("unsupported", outside_sdpa(config) or "", "rule"),)
    return Explanation(
        config=config.resolve(device).label,
        environment=dict(environment),
        source="rules",
        priority_order=(),
        predicted="none",
        backends=tuple(BackendAnswer(name, False, refusals) for name in SDPA_BACKENDS),
        asked=asked,
    )


def _explanation(
    config: Config,
    asked: str,
    answer: LiveAnswer,
    environment: Mapping[str, Any],
    advised: Sequence[str],
) -> Explanation:
    device = str(environment.get("device_type", CPU))
    config = config.resolve(device)
    machine = machine_of(environment)
    params = permitted(with_flags(environment)(from_config(config, device)), sdpa_setting(asked))
    prediction = predict(params, machine)
    sides = answer.backends or sides_by_rule(prediction, SDPA_BACKENDS)
    # Keep only the part of the environment that can affect the choice.
    facts = {key: environment[key] for key in DECIDING if environment.get(key) is not None}
    facts["flags"] = {
        name: environment[f"sdp_{name}"] for name in SDPA_BACKENDS if f"sdp_{name}" in environment
    }
    variables = environment.get("env") or {}
    if switches := {key: variables[key] for key in variables if key.startswith(CUDNN_SWITCHES)}:
        facts["env"] = switches
    caveats = [*window_texts(config), *hazards(answer.choice or prediction.choice, params, machine)]
    caveats += _caveats(environment, answer.backends)
    if params.priority:
        caveats.append(FIRST_CHOICE if is_gpu(device) else CPU_IGNORES)
    explanation = Explanation(
        config=config.label,
        environment=facts,
        source="live",
        priority_order=answer.priority_order or prediction.priority_order,
        predicted=prediction.choice,
        choice=answer.choice,
        backends=tuple(
            side if side.backend in advised else replace(side, advice=()) for side in sides
        ),
        caveats=tuple(caveats),
        error=answer.error,
        asked=asked,
    )
    return settle(explanation)


def _caveats(environment: Mapping[str, Any], sides: Sequence[BackendAnswer]) -> list[str]:
    sentences = [COMPILED]
    if on_gpu(environment):
        sentences.append(ALLOW_SET)
        if environment.get("sdp_cudnn"):
            sentences.append(LEGACY)
    impl = environment.get("flash_attention_impl")
    if impl:
        sentences.append(
            f"{impl} is activated, so flash runs the kernels of {impl} instead of FA2's. A call "
            f"that {impl} does not support raises an error instead of falling back to another "
            "backend."
        )
    sentences += [
        f"PyTorch contradicts itself: can_use_{side.backend}_attention returns {side.can_use}, but "
        f"a call restricted to {side.backend} would{(' ' if side.eligible else ' not ')}run."
        for side in sides
        if None not in (side.eligible, side.can_use) and side.eligible != side.can_use
    ]
    return sentences


Backend = Annotated[
    Names,
    Option(
        ("--backend",),
        multiple=True,
        metavar="NAME",
        complete=complete_backends,
        help="Limit the advice and the table to these backends. With a set (flash+math) or an order "
        "(cudnn-then-flash, or 'cudnn>flash' in quotes), explain which of its backends PyTorch "
        "chooses, rather than which one auto chooses. "
        "Separate several values by commas, or repeat the option.",
        tool=(
            "A set of backends or a backend order to which the call is restricted, or single backends to "
            "which the advice and the table are limited. Files and modules are not accepted."
        ),
        tool_value=tool_backends,
        tool_examples=("flash+math", "cudnn-then-flash", "flash"),
    ),
]
Releases = Annotated[
    str | None,
    Option(
        ("--torch",),
        complete=complete_releases,
        metavar="RELEASES",
        help="Use the dispatch rules of one PyTorch release (such as "
        f"2.9.1), of several releases (2.8,2.10) or of a range (2.5..2.15).  "
        f"[default: {DEFAULT_RELEASE}]",
        tool="One or more PyTorch releases, or a range of releases. The default is "
        f"{DEFAULT_RELEASE}.",
        tool_examples=("2.11", "2.8,2.10", "2.5..2.15"),
    ),
]
GpuName = Annotated[
    str | None,
    gpu_option(
        "Use the dispatch rules for this GPU, for an architecture (sm90, gfx942) or for the CPU (cpu).",
        default="the local GPU",
        tool="One or more GPUs, each given by its name or compute capability, or `cpu` for the "
        "CPU.",
        tool_examples=("H200", "RTX A6000", "sm90", "cpu", "H200,MI300X"),
    ),
]
Cudnn = Annotated[
    str | None,
    Option(
        ("--cudnn",),
        metavar="VERSION",
        help="The cuDNN version.  [default: that of the PyPI wheel]",
        tool="The cuDNN version. The default is the version that PyTorch's PyPI wheel uses.",
    ),
]
Cuda = Annotated[
    str | None,
    Option(
        ("--cuda",),
        metavar="VERSION",
        help="The CUDA version that PyTorch was built with.  [default: that of the PyPI wheel]",
        tool="The CUDA version that PyTorch was built with. The default is the version that "
        "PyTorch's PyPI wheel was built with.",
    ),
]
CudnnCompiled = Annotated[
    str | None,
    Option(
        ("--cudnn-compiled",),
        metavar="VERSION",
        help="The cuDNN version that PyTorch was compiled with. In PyTorch 2.9, the "
        "order of the backends depends on the cuDNN version.  [default: that of the PyPI wheel of the release]",
    ),
]
Aotriton = Annotated[
    str | None,
    Option(
        ("--aotriton",),
        metavar="VERSION",
        help="The AOTriton version, for AMD GPUs only.  [default: that of PyTorch's ROCm wheel]",
    ),
]
RocmFa = Annotated[
    str | None,
    Option(
        ("--rocm-fa",),
        type=click.Choice(rocm.LIBRARIES),
        help="The value of torch.backends.cuda.preferred_rocm_fa_library, for AMD GPUs only.  "
        "[default: aotriton]",
    ),
]
Experimental = Annotated[
    bool,
    Option(
        ("--aotriton-experimental",),
        help=f"For AMD GPUs, assume that {rocm.EXPERIMENTAL_VARIABLE}=1 is set.",
    ),
]
Engine = Annotated[
    str | None,
    Option(
        ("--engine",),
        type=click.Choice(list(ENGINES)),
        help="Explain which attention backend this serving engine chooses, which other candidates "
        "there are, why the engine refuses them, and which options select them.",
        tool="The serving engine whose choice is explained. By default, PyTorch's choice is "
        "explained.",
        tool_examples=("vllm",),
    ),
]
EngineVersion = Annotated[
    str | None,
    Option(
        ("--engine-version",),
        complete=complete_engine_releases,
        metavar="RELEASES",
        help="Use the rules of this engine release (0.25 or 0.25.1), of several (0.19,0.25) or of "
        "a range (0.19..0.32).  [default: the newest known]",
        tool="One or more releases of the serving engine, or a range of releases. The default is "
        "the newest known release.",
        tool_name="engine_version",
        tool_examples=("0.25", "0.19..0.32"),
    ),
]
Bisect = Annotated[
    str | None,
    Option(
        ("--bisect",),
        metavar="PROPERTY",
        check=numeric_name,
        help="Find the values of this property, such as head_dim, at which the choice changes.",
        tool="Find the values of this property at which the choice of backend changes.",
        tool_examples=("head_dim", "seq_len"),
    ),
]
Full = Annotated[
    bool,
    Option(("--full",), help="Explain each config separately, with full messages and all advice."),
]
Measure = Annotated[
    bool,
    Option(
        ("--measure",), help="Capture each config with the advised changes, and report the gain."
    ),
]
AskedDevice = Annotated[
    str,
    device_option("The device on which the local PyTorch is queried."),
]
Timeout = Annotated[
    float,
    timeout_option("Time limit for the answer of the process that runs PyTorch."),
]


@dataclass(frozen=True)
class EngineChoice:
    """A serving engine, the releases to query, and the GPU."""

    name: str
    releases: list[str]
    gpu: Gpu | rocm.AmdGpu

    def ask(self, configs: Sequence[Config]) -> list[Selection]:
        """Return the selection for each config and release."""
        return selections_of(self.name, self.releases, configs, self.gpu)


@dataclass(frozen=True)
class Question:
    """The configs to explain, and the options of the command."""

    configs: list[Config]
    asked: str
    """The requested backend, which is `auto`, or a set or an order of backends."""
    backends: tuple[str, ...]
    """The backends to give advice on. If it is empty, all backends get advice."""
    platforms: list[Platform]
    """The GPUs and releases whose dispatch rules to use. Empty if the local PyTorch is queried."""
    store: Path
    torch: str | None = None
    device: str = AUTO
    timeout_s: float = Protocol.timeout_s
    engine: EngineChoice | None = None
    """The serving engine whose choice is explained. None if PyTorch's choice is explained."""
    program: ProgramCalls | None = None
    """The calls of a run, which are compared with the explanations. None if no run was given."""
    captured: RunConfigs | None = None
    """The configs of a captured run that are explained for the platform of the run."""
    explanations: list[Explanation] = field(default_factory=list)
    """The explanations that `show` displayed, which `check` examines."""

    @property
    def unknown_releases(self) -> list[str]:
        """The releases in the range of --torch that the dispatch rules do not cover."""
        return [release_text(release) for release in skipped_releases(self.torch or "")]

    def explain(self, *, advice: bool = True) -> list[Explanation]:
        """Return one explanation per config and platform.

        Raise CaptureError if PyTorch is queried and no worker replies.
        """
        if self.program is not None and not self.program.calls:
            return []  # the answer is the change that the program needs
        if self.program is not None:
            return self.program.explain(self.platforms[0], self.backends, advice=advice)
        if self.platforms:
            return [
                explain_by_rule(
                    config, platform, backends=self.backends, advice=advice, asked=self.asked
                )
                for config in self.configs
                for platform in self.platforms
            ]
        return explain_live(
            self.configs,
            backends=self.backends,
            advice=advice,
            device=self.device,
            timeout_s=self.timeout_s,
            asked=self.asked,
        )


def _to_frame(question: Question) -> pd.DataFrame:
    if question.engine is not None:
        return _engine_frame(question.engine, question.configs)
    if question.backends:
        raise UsageError(
            f"explain accepts auto, a set of backends or a backend order, not {question.backends[0]!r}"
        )
    answers = with_store(question.explain(), question.store)
    made = frame(list(map(flat_record, answers)))
    made.attrs |= {"answers": answers, "unknown_releases": question.unknown_releases}
    return made


def _engine_frame(engine: EngineChoice, configs: Sequence[Config]) -> pd.DataFrame:
    """Return one row per config, release and candidate."""
    found = engine.ask(configs)
    of = [config for config in configs for _ in engine.releases]
    rows = [
        asdict(row)
        for selection, config in zip(found, of, strict=True)
        for row in candidate_rows(selection, config, engine.gpu)
    ]
    made = frame(rows)
    made.attrs["selections"] = found
    return made


@command(
    "explain",
    frame=_to_frame,
    tool=(
        "Use this tool for any config, stored or not. The tool applies PyTorch's dispatch rules "
        "and needs no GPU. With several configs, the result is a map of the chosen backends. With "
        "several releases, the result shows in which release the choice changes. With `bisect`, "
        "the tool finds the values at which the choice changes."
    ),
    tool_required=("config", "gpu"),
)
def explain(
    configs: ConfigOrRunArguments = None,
    *,
    run: RunAmongConfigs = None,
    backend: Backend = AUTO,
    torch: Releases = None,
    gpu: GpuName = None,
    cudnn: Cudnn = None,
    cuda: Cuda = None,
    cudnn_compiled: CudnnCompiled = None,
    aotriton: Aotriton = None,
    rocm_fa: RocmFa = None,
    aotriton_experimental: Experimental = False,
    engine: Engine = None,
    engine_version: EngineVersion = None,
    device: AskedDevice = Protocol.device,
    timeout_s: Timeout = Protocol.timeout_s,
    store: Store = None,
) -> Question:
    """Explain which backend PyTorch chooses, why it refuses the others, and what to change.

    By default, the local PyTorch is queried; no kernel is launched. With --torch or --gpu, the
    dispatch rules of a PyTorch release are applied instead, and neither torch nor a GPU is needed.
    If the dispatch rules do not cover a case, the answer is `unknown`. The exit code is 1 if
    PyTorch was queried and gave no answer.

    CONFIG|RUN is one or more configs, or a single trace file or stored run, or a run and some of
    its configs. The default is the latest run with attention calls or configs. For a program, the
    command applies the dispatch rules for the run's PyTorch release and GPU to each distinct config
    of the attention calls, compares the expected choice with the backend that ran, and names the
    changes that are predicted to make the calls faster. For a run created by `capture`, the
    command explains the run's configs for the PyTorch release and the GPU of that run.

    With several configs, the output is a map of PyTorch's choices. With several releases or GPUs,
    the output is a table that marks where the choice changes. If there is an atlas for the GPU and
    the release, the output for a single config includes the predicted kernel time, the best
    backend, and the time that each advised change saves.

    --backend limits the advice and the table to the named backends. If --backend names a set
    (flash+math) or an order (cudnn-then-flash), the command explains which backend that setting
    selects, rather than which one auto selects.

    With --engine, explain which attention backend a release of vLLM or SGLang chooses. The output
    lists the candidate backends in the order of the engine's rules, the first reason why each
    rejected candidate is rejected, and the options that select other candidates. With --engine,
    each config (such as 1,32,1,128,kv_heads=8,seq_kv=4096,kv_dtype=fp8) describes one layer on one
    GPU.

    \b
    Examples:
      profharness explain 2,8,512,100,fp32,mask=bool
      profharness explain trace.json.gz
      profharness explain latest 2,8,512,100,fp16
      profharness explain 2,8,512,64,bf16,causal --torch 2.8 --gpu "RTX A6000"
      profharness explain 2,8,512,64,bf16 --torch 2.5..2.15 --gpu H100
      profharness explain 2,8,512,256,bf16 --torch 2.5..2.13 --gpu MI300X
      profharness explain 2,8,512,64,bf16 --torch 2.11 --gpu H200,A100,MI300X
      profharness explain 2,8,512,64,bf16 --backend flash+math --torch 2.11 --gpu H100
      profharness explain '2,8,{64:8192:*2},{64,80,96,128,256}' --torch 2.11 --gpu H200
      profharness explain 2,8,512,64,fp16 --bisect head_dim --torch 2.11 --gpu H200
      profharness explain 1,64,1,64,kv_heads=8,sinks --engine vllm --engine-version 0.20 --gpu sm120
      profharness explain 1,32,1,128,kv_heads=8 --engine sglang --engine-version 0.5.2..0.5.23 --gpu B200

    In Python, the result has one row per config and release. `<backend>_eligible` is missing if it
    is unknown. `<backend>_reasons` lists codes and starts with the code at which PyTorch stops.
    `attrs["answers"]` has the explanations, and `attrs["unknown_releases"]` has the releases of a
    range that the rules do not cover.
    """
    asked, backends = requested_setting(split_names(backend))
    chosen_configs = config_list(configs)
    path = store_path(store)
    of_run = run is not None or (
        not chosen_configs and engine is None and has_run("attention calls or configs", path)
    )
    if not of_run:
        require_configs(chosen_configs, runs=True)
    if engine is not None:
        name = gpu or gpu_name()
        if name is None:
            raise UsageError(no_gpu_text("name a GPU with --gpu, such as --gpu H100"))
        require_one("explain --engine", "GPU")(name)
        there = rocm.find_amd_gpu(name) or find_gpu(name)
        choice = EngineChoice(engine, engine_releases(engine, engine_version), there)
        return Question(chosen_configs, AUTO, (), [], path, engine=choice)
    build = {
        "cudnn": cudnn,
        "cuda": cuda,
        "cudnn_compiled": cudnn_compiled,
        "aotriton": aotriton,
        "fa_library": rocm_fa,
        "experimental": aotriton_experimental,
    }
    if not of_run:
        platforms = _platforms(torch, gpu_names(gpu) if gpu else (), build)
        return Question(chosen_configs, asked, backends, platforms, path, torch, device, timeout_s)
    # Imported here because only a run needs the atlases, which load numpy.
    from profharness.commands.explain.calls import RunConfigs, find_calls

    found = find_calls(path, run_text(run), chosen_configs)
    if not isinstance(found, RunConfigs) and not found.calls:
        return Question([], asked, backends, [], path, program=found)
    platforms = _platforms_of(found, torch, gpu, build)
    if isinstance(found, RunConfigs):
        own = found if platforms == [found.platform] and asked == AUTO else None
        return Question(list(found.configs), asked, backends, platforms, path, torch, captured=own)
    program = found
    configs_of_run = list(dict.fromkeys(call.config for call in program.calls))
    # The backends that ran say nothing about another platform or setting.
    elsewhere = gpu is not None or (torch is not None and not program.assumed)
    if elsewhere or asked != AUTO or len(platforms) > 1:
        return Question(configs_of_run, asked, backends, platforms, path, torch)
    if torch is not None:
        program = replace(program, assumed="")
    return Question(
        *(configs_of_run, asked, backends, platforms, path, torch),
        program=program,
        captured=program.captured,
    )


def _platforms(torch: str | None, names: Sequence[str], build: Mapping[str, Any]) -> list[Platform]:
    """Return the platforms for the releases and GPUs, or no platforms if neither is given."""
    release = shared_release(names, torch)
    of_gpu = [named_platforms(release, name, **build) for name in names or (None,)]
    require_distinct(names, [each[0].gpu or CPU for each in of_gpu if names])
    return list(itertools.chain.from_iterable(of_gpu))


def _platforms_of(
    run: ProgramCalls | RunConfigs, torch: str | None, gpu: str | None, build: Mapping[str, Any]
) -> list[Platform]:
    """Return the platform of a run, or the platforms that the options name instead."""
    if gpu is not None:
        return _platforms(torch, gpu_names(gpu), build)
    own = run.platform
    if own is not None and torch is None and not any(build.values()):
        return [own]
    if own is None and run.gpu is None:
        raise UsageError(
            f"run {run.name} does not record its GPU; name the GPU with --gpu, such as --gpu H100"
        )
    release = torch or (None if own is None else release_text(own.machine.torch))
    return _platforms(release, (run.gpu or CPU,), build)


@usage(explain)
def check_options(
    *,
    torch: str | None = None,
    gpu: str | None = None,
    cudnn: str | None = None,
    cuda: str | None = None,
    aotriton: str | None = None,
    rocm_fa: str | None = None,
    aotriton_experimental: bool = False,
    backend: str = AUTO,
    engine: str | None = None,
    engine_version: str | None = None,
    device: str = AUTO,
    bisect: str | None = None,
    full: bool = False,
    measure: bool = False,
    run: PathLike | None = None,
) -> None:
    """Raise UsageError for options that exclude each other.

    --device and --measure need this machine, so they exclude --torch and --gpu. --bisect excludes
    --measure and --full. --engine excludes everything about PyTorch.
    """
    if engine_version is not None and engine is None:
        raise UsageError(
            f"--engine-version requires --engine, which is one of {', '.join(ENGINES)}"
        )
    about_torch = {
        "--torch": torch is not None,
        "--cudnn": cudnn is not None,
        "--cuda": cuda is not None,
        "--aotriton": aotriton is not None,
        "--rocm-fa": rocm_fa is not None,
        "--aotriton-experimental": aotriton_experimental,
        "--backend": backend != AUTO,
        "--device": device != AUTO,
        "--bisect": bisect is not None,
        "--measure": measure,
    }
    if engine is not None and any(about_torch.values()):
        given = next(option for option, is_given in about_torch.items() if is_given)
        raise UsageError(f"{given} is about PyTorch's choice; it cannot be combined with --engine")
    if run is not None:
        of_configs = {
            "--engine": engine is not None,
            "--device": device != AUTO,
            "--measure": measure,
        }
        for option, is_given in of_configs.items():
            if is_given:
                raise UsageError(f"{option} applies to configs, not to a run; name the configs")
    elsewhere = torch is not None or gpu is not None
    if device != AUTO and elsewhere:
        raise UsageError(
            "--device applies only when the local PyTorch is queried. With --torch or --gpu, use "
            "--gpu cpu instead."
        )
    if measure and elsewhere:
        raise UsageError(
            "--measure runs on this machine, but --torch and --gpu describe another; use one of them"
        )
    if bisect is not None and (measure or full):
        raise UsageError(
            "--bisect only finds choices; it cannot be combined with --measure or --full"
        )


@document(explain)
def show(
    question: Question, *, bisect: Bisect = None, full: Full = False, measure: Measure = False
) -> Document:
    """Return the document that answers the question.

    It shows a bisection, a table of releases, a map of choices, or the explanation of one config.
    """
    if (engine := question.engine) is not None:
        found = engine.ask(question.configs)
        return engine_document(found, question.configs, engine.gpu, full=full)
    if question.program is not None and not question.program.calls:
        return unexplained_document(question.program)
    page = (
        _bisected(question, bisect)
        if bisect is not None
        else _explained(question, full=full, measure=measure)
    )
    unknown = question.unknown_releases
    if not unknown:
        return page
    hint_sentence(skipped_text(unknown))
    return replace(page, extra={**page.extra, "unknown_releases": unknown})


@gate(explain)
def check(question: Question) -> None:
    """Raise CaptureError if PyTorch was queried and gave no answer for any config.

    The document is printed before this check, because it still contains the prediction by rule.
    """
    if question.configs and not question.platforms and question.engine is None:
        require_answer(question.explanations)


def _explained(question: Question, *, full: bool, measure: bool) -> Document:
    configs, platforms, backends = question.configs, question.platforms, question.backends
    if len(platforms) > 1:
        matrices = [
            matrix(config, group, question.asked)
            for config in configs
            for group in _groups(platforms)
        ]
        return matrix_document(matrices, full=full, backends=backends)
    single = len(question.program.calls if question.program else configs) == 1
    if not platforms and not single:
        hint(f"asking PyTorch about {counted(len(configs), 'config')}")
    # several configs are shown as a map, which does not include advice
    of_run = question.program is not None or question.captured is not None
    answers = question.explain(advice=single or full or measure or of_run)
    if measure:
        _measure(answers, question)
    answers = with_store(answers, question.store)
    doubt = ""
    if platforms and is_gpu(platforms[0].device) and (single or full or of_run):
        # Imported here because it loads numpy, which a map does not need.
        from profharness.commands.explain.times import with_times

        answers, doubt = with_times(answers, platforms[0])
        if not (single or full):
            doubt = ""  # nothing in the answer depends on times
        if doubt and single:  # JSON has the caveats of an answer, too
            answers = [replace(each, caveats=(*each.caveats, doubt)) for each in answers]
            doubt = ""
    # The advice on a backend may also let others run, such as flex_attention.
    answers = [limit_advice(answer, backends) for answer in answers]
    question.explanations.extend(answers)
    if not platforms:
        remedy = "the answer applies to the CPU. Name a GPU with --gpu, such as --gpu H200."
        hint_cpu(answers[0].environment, question.device, remedy)
    ways: list[tuple[Explanation, Way]] = []
    if of_run and not single and not backends:
        times = question.captured.times_of_auto if question.captured else {}
        for answer in answers:
            known = answer.observed_ns or times.get(answer.config)
            if way := advised_way(replace(answer, observed_ns=known)):
                ways.append((answer, way))
    if question.program is not None:
        advised = {answer.config: way for answer, way in ways}
        page = program_document(question.program, answers, full=full, named=backends, ways=advised)
    elif single:
        # What was measured is shown, even if it is slower.
        named = backends or (SDPA_BACKENDS if measure else ())
        page = explain_document(answers, full=full, named=named)
    else:
        maps = draw_maps(
            [parse_config(answer.config) for answer in answers], list(map(chosen, answers))
        )
        page = map_document(maps, answers, where=environment_text(answers[0]), full=full)
    if ways:
        page = _with_changes(page, ways, len(answers), full=full)
    notes = [Note(doubt, level="warning")] if doubt else []
    return replace(page, blocks=(*page.blocks, *notes))


def _with_changes(
    page: Document, ways: Sequence[tuple[Explanation, Way]], count: int, *, full: bool
) -> Document:
    """Return the document of a run of `count` configs with the changes that it needs.

    The answer has the change with the largest speed-up, whose code follows the tables. The other
    changes are notes. If `full` is set, the explanations of the configs already contain both.
    """
    # Imported here because it loads numpy, which a map does not need.
    from profharness.commands.explain.faster import largest_change, summarize_changes

    told, notes = summarize_changes(ways, count)
    largest = largest_change(ways)
    answer = (*page.answer[:1], *told, *page.answer[1:])
    if full:
        return replace(page, answer=answer)
    more: list[Block] = [*notes]
    if largest and (code := largest[1].advice.code):
        more += [Note(CODE_FOLLOWS, f"to run {largest[1].runs}"), Code(code)]
    # Caveats come last.
    caveats = (isinstance(each, Note) and each.level == "warning" for each in page.blocks)
    at = next(itertools.compress(itertools.count(), caveats), len(page.blocks))
    return replace(page, blocks=(*page.blocks[:at], *more, *page.blocks[at:]), answer=answer)


def _groups(platforms: Sequence[Platform]) -> list[list[Platform]]:
    """Return the platforms to show in a table each: the releases of a GPU, or the GPUs of a release."""
    if len({each.machine.torch for each in platforms}) == 1:
        return [[*platforms]]
    gpus = dict.fromkeys(each.gpu for each in platforms)
    return [[each for each in platforms if each.gpu == gpu] for gpu in gpus]


def _bisected(question: Question, name: str) -> Document:
    platforms = question.platforms
    if len(platforms) > 1:
        what = "release" if len({each.machine.torch for each in platforms}) > 1 else "GPU"
        raise UsageError(
            f"explain --bisect works with only one {what} at a time; name a single {what}"
        )
    asked = "" if question.asked == AUTO else f", {question.asked}"
    where = f"{platforms[0].text}, by rule{asked}" if platforms else "live"

    def choose(configs: Sequence[Config]) -> list[str]:
        nonlocal where
        if platforms:
            return choices_by_rule(configs, platforms[0], question.asked)
        hint(f"asking PyTorch about {counted(len(configs), 'config')}")
        answers = replace(question, configs=list(configs), backends=()).explain(advice=False)
        # The first answers contain the environment of PyTorch.
        if where == "live":
            require_answer(answers)
            where = environment_text(answers[0])
        return list(map(chosen, answers))

    bisections = bisect_all(question.configs, name, choose)
    return bisect_document(bisections, where=where)


def _measure(answers: Sequence[Explanation], question: Question) -> None:
    # Imported here because only --measure needs the code that runs workers.
    from profharness.jobs.into_store import capture_into_store

    options = CaptureOptions(protocol=Protocol(device=question.device), kind="explain")
    jobs = to_measure(answers)
    if not jobs:
        hint("--measure: there is no advised change to measure")
    for backends, configs in jobs.items():
        with capture_progress() as progress:
            capture_into_store(configs, backends, question.store, options, progress)


DECLARATION = declaration_of(explain)
