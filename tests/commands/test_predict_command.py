"""`profharness predict` by the packaged atlas: measured cells, floors, maps, formats and wrong input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import profharness
from profharness.atlas.data import Atlas, AtlasCell, build_atlas, write_atlas
from profharness.atlas.rows import PROFILER, against, predicted_rows
from profharness.cli import find_command
from profharness.commands.kernels.tables import FIELDS
from profharness.errors import GateError, UsageError

kernels = find_command("kernels")
command = find_command("predict")

RANGE = "2,8,{512,1024},{64,128},fp16"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without atlases of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture(scope="module")
def measured(packaged: Atlas) -> list[AtlasCell]:
    """A few cells from all over the atlas: `auto` that ran, and a backend that was refused."""
    cells = [packaged.cell(row) for row in range(0, len(packaged), 997)]
    ran = [cell for cell in cells if cell.backend == "auto" and cell.kernel_us]
    refused = [cell for cell in cells if cell.status == "refused" and cell.backend != "auto"]
    return [*ran[:4], *refused[:1]]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder for atlases of the user's own."""
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


def predict(*args: object) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args], catch_exceptions=True)


def told(*args: object) -> str:
    result = predict(*args)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def answer(*args: object) -> Mapping[str, Any]:
    return json.loads(told(*args, "--format", "json"))


def test_measured_cells_come_back_as_they_are(measured: list[AtlasCell]) -> None:
    assert len(measured) == 5
    arguments = [part for cell in measured for part in ("--config", cell.config.label)]
    found = {(row["config"], row["backend"]): row for row in answer(*arguments)["rows"]}
    for cell in measured:
        row = found[cell.config.label, cell.backend]
        assert (row["source"], row["status"]) == ("measured", cell.status)
        launches = [
            (each["kernel"], each["grid"], each["block"], each["registers_per_thread"],
             each["shared_bytes"], each["duration_ns"])
            for each in row["kernels"] or ()
        ]  # fmt: skip
        assert launches == [
            (each.kernel, each.grid and [*each.grid], each.block and [*each.block], each.registers,
             each.shared_bytes, round(each.time_us * 1e3))
            for each in cell.launches
        ]  # fmt: skip
        if cell.status == "ok":
            assert (row["kernel_ns"], row["choice"]) == (round(cell.kernel_us * 1e3), cell.choice)
            assert row["regret"] is not None
        else:
            assert row["kernel_ns"] is None
            assert row["reasons"]


@pytest.mark.parametrize("name", ["predict", "explain"])
def test_a_missing_atlas_is_told_below_the_tables(name: str) -> None:
    """Bug: stderr said so before the answer, where `layers` has a note of the document."""
    words = ["2,8,512,64", "--gpu", "H200", "--torch", "2.9"]
    result = CliRunner().invoke(find_command(name), words)
    assert result.exit_code == 0, (result.output, result.exception)
    why = "because there is no atlas for H200 with PyTorch 2.9"
    assert why not in result.stderr
    assert why in " ".join(result.stdout[result.stdout.rindex("math") :].split())


def test_one_config_has_its_verdict_backends_and_kernels(measured: list[AtlasCell]) -> None:
    cell = measured[0]
    text = told("--config", cell.config.label, "--gpu", "h200")
    heading = f"\n{cell.config.label}  measured on H200, torch 2.11.0, cuDNN 91900\n"
    assert heading in text
    full = told("--config", cell.config.label, "--gpu", "h200", "--full")
    assert "  measured on NVIDIA H200, torch 2.11.0+cu130, cuDNN 91900, driver " in full
    assert text.startswith(f"auto runs {cell.choice} in {cell.kernel_us:.2f} µs (measured); ")
    assert "measured µs/call" in text and "(measured) " not in text.split(heading)[1]
    assert "Kernels of a call" in text


def test_a_forced_backend_is_predicted_to_run() -> None:
    """Bugs: `-` for each forced backend, and `kernel µs/call` for several GPUs."""
    text = told("2,8,4096,64,fp16", "--gpu", "H200")
    for backend in ("flash", "efficient", "cudnn", "math"):
        assert re.search(rf"^{backend} +{backend} +\d", text, re.MULTILINE)
    several = told("2,8,4096,64,fp16", "--gpu", "H200,A100")
    assert "kernel µs/call" not in " ".join(several.split())


def test_refusals_follow_the_table_of_backends_and_alike_kernels_share_a_row() -> None:
    """Bugs: refusals looked like rows of the kernel table, which listed each launch by itself."""
    text = told("2,8,512,100,fp16", "--gpu", "H200")
    backends, kernels = text.split("Kernels of a call\n")
    assert "efficient, cudnn  refused: head_dim=100 is not a multiple of 8\n" in backends
    rows = {line.split()[0]: line.split()[1:] for line in backends.splitlines() if line}
    assert rows["efficient"] == rows["cudnn"] == ["-", "refused", "-", "-", "-"]
    assert rows["auto"][-2:] == ["=", "flash"] and rows["flash"][-1] == "1.00x"
    assert "refused" not in kernels
    assert kernels.count("direct_copy") == 1
    # the rows are those of `kernels`, with the same columns
    command = [sys.executable, "-m", "profharness", "kernels", "2,8,512,100,fp16"]
    whole = subprocess.run(
        [*command, "--gpu", "H200", "--backend", "auto"], capture_output=True, text=True, check=True
    ).stdout
    for line in kernels.strip().splitlines():
        assert " ".join(line.split()) in " ".join(whole.split())


def test_the_gpu_that_is_meant_is_told_where_none_is_named(measured: list[AtlasCell]) -> None:
    result = predict("--config", measured[0].config.label)
    assert "The prediction is for H200, torch 2.11.0, cuDNN 91900." in result.stderr
    assert "answering" not in predict("--config", measured[0].config.label, "--gpu", "H200").stderr


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (("--gpu", "A100"), "no atlas for A100 with PyTorch"),
        (("--gpu", "H200", "--torch", "2.8"), "this GPU has atlases for PyTorch 2.11"),
        (
            ("--gpu", "H200 NVL", "--torch", "2.11"),
            "there is no atlas for H200 NVL with PyTorch 2.11; there are atlases for H200",
        ),
    ],
)
def test_without_an_atlas_there_is_a_floor_and_no_time(place: tuple[str, ...], reason: str) -> None:
    document = answer("--config", "2,8,512,64,bf16", *place)
    assert reason in "".join(document["caveats"])
    assert document["atlas"] is None
    for row in document["rows"]:
        assert row["source"] == "floor"
        assert row["kernel_ns"] is row["regret"] is row["best"] is row["kernels"] is None
    assert document["rows"][0]["choice"] in ("flash", "cudnn")
    assert document["rows"][0]["low_ns"] > 0


def test_several_configs_make_maps_of_choice_time_and_loss(tmp_path: Path) -> None:
    document = answer("--config", RANGE, "--gpu", "H200")
    assert document["schema"] == "profharness.predict/1"
    assert document["atlas"]["cells"] > 40_000
    (drawn,) = document["maps"]
    assert (drawn["rows"], drawn["columns"]) == ("seq", "head_dim")
    for key in ("choices", "kernel_ns", "regret", "best", "source"):
        assert [len(line) for line in drawn[key]] == [2, 2], key
    assert len(document["rows"]) == 4 * 5
    text = told("--config", RANGE, "--gpu", "H200")
    assert "\nPredicted kernel time\n" in text
    assert "\nPredicted backend: " in text
    assert "legend" in text
    told("--config", RANGE, "--gpu", "H200", "-o", tmp_path / "maps.html")
    assert "What auto chooses" in (tmp_path / "maps.html").read_text()


def test_a_gpu_that_no_table_has_answers_by_its_own_atlas(
    packaged: Atlas, measured: list[AtlasCell], own: Path
) -> None:
    machine = replace(packaged.machine, gpu="NVIDIA RTX 3060 Laptop GPU", capability="8.6")
    write_atlas(build_atlas(machine, measured), own / "laptop.npz")
    label = measured[0].config.label
    for gpu in ("RTX 3060 Laptop GPU", "H200"):
        document = answer("--config", label, "--gpu", gpu, "--atlas", own)
        assert document["rows"][0]["source"] == "measured"
        assert document["rows"][0]["gpu"].endswith(gpu)
    error = predict("--config", label, "--atlas", own).exception
    assert "no GPU was given, and there are atlases for H200, RTX" in str(error)


def test_a_call_measured_on_auto_counts_for_what_it_took(
    packaged: Atlas, measured: list[AtlasCell], own: Path
) -> None:
    machine = replace(packaged.machine, driver="1.2")
    write_atlas(build_atlas(machine, measured[:1]), own / "one.npz")
    cell = measured[0]
    where = ("--gpu", "H200", "--driver", "1.2", "--atlas", own)
    rows = answer("--config", cell.config.label, *where)["rows"]
    same = [row for row in rows if row["backend"] in ("auto", cell.choice)]
    assert [row["source"] for row in same] == ["measured", "measured"]
    assert same[0]["kernel_ns"] == same[1]["kernel_ns"]
    assert {row["source"] for row in rows if row not in same} != {"measured"}


def test_own_cells_come_first_and_the_package_answers_the_rest(
    packaged: Atlas, measured: list[AtlasCell], own: Path
) -> None:
    known = measured[0]
    new = replace(known, config=replace(known.config, batch=7, seq_len_q=77), kernel_us=123.0)
    assert packaged.find(new.config, new.backend) is None
    write_atlas(build_atlas(packaged.machine, [new]), own / "one.npz")
    asked = ("--gpu", "H200", "--atlas", own)
    document = answer("--config", new.config.label, *asked)
    rows = {row["backend"]: row for row in document["rows"]}
    assert (rows["auto"]["source"], rows["auto"]["kernel_ns"]) == ("measured", 123_000)
    assert "model" in {row["source"] for row in rows.values()}
    assert document["atlas"]["own_cells"] == 1
    assert document["atlas"]["cells"] == len(packaged)
    package = answer("--config", known.config.label, *asked)
    assert package["rows"][0]["source"] == "measured"
    assert package["rows"][0]["kernel_ns"] == round(1e3 * (known.kernel_us or 0))


def test_the_choice_is_judged_by_the_versions_of_the_atlas(
    packaged: Atlas, measured: list[AtlasCell], own: Path
) -> None:
    config = ("--config", "2,8,512,64,fp16", "--gpu", "H200")
    old = replace(packaged.machine, cudnn=8900, driver="1.2")
    write_atlas(build_atlas(old, measured[:1]), own / "old.npz")
    choices = [
        answer(*config, *more)["rows"][0]["choice"]
        for more in ((), ("--driver", "1.2", "--atlas", own))
    ]
    assert choices == ["cudnn", "flash"]


def test_own_cells_that_contradict_the_package_are_told(
    packaged: Atlas, measured: list[AtlasCell], own: Path
) -> None:
    known = measured[0]
    slow = replace(known, kernel_us=2 * (known.kernel_us or 0))
    write_atlas(build_atlas(packaged.machine, [slow]), own / "one.npz")
    said = told("--config", known.config.label, "--gpu", "H200", "--atlas", own)
    assert "disagree on 1 cells" in " ".join(said.split())  # paths may be long
    assert f"{known.config.label} auto: times" in said


def test_atlas_of_another_driver_is_not_mixed(
    packaged: Atlas, measured: list[AtlasCell], own: Path
) -> None:
    known = measured[0]
    other = replace(packaged.machine, driver="999.1")
    slow = replace(known, kernel_us=50 * (known.kernel_us or 0))
    write_atlas(build_atlas(other, [slow]), own / "one.npz")
    asked = ("--config", known.config.label, "--gpu", "H200", "--atlas", own)
    assert "driver 999.1 (user, 1 cells)" in "".join(answer(*asked)["caveats"])
    assert f"driver {packaged.machine.driver}" in predict(*asked, "--full").stdout
    mine = answer(*asked, "--driver", "999.1")
    assert (mine["atlas"]["driver"], mine["atlas"]["cells"]) == ("999.1", 1)
    assert mine["rows"][0]["kernel_ns"] == round(1e3 * (slow.kernel_us or 0))
    assert "model" not in {row["source"] for row in mine["rows"] if row["status"] == "ok"}
    none = answer(*asked, "--driver", "1")
    assert "and driver 1; this GPU has atlases" in "".join(none["caveats"])


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "no config given; name a config"),
        (("--config", "2,8,512,64", "--gpu", "H300"), "close matches are H200"),
        (("--config", "2,8,512,64", "--gpu", "cpu"), "explain --gpu cpu"),
        (("--config", "2,8,512,64", "--torch", "new"), "invalid PyTorch release"),
        (("--config", "2,8,512,64", "--backend", "xformers"), "choose from auto, flash"),
        (
            ("--config", "2,8,512,64", "--torch", "9.9"),
            "PyTorch 9.9.0 are unknown; the newest known release is 2.15.0",
        ),
        (("--config", "2,8,512,64", "--gpu", "H200,H200"), "are the same GPU; give only one name"),
        (("--config", "2,8,512"), "config '2,8,512'"),
    ],
)
def test_errors_name_a_remedy(args: tuple[str, ...], text: str) -> None:
    error = predict(*args).exception
    assert isinstance(error, UsageError)
    assert text in str(error)


def test_several_gpus_are_compared() -> None:
    args = ("--config", "2,8,512,64", "--gpu", "H200,A100,MI300X", "--torch", "2.11")
    said = predict(*args).stdout
    assert re.search(r"^On an H200, auto is predicted to run cudnn in", said, re.MULTILINE)
    assert re.search(r"^A100 +2\.11\.0 +flash +floor", said, re.MULTILINE)
    document = answer(*args)
    assert [row["gpu"] for row in document["rows"] if row["backend"] == "auto"] == [
        "H200",
        "A100",
        "MI300X",
    ]
    assert [bool(each["atlas"]) for each in document["places"]] == [True, False, False]
    many = predict("--config", "2,8,{512:2048:*2},64", *args[2:]).stdout
    assert many.count("Predicted backend: ") == 3
    frame = profharness.predict("2,8,512,64", gpu="H200,A100", torch="2.11")
    assert list(frame["gpu"].unique()) == ["H200", "A100"]


def test_the_python_interface_gives_one_row_per_config_and_backend(
    measured: list[AtlasCell],
) -> None:
    cell = measured[0]
    frame = profharness.predict(cell.config, gpu="H200", torch="2.11")
    assert list(frame.backend) == ["auto", "flash", "efficient", "cudnn", "math"]
    first = frame.iloc[0]
    assert (first.source, first.choice) == ("measured", cell.choice)
    assert first.kernel_ns == round((cell.kernel_us or 0) * 1e3)
    assert frame.attrs["place"].startswith("NVIDIA H200")
    with pytest.raises(UsageError, match="no config given; name a config"):
        profharness.predict(None)


def test_an_answer_loads_no_torch_pandas_or_store(tmp_path: Path) -> None:
    arguments = ["predict", "--config", "2,8,512,64,bf16", "--gpu", "H200", "--format", "json"]
    code = (
        "import sys\nfrom profharness.cli import cli\n"
        f"cli.main({arguments!r}, standalone_mode=False)\n"
        "print([n for n in ('torch', 'pandas', 'scipy', 'sqlite_utils', 'altair') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_kernels_of_a_gpu_are_rows_as_of_a_store(measured: list[AtlasCell], tmp_path: Path) -> None:
    cell = measured[0]
    none = str(tmp_path / "none.db")
    arguments = ["--config", cell.config.label, "--gpu", "H200", "--store", none]
    result = CliRunner().invoke(kernels, [*arguments, "--format", "json"])
    assert result.exit_code == 0, (result.output, result.exception)
    document = json.loads(result.stdout)
    own = [row for row in document["rows"] if row["backend"] == "auto"]
    assert list(own[0]) == list(FIELDS)
    assert {row["source"] for row in own} == {"measured"}
    assert {row["profiler"] for row in own} == {PROFILER}
    assert sum(row["launches"] for row in own) == len(cell.launches)
    assert sum(row["total_ns"] for row in own) == pytest.approx(
        1e3 * (cell.kernel_us or 0), rel=0.01
    )
    table = CliRunner().invoke(kernels, arguments).stdout
    assert f"\n{cell.config.label}  H200, torch 2.11.0, cuDNN 91900, from its atlas" in table
    assert "measured µs/call" in table and "\nauto  " in table
    assert "mismatch" not in table
    gate = CliRunner().invoke(kernels, [*arguments, "--backend", "auto", "--expect", "math"])
    assert isinstance(gate.exception, GateError) == (cell.choice != "math")
    assert not (tmp_path / "none.db").exists()
    for more in (["--run", "latest"], ["--steps"], ["--profiler", "torch"]):
        assert isinstance(CliRunner().invoke(kernels, [*arguments, *more]).exception, UsageError)


def test_run_is_compared_with_the_atlas_of_its_machine(measured: list[AtlasCell]) -> None:
    configs = [cell.config for cell in measured if cell.status == "ok"]
    rows, cells, _, doubt = predicted_rows(configs, ["auto"], "H200", "2.11")
    assert doubt == ""
    environment = {"device_type": "cuda", "gpu": "NVIDIA H200", "torch": "2.11.0+cu130"}
    found = against(cells, rows, environment)
    assert [(row.config, row.source) for row in found] == [
        (config.label, "measured") for config in configs
    ]
    assert all(row.same_kernels and abs(row.ratio - 1) < 0.01 for row in found)
    for other in ({"gpu": "NVIDIA A100-SXM4-40GB"}, {"device_type": "cpu"}, {"torch": "2.8.0"}):
        assert against(cells, rows, environment | other) == []


def test_the_line_on_a_written_file_names_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "maps.csv"
    result = predict("--config", RANGE, "--gpu", "H200", "-o", path)
    assert result.exit_code == 0, result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"wrote {path}: NVIDIA H200, torch 2.")


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_csv_tells_on_stderr_why_no_time_is_predicted(format: str) -> None:
    """Bug: the reason was only in the JSON."""
    asked = ("--config", "2,8,512,64", "--gpu", "H100", "--torch", "2.9", "--format")
    result = predict(*asked, format)
    assert result.exit_code == 0, result.output
    (reason,) = json.loads(predict(*asked, "json").stdout)["caveats"]
    assert reason.startswith("no time can be predicted, because there is no atlas for H100")
    assert result.stderr.splitlines() == [f"{reason[0].upper()}{reason[1:]}."]
    assert "no atlas" not in result.stdout


TIMES_OF_A_CALL = ("kernel_ns", "low_ns", "high_ns", "regret")


@pytest.mark.parametrize("layout", ["bshd", "broadcast_batch"])
def test_a_layout_without_times_has_those_of_contiguous_tensors(layout: str) -> None:
    """Bug: the time was unknown, although `layers --gpu` printed one for the same call."""
    plain = answer("--config", "2,8,512,64", "--gpu", "H200")["rows"]
    rows = answer("--config", f"2,8,512,64,layout={layout}", "--gpu", "H200")["rows"]
    for row, other in zip(rows, plain, strict=True):
        assert [row[key] for key in TIMES_OF_A_CALL] == [other[key] for key in TIMES_OF_A_CALL]
        assert row["timed_as"] == other["config"] and other["timed_as"] is None
    text = " ".join(told("--config", f"2,8,512,64,layout={layout}", "--gpu", "H200").split())
    assert text.count("the times are for contiguous tensors.") == 1


def test_a_refusal_has_the_words_of_explain() -> None:
    """Bug: predict showed PyTorch's message, which begins `both fused kernels require`."""
    text = " ".join(told("--config", "b1-h32-kv8-sq1-skv4096-d128-bf16", "--gpu", "H200").split())
    assert "num_heads=32 with kv_heads=8 is not supported" in text
    assert "fused kernels require" not in text


def test_no_backend_that_refuses_a_layout_has_a_time() -> None:
    config = "2,8,512,64,kv_heads=2,layout=bshd"
    rows = {row["backend"]: row for row in answer("--config", config, "--gpu", "H200")["rows"]}
    refused = rows["efficient"]
    assert refused["status"] == "refused" and refused["kernels"] is None
    assert refused["kernel_ns"] is refused["timed_as"] is None
    assert rows["flash"]["timed_as"] == "b2-h8-kv2-s512-d64-fp16"


@pytest.mark.parametrize("layout", ["strided_last", "offset1"])
def test_a_layout_that_changes_the_kernels_has_no_time(layout: str) -> None:
    rows = answer("--config", f"2,8,512,64,layout={layout}", "--gpu", "H200")["rows"]
    assert all(row["kernel_ns"] is row["timed_as"] is None for row in rows)
    assert rows[0]["outside"] == f"the atlas has no configs with layout={layout}"


def test_a_scale_does_not_change_the_time() -> None:
    plain = answer("--config", "2,8,512,64", "--gpu", "H200")["rows"]
    rows = answer("--config", "2,8,512,64,scale=0.5", "--gpu", "H200")["rows"]
    assert [row["kernel_ns"] for row in rows] == [row["kernel_ns"] for row in plain]
    assert all(row["timed_as"] is None for row in rows)
