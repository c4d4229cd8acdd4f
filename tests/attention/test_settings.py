"""Sets and orders of SDPA's backends: their names, the rules' predictions, and PyTorch on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from profharness.attention.backends import find_backend
from profharness.attention.config import (
    SdpaSetting,
    parse_config,
    pytorch_chooses,
    sdpa_setting,
    setting_name,
)
from profharness.attention.dispatch.by_rule import explain_by_rule, named_platforms
from profharness.attention.dispatch.predict import predict_cell
from profharness.cli import cli
from profharness.commands.explain import explain_live
from profharness.commands.repro import repro_script
from profharness.errors import UsageError
from profharness.measurements.agreement import disagreements, with_predictions
from profharness.store import open_store

# On a CPU, PyTorch tries flash, then math, regardless of the order.
ON_A_CPU = {
    "flash+math": "flash",
    "math>flash": "flash",
    "cudnn>math": "math",
    "flash+cudnn": "flash",
    "efficient+cudnn": "none",
}
H200 = {
    "torch": "2.11.0+cu130",
    "torch_cuda": "13.0",
    "cudnn": 91900,
    "capability": "9.0",
    "device_type": "cuda",
}
PLAIN, MASKED = "2,8,512,64,bf16", "2,8,512,64,bf16,mask=bool"


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("math", SdpaSetting(("math",))),
        ("all-disabled", SdpaSetting(("cudnn",))),
        ("math+flash", SdpaSetting(("flash", "math"))),
        ("math>flash", SdpaSetting(("math", "flash"), ordered=True)),
        ("cudnn-then-flash-then-math", SdpaSetting(("cudnn", "flash", "math"), ordered=True)),
        ("cudnn>flash-then-math", SdpaSetting(("cudnn", "flash", "math"), ordered=True)),
        ("auto", None),
        ("flash-attn", None),
        ("naive", None),
        ("first-then-second", None),
        ("c++/math.py:flash", None),
    ],
)
def test_a_name_permits_backends(text: str, setting: SdpaSetting | None) -> None:
    assert sdpa_setting(text) == setting
    if setting is not None and text != "all-disabled":
        assert sdpa_setting(setting.name) == setting
        assert setting_name(text) == find_backend(text).name == setting.name
    assert pytorch_chooses(text) == (text == "auto" or (setting is not None and text != "math"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("flash+naive", "contains 'naive'"),
        ("auto+flash", "contains 'auto'"),
        ("flash+", "contains ''"),
        ("flash+flash", "twice"),
        ("flash+math>cudnn", "mixes"),
    ],
)
def test_invalid_sets_are_errors(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        sdpa_setting(text)


@pytest.mark.parametrize(
    ("config", "backend", "release", "choice"),
    [
        (PLAIN, "auto", "2.11.0+cu130", "cudnn"),
        (PLAIN, "flash+math", "2.11.0+cu130", "flash"),
        (PLAIN, "flash+efficient+cudnn+math", "2.11.0+cu130", "cudnn"),
        (PLAIN, "math>flash", "2.11.0+cu130", "math"),
        (PLAIN, "efficient>cudnn", "2.11.0+cu130", "efficient"),
        (MASKED, "flash>efficient>math", "2.11.0+cu130", "efficient"),
        (MASKED, "flash+math", "2.11.0+cu130", "math"),
        (MASKED, "flash", "2.11.0+cu130", "refused"),
        ("2,8,512,64,fp32,mask=bool", "flash>cudnn", "2.11.0+cu130", "none"),
        # 2.5 tries flash first and has no option to change that
        (PLAIN, "flash+math", "2.5.1+cu124", "flash"),
        (PLAIN, "math>flash", "2.5.1+cu124", None),
        (PLAIN, "math>flash", "2.6.0+cu124", "math"),
    ],
)
def test_rules_restrict_by_a_set_and_reorder_by_an_order(
    config: str, backend: str, release: str, choice: str | None
) -> None:
    environment = H200 | {"torch": release}
    assert predict_cell(parse_config(config), backend, environment) == choice


def test_pytorch_and_the_rules_agree_on_the_cpu() -> None:
    config, name = parse_config("1,2,64,32,fp32"), "math>flash"
    (answer,) = explain_live([config], device="cpu", advice=False, asked=name)
    assert (answer.asked, answer.choice, answer.predicted) == (name, "flash", "flash")
    assert answer.priority_order == ("flash", "math")
    assert any("keeps its default order (flash, then math)" in text for text in answer.caveats)
    states = {side.backend: side.eligible for side in answer.backends}
    assert states == {"flash": True, "math": True, "efficient": False, "cudnn": False}


def test_captured_cells_have_names_times_and_ops(tmp_path: Path) -> None:
    places = ("--store", str(tmp_path / "s.db"))
    quick = ("--device", "cpu", "--samples", "2", "--iterations", "1", "--warmup", "0")
    names = "math+flash,math-then-flash,cudnn>math,efficient+cudnn,flash+math"
    cells_wanted = ("--config", "1,1,16,16", "--backend", names, "--out", str(tmp_path / "runs"))
    done = CliRunner().invoke(cli, ["capture", *places, *cells_wanted, *quick])
    assert done.exit_code == 0, done.output
    with open_store(tmp_path / "s.db") as store:
        cells = with_predictions(store, store.cells("latest"))
        kernels = store.kernels("latest")
    assert {cell.backend: cell.status for cell in cells} == {
        "flash+math": "ok",
        "math>flash": "ok",
        "cudnn>math": "ok",
        "efficient+cudnn": "refused",
    }
    for cell in cells:
        assert cell.predicted == ON_A_CPU[cell.backend]
        assert not disagreements(cell, [row for row in kernels if row.cell == cell.cell])
    for backend in ("math+flash", "cudnn-then-math"):
        shown = CliRunner().invoke(
            cli, ["kernels", *places, "--backend", backend, "--format", "json"]
        )
        assert {row["backend"] for row in json.loads(shown.stdout)["rows"]} == {
            setting_name(backend)
        }
    compared = CliRunner().invoke(cli, ["diff", *places, "math+flash", "latest:cudnn-then-math"])
    assert "flash+math → " in compared.stdout and "cudnn>math" in compared.stdout


def test_explain_answers_for_a_setting() -> None:
    (h100,) = named_platforms("2.11", "H100")
    answer = explain_by_rule(parse_config(MASKED), h100, asked="flash+math")
    assert (answer.predicted, answer.asked) == ("math", "flash+math")
    advised = {side.backend: side.advice for side in answer.backends if side.advice}
    assert list(advised) == ["flash"]
    assert "SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]" in advised["flash"][0].code
    ordered = explain_by_rule(parse_config(MASKED), h100, asked="flash>math")
    (way, *_) = next(side.advice for side in ordered.backends if side.advice)
    assert way.code.index("_fused_sdp_choice") < way.code.index("set_priority=True")
    assert any("Make one call before" in text for text in ordered.caveats)
    (old,) = named_platforms("2.5", "H100")
    early = explain_by_rule(parse_config(PLAIN), old, asked="cudnn>flash")
    assert early.predicted == "unknown"
    assert "join the backends with +" in str(early.error)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("--backend", "flash+math"),
            "With flash+math, PyTorch 2.11 is predicted to run flash on an H100.",
        ),
        (
            ("--backend", "math-then-flash"),
            "With math>flash, PyTorch 2.11 is predicted to run math on an H100",
        ),
        (("--backend", "flash+math", "--torch", "2.5..2.6"), "H100, flash+math"),
        (
            ("--backend", "math>flash", "--torch", "2.5..2.6"),
            "before 2.6 cannot set a backend order",
        ),
        (("--backend", "flash+math,cudnn>math"), "one setting at a time"),
    ],
)
def test_explain_at_the_command_line(arguments: tuple[str, ...], told: str) -> None:
    place = () if "--torch" in arguments else ("--torch", "2.11")
    done = CliRunner().invoke(
        cli, ["explain", "--config", PLAIN, "--gpu", "H100", *place, *arguments]
    )
    assert told in " ".join((done.output + str(done.exception)).split())


def test_a_script_makes_a_choice_before_it_sets_the_order() -> None:
    script = repro_script(parse_config(PLAIN), "cudnn-then-flash")
    kernel = (
        "sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)"
    )
    assert kernel in script
    assert script.index("torch._fused_sdp_choice(probe") < script.index(kernel)
    compile(script, "repro.py", "exec")
    without = repro_script(parse_config(PLAIN), "flash+math")
    assert "set_priority" not in without
