"""Queries of PyTorch in real processes: reasons, choices, and dying processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waiting import HANG, PATIENCE_S

from profharness.attention.config import LAYOUTS, MASKS, Config, parse_config
from profharness.attention.dispatch.advice import BackendAnswer, blockers, rule_oracle
from profharness.attention.dispatch.by_rule import Explanation
from profharness.attention.dispatch.machine import from_config, machine_of, with_flags
from profharness.attention.dispatch.predict import judge
from profharness.commands import explain as explain_command
from profharness.commands.explain import explain_live
from profharness.recording import probe
from profharness.recording.probe import ask_argv
from profharness.run import PLAN_FILE, Plan, Protocol

CASES = {
    "1,4,16,32": [],
    "1,4,16,32,bf16,causal,seq_kv=9,kv_heads=2,mask=bool_2d,layout=bshd,bwd,deterministic": [],
    "1,4,16,32,dropout=0.1": ["dropout"],
    "1,4,16,32,mask=float_grad": ["mask_grad"],
    "1,4,16,32,head_dim_v=16": ["head_dim"],
    "1,4,16,32,layout=strided_last": ["last_dim_stride"],
    "1,4,16,32,mask=float,layout=strided_last": ["last_dim_stride"],
    "1,4,16,32,dropout=0.1,mask=float_grad,head_dim_v=16,layout=strided_last,kv_heads=1,causal": [
        "dropout", "mask_grad", "head_dim", "last_dim_stride",
    ],
    "65536,4096,16384,64,dropout=0.1": ["dropout"],
}  # fmt: skip

# The same program, except that one config ends it in the way given by argv[3].
DEADLY = f"""
import os, sys, time
from pathlib import Path
from profharness.recording.worker import ask
from profharness.recording.worker.program import run_program

real = ask.LiveDispatch.answer

def answer(self, cell):
    if cell.config.batch == 3:
        if sys.argv[2] == "abort": os.abort()
        {HANG}
    return real(self, cell)

ask.LiveDispatch.answer = answer
sys.argv.append(ask.NO_ADVICE)
run_program(Path(sys.argv[1]), "profharness.recording.worker.ask")
"""

# The same program in a process with flash disabled.
SWITCHED_OFF = """
import sys, torch
from pathlib import Path
from profharness.recording.worker.program import run_program

torch.backends.cuda.enable_flash_sdp(False)
run_program(Path(sys.argv[1]), "profharness.recording.worker.ask")
"""

# Prints each op that a query runs, except allocations and views.
OPS = """
import sys, torch
from profharness.attention.config import expand_configs
from profharness.recording.worker.environment import collect
from profharness.run import Cell
from profharness.recording.worker.ask import LiveDispatch

dispatch = LiveDispatch("cpu", collect("cpu"), True)
HARMLESS = {"empty", "slice", "as_strided", "view", "expand", "transpose", "_fused_sdp_choice"}
with torch.profiler.profile() as seen:
    for config in expand_configs(
        "2,4,16,20,{fp32,bf16},kv_heads=2,dropout={0,0.1},mask={none,bool,float_grad},"
        "layout={strided_last,offset1,broadcast_batch,bshd},bwd,deterministic"
    ):
        assert dispatch.answer(Cell("c1", config, "auto")).error is None
ops = {event.name.removeprefix("aten::") for event in seen.events() if "aten::" in event.name}
assert "_fused_sdp_choice" in ops
print(*(ops - HARMLESS))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, Explanation]:
    """Query all cases in one process."""
    heard: list[tuple[int, int, str]] = []
    configs = [parse_config(text) for text in CASES]
    found = explain_live(configs, device="cpu", progress=lambda *told: heard.append(told))
    labels = [config.resolve("cpu").label for config in configs]
    assert [each.config for each in found] == labels
    assert heard == [(index, len(labels), each) for index, each in enumerate(labels, 1)]
    return dict(zip(CASES, found, strict=True))


def side(explanation: Explanation, backend: str) -> BackendAnswer:
    return next(each for each in explanation.backends if each.backend == backend)


@pytest.mark.parametrize("text", list(CASES))
def test_all_reasons_are_returned_with_pytorchs_own_first(
    answers: dict[str, Explanation], text: str
) -> None:
    flash = side(answers[text], "flash")
    assert [reason.code for reason in flash.reasons][:1] == CASES[text][:1]
    assert {reason.code for reason in flash.reasons} == set(CASES[text])
    assert flash.eligible is (not CASES[text])


def test_reason_has_pytorchs_text_or_is_marked_as_inferred(
    answers: dict[str, Explanation],
) -> None:
    (text,) = [text for text in CASES if text.count("=") == 5]
    by_code = {reason.code: reason for reason in side(answers[text], "flash").reasons}
    assert by_code["dropout"].message == "Both fused kernels do not support non-zero dropout."
    assert by_code["mask_grad"].source == "inferred"
    assert "Query.stride(-1): 2" in by_code["last_dim_stride"].message
    assert "Value.size(-1): 16" in by_code["head_dim"].message
    assert {r.source for code, r in by_code.items() if code != "mask_grad"} == {"live"}


@pytest.mark.parametrize("mask", ["", ",mask=float"])
def test_stride_text_of_the_rules_is_pytorchs_own(
    answers: dict[str, Explanation], mask: str
) -> None:
    text = f"1,4,16,32{mask},layout=strided_last"
    (live,) = side(answers[text], "flash").reasons
    machine = machine_of(answers[text].environment)
    (rule,) = judge("flash", from_config(parse_config(text), "cpu"), machine).reasons
    assert live.source == "live"
    assert rule.message == live.message


def test_choice_order_and_surroundings(answers: dict[str, Explanation]) -> None:
    for text in list(CASES)[:-1]:
        answer = answers[text]
        expected = "math" if CASES[text] else "flash"
        if "mask=float_grad" in text and "causal" in text:
            expected = "none"  # math, which raises
        assert (answer.choice, answer.predicted, answer.agree) == (expected, expected, True)
        assert (answer.source, answer.error) == ("live", None)
        assert answer.priority_order == ("flash", "math")
        assert answer.environment["flags"]["flash"] is True
        assert answer.environment["torch"].startswith("2.")
        assert "cpu" not in answer.environment and "python" not in answer.environment
        assert any("torch.compile" in caveat for caveat in answer.caveats)
        assert not any("cuDNN" in caveat for caveat in answer.caveats)


def test_backends_that_the_device_lacks_are_refused(
    answers: dict[str, Explanation],
) -> None:
    answer = answers["1,4,16,32,dropout=0.1"]
    for backend in ("efficient", "cudnn"):
        told = side(answer, backend)
        assert (told.eligible, told.advice) == (False, ())
        assert [(reason.code, reason.source) for reason in told.reasons] == [
            ("not_on_cuda", "inferred")
        ]
    assert side(answer, "math") == BackendAnswer("math", True)


def test_advice_is_verified_by_another_query(answers: dict[str, Explanation]) -> None:
    (way,) = side(answers["1,4,16,32,head_dim_v=16"], "flash").advice
    assert (way.config, way.verified, way.choice) == ("b1-h4-s16-d32-fp32", True, "flash")
    assert "F.pad" in way.code
    assert side(answers["1,4,16,32"], "flash").advice == ()


def test_inputs_too_large_are_an_error_but_rules_still_answer(
    answers: dict[str, Explanation],
) -> None:
    answer = answers["65536,4096,16384,64,dropout=0.1"]
    assert answer.error is not None
    assert "do not fit into memory" in answer.error
    assert (answer.choice, answer.agree, answer.predicted) == (None, None, "math")
    assert {reason.source for reason in side(answer, "flash").reasons} == {"rule"}


def test_math_with_causal_and_mask_is_refused_with_advice() -> None:
    configs = [parse_config(f"2,4,16,32,causal,mask={mask}") for mask in ("bool", "float_grad")]
    runs, raises = explain_live(configs, device="cpu")
    assert (runs.choice, runs.predicted, runs.agree) == ("flash", "flash", True)
    assert (raises.choice, raises.predicted, raises.agree) == ("none", "none", True)
    for answer in (runs, raises):
        math = side(answer, "math")
        (reason,) = math.reasons
        assert (math.eligible, reason.code) == (False, "causal_mask")
        assert "attn_mask should not be set when is_causal=True" in reason.message
    assert side(runs, "math").advice == ()  # math is not advised if flash runs
    (way,) = side(raises, "math").advice
    assert (way.verified, way.steps) == (True, ("triangle in the mask",))


def random_config(rng: random.Random) -> Config:
    heads = rng.choice([2, 4, 6])
    head_dim = rng.choice([1, 8, 16, 33, 64])
    value_dim = rng.choice([None, None, 8, 24])
    return Config(
        batch=rng.choice([1, 2, 3]),
        num_heads=heads,
        num_kv_heads=rng.choice([heads, heads, 1, 2]),
        seq_len_q=rng.choice([1, 7, 64]),
        seq_len_kv=rng.choice([1, 7, 64]),
        head_dim=head_dim,
        head_dim_v=None if value_dim == head_dim else value_dim,
        dtype=rng.choice(["fp32", "bf16", "fp16"]),
        causal=rng.random() < 0.4,
        mask=rng.choice(["none", *MASKS]),
        dropout=rng.choice([0.0, 0.0, 0.25]),
        layout=rng.choice(LAYOUTS),
        bwd=rng.random() < 0.4,
        deterministic=rng.random() < 0.2,
    )


def test_live_reasons_equal_those_of_the_rules() -> None:
    rng = random.Random(20)
    configs = [random_config(rng) for _ in range(200)]
    answers = explain_live(configs, device="cpu", advice=False)
    refused = 0
    for config, answer in zip(configs, answers, strict=True):
        environment = answer.environment | {"device_type": "cpu"}
        rules = rule_oracle(machine_of(environment), "cpu", with_flags(environment))
        expected = [reason for _, reason in blockers(config, "flash", rules)]
        flash = side(answer, "flash")
        # the end of this text depends on the release
        got = [(each.code, each.message.split("Got Query.stride")[0]) for each in flash.reasons]
        wanted = [(each.code, each.message.split("Got Query.stride")[0]) for each in expected]
        assert got == wanted, config
        assert answer.agree is True, config
        refused += not flash.eligible
    assert 50 < refused < 190


@pytest.mark.parametrize(("how", "words"), [("abort", "SIGABRT"), ("hang", "no answer")])
@pytest.mark.usefixtures("hanging")
def test_config_that_kills_its_process_costs_no_other_config(
    how: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def argv(folder: Path, *, advice: bool) -> list[str]:  # noqa: ARG001 - the same call
        return [sys.executable, "-c", DEADLY, str(folder), how]

    monkeypatch.setattr(probe, "ask_argv", argv)
    config = parse_config("1,2,8,16,dropout=0.5")
    configs = [replace(config, batch=batch) for batch in (2, 3, 4)]
    before, lost, after = explain_live(configs, device="cpu", timeout_s=PATIENCE_S)
    assert (before.choice, before.error) == ("math", None)
    assert (after.choice, after.error) == ("math", None)
    assert lost.choice is None
    assert words in str(lost.error)
    assert [reason.code for reason in side(lost, "flash").reasons] == ["dropout"]


def test_disabled_backend_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def argv(folder: Path, *, advice: bool) -> list[str]:  # noqa: ARG001 - the same call
        return [sys.executable, "-c", SWITCHED_OFF, str(folder)]

    monkeypatch.setattr(probe, "ask_argv", argv)
    (answer,) = explain_live([parse_config("1,2,8,16,dropout=0.5")], device="cpu")
    assert (answer.choice, answer.predicted) == ("math", "math")
    assert answer.environment["flags"]["flash"] is False
    flash = side(answer, "flash")
    assert [reason.code for reason in flash.reasons] == ["runtime_disabled"]
    assert ["enable_flash_sdp(True)" in way.code for way in flash.advice] == [True]


def doubts(environment: dict[str, Any], *backends: BackendAnswer) -> str:
    return " ".join(explain_command._caveats(environment, backends))


def test_doubts_are_reported_if_they_apply() -> None:
    cuda = {"device_type": "cuda", "sdp_cudnn": True}
    assert "legacy sdp_kernel" in doubts(cuda)
    assert "set_priority=True" in doubts(cuda)
    assert "legacy sdp_kernel" not in doubts(cuda | {"sdp_cudnn": False})
    assert "FA3 is activated" in doubts(cuda | {"flash_attention_impl": "FA3"})
    assert "activated" not in doubts(cuda | {"flash_attention_impl": None})
    assert "can_use_flash_attention returns False" in doubts(
        cuda, BackendAnswer("flash", True, can_use=False)
    )
    assert "differently" not in doubts(cuda, BackendAnswer("flash", True, can_use=True))


def test_no_configs_give_no_answers() -> None:
    assert explain_live([]) == []


def test_queries_launch_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", OPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == []


def test_program_ends_with_its_parent(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    plan = Plan((), Protocol(), (), gone.pid)
    (tmp_path / PLAN_FILE).write_bytes(msgspec.json.encode(plan))
    done = subprocess.run(ask_argv(tmp_path, advice=True), timeout=PATIENCE_S)
    assert done.returncode == 71


TAP = r"""
import os, json
from profharness.recording.worker.ask import StderrTap

tap, texts = StderrTap(), []
for _ in range(2):
    with tap.into(texts):
        os.write(2, b"[W1121 10:00:00.123 sdp_utils.cpp:98] Warning: cuDNN SDPA is not "
                    b"deterministic. (function operator())\n")
        os.write(2, b"Warning: head_dim should be a multiple of 8 (function check_cudnn_tensor_shapes)\n")
        os.write(2, b"something else\n")
print(json.dumps(texts))
"""


def test_messages_of_cpp_on_stderr_are_captured_and_the_rest_passed_on() -> None:
    done = subprocess.run([sys.executable, "-c", TAP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = ["cuDNN SDPA is not deterministic.", "head_dim should be a multiple of 8"]
    assert msgspec.json.decode(done.stdout) == told * 2
    assert done.stderr.split() == ["something", "else"] * 2


MACHINES: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({"torch": "2.11.0+cu130", "torch_cuda": "13.0", "capability": "9.0", "cudnn": 91900},
     ((2, 11, 0), (9, 0), 91900, 91900, None)),
    ({"torch": "2.11.0a0+git123", "torch_cuda": "13.0"}, ((0, 0, 0), (0, 0), None, None, None)),
    ({"torch": "2.10.0", "env": {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}},
     ((2, 10, 0), (0, 0), None, None, False)),
    ({"torch": "2.9.1", "env": {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}},
     ((2, 9, 1), (0, 0), None, None, None)),
    ({"torch": "2.9.1", "torch_cuda": "12.8", "env": {"TORCH_CUDNN_SDPA_PREFERRED": "0"}},
     ((2, 9, 1), (0, 0), None, 90800, False)),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "expected"), MACHINES)
def test_machine_is_derived_from_an_environment(
    environment: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    found = machine_of(environment)
    told = (found.torch, found.capability, found.cudnn, found.cudnn_compiled)
    assert (*told, found.cudnn_preferred) == expected


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_no_process_is_left(answers: dict[str, Explanation]) -> None:
    assert answers
    assert children() == []


def children() -> list[bytes]:
    """Return the command lines of this process's children that query PyTorch, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[1]
            line = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == str(os.getpid()) and b"profharness.recording.worker.ask" in line:
            found.append(line)
    return found
