"""`profharness explain`: by rule, over releases, as a map, live on the CPU, and wrong input."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import profharness
from profharness.cli import find_command
from profharness.errors import CaptureError, UsageError
from profharness.run import read_run
from profharness.store import ingest_path

command = find_command("explain")

ROOT = Path(__file__).resolve().parents[2]
H200 = ROOT / "traces" / "h200-torch2.11"
A6000 = ("--torch", "2.8", "--gpu", "RTX A6000")
ON_H200 = ("--torch", "2.11", "--gpu", "H200")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "store.db"
    ingest_path(path, H200)
    return path


def explain(*args: object) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args], catch_exceptions=True)


def told(*args: object) -> str:
    result = explain(*args)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def rows(*args: object) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(told(*args, "--format", "json"))["rows"]
    return found


def plain(text: str) -> str:
    return " ".join(text.split())


def test_the_verdict_comes_first_then_the_table() -> None:
    lines = told("--config", "2,8,512,64,bf16,causal", *A6000).splitlines()
    assert lines[0] == "PyTorch 2.8 is predicted to run flash on an RTX A6000, its first choice."
    assert lines[1] == "efficient, cudnn and math could also run."
    table = lines[lines.index("") + 2 :]
    assert table[0].split()[:2] == ["backend", "verdict"]
    assert [line.split()[0] for line in table[1:5]] == ["flash", "efficient", "cudnn", "math"]


def test_all_reasons_are_told_in_the_order_in_which_pytorch_checks() -> None:
    (row,) = rows("--config", "2,8,512,100,fp32,mask=bool,dropout=0.1", *ON_H200)
    assert row["choice"] is None
    sides = {side["backend"]: side for side in row["backends"]}  # type: ignore[attr-defined]
    assert [reason["code"] for reason in sides["flash"]["reasons"]][:2] == ["mask", "dtype"]
    assert {reason["source"] for reason in sides["flash"]["reasons"]} == {"rule"}
    text = told("--config", "2,8,512,100,fp32,mask=bool", *ON_H200)
    (first,) = [line for line in text.splitlines() if line.startswith("flash ")]
    assert first.split()[:3] == ["flash", "refused", "mask"]
    assert plain(text).count("flash (attn_mask and fp32 are not supported)") == 1


def test_advice_has_code_that_is_python_and_was_asked_again() -> None:
    args = ("--config", "2,8,512,100,bf16", "--backend", "cudnn", *ON_H200)
    (row,) = rows(*args)
    sides = {side["backend"]: side["advice"] for side in row["backends"]}  # type: ignore[attr-defined]
    assert sides["flash"] == sides["efficient"] == []
    best = sides["cudnn"][0]
    assert (best["config"], best["verified"], best["choice"]) == (
        "b2-h8-s512-d104-bf16-scale=0.1",
        True,
        "cudnn",
    )
    compile(best["code"], "advice", "exec")
    assert f"```python\n{best['code']}\n```" in told(*args, "--format", "md")
    assert "Checked: cudnn accepts this. auto then runs cudnn." in plain(told(*args, "--full"))


def test_named_backends_limit_the_table_and_the_advice() -> None:
    """Bug: the table had all backends, and the advice also named cudnn and flex_attention."""
    text = told(
        "--config", "8,12,384,64,fp32,mask=bool,mask_shape=b1qk", "--backend", "flash", *ON_H200
    )
    table = text.partition("\nbackend")[2]
    assert not re.search(r"^(to run )?(efficient|cudnn|math|flex)", table, re.MULTILINE)
    lead = plain(text.partition("\n\n")[0])
    assert (
        "To run flash: if no sequence is padded, leave out attn_mask (pass is_causal=True" in lead
    )
    assert "flash takes 22.9 µs plus the time to prepare the inputs, instead of 163 µs" in lead
    assert "to run flash If the mask hides only padding: pack" in plain(table)


def test_releases_make_a_matrix_that_marks_where_the_choice_changes() -> None:
    args = ("--config", "2,8,512,64,bf16", "--torch", "2.5..2.15", "--gpu", "H100")
    out = told(*args)
    flips = [line.split()[1] for line in out.splitlines() if re.match(r"►\s+2\.\d+\.\d+\s", line)]
    assert flips == ["2.5.1", "2.11.0"]
    found = rows(*args)
    assert [row["predicted"] for row in found].count("cudnn") == 8
    assert [row["flips"] for row in found].index(True) == 1
    eleventh = next(row for row in found if row["environment"]["torch"] == "2.11.0")  # type: ignore[index]
    assert "choice flash → cudnn" in eleventh["changes"]  # type: ignore[operator]
    assert "cuDNN 91002 → 91900" in eleventh["changes"]  # type: ignore[operator]


def test_a_matrix_has_columns_of_the_named_backends_only() -> None:
    args = ("--config", "2,8,512,64,bf16", "--torch", "2.8,2.10", "--gpu", "A100")
    for backend, names in (
        ((), ["flash", "efficient", "cudnn", "math"]),
        (("math,flash",), ["math", "flash"]),
    ):
        out = told(*args, *(("--backend", *backend) if backend else ()))
        (head,) = [line for line in out.splitlines() if line.split()[:1] == ["torch"]]
        # Nothing changed between these releases, so there is no column for it.
        assert head.split() == ["torch", "predicted", "backend", *names]


def test_several_configs_make_a_map_with_a_legend_and_edges() -> None:
    args = ("--config", "2,8,{64:8192:*2},{64,80,96,100,128},fp16", *ON_H200)
    out = told(*args)
    assert re.search(r"^8192 +C +C +C +F +C$", out, re.MULTILINE)
    assert "legend  C cudnn, F flash" in out
    assert "head_dim 96 → 100: cudnn → flash at every seq" in out
    answer = json.loads(told(*args, "--format", "json"))
    assert len(answer["rows"]) == 40
    assert answer["maps"][0]["choices"][0] == ["cudnn", "cudnn", "cudnn", "flash", "cudnn"]
    assert told(*args, "--full").count("PyTorch 2.11 is predicted to run ") == 41


@pytest.mark.parametrize(
    ("config", "release", "text"),
    [
        ("1,1,1,64,bf16", "2.11", "seq_kv=1 is not supported"),
        ("1,1,1,64,bf16,seq_kv=64", "2.7", "seq_q=1 is not supported"),
        ("1,1,1,64,bf16,seq_kv=64,dropout=0.1", "2.11", "seq_q=1 with dropout is not supported"),
    ],
)
def test_a_refused_length_of_1_is_named(config: str, release: str, text: str) -> None:
    """Bug: the reason did not say whether the queries or the keys have this length."""
    assert text in " ".join(told("--config", config, "--gpu", "H100", "--torch", release).split())


def test_the_heading_of_a_bisection_has_the_config_that_the_user_gave() -> None:
    """Bug: the heading had the smallest head_dim, 1, for a config with 64."""
    text = told("--config", "2,8,512,64,fp16", "--bisect", "head_dim", *ON_H200)
    assert "b2-h8-s512-d64-fp16, head_dim varies" in text


def test_bisect_finds_the_exact_values() -> None:
    args = ("--config", "2,8,512,{120,136},fp16", "--bisect", "head_dim", *ON_H200)
    found = rows(*args)
    assert [(row["first"], row["last"], row["choice"]) for row in found] == [
        (120, 120, "cudnn"),
        (121, 127, "flash"),
        (128, 128, "cudnn"),
        (129, 135, "flash"),
        (136, 136, "cudnn"),
    ]
    assert "4 changes; all 17 values were checked" in plain(told(*args))


def test_bisect_says_which_changes_it_may_miss() -> None:
    """Bug: the changes were called exact although the choice between two values was assumed."""
    text = plain(told("--config", "2,8,512,64,fp16", "--bisect", "head_dim", *ON_H200))
    assert (
        "255 changes; 392 of 1,024 values were checked, including those on both sides of each "
        "change; between two checked values with the same choice, more changes are possible"
    ) in " ".join(text.split())


@pytest.mark.parametrize("release", ["2.1", "2.16", "2.9.2", "3.1.2", "9.9", "2.11,2.16"])
@pytest.mark.parametrize("gpu", ["H100", "MI300X", "cpu"])
def test_an_unknown_release_is_refused_and_the_known_ones_are_named(release: str, gpu: str) -> None:
    args = ("--config", "2,8,512,64,bf16", "--torch", release, "--gpu", gpu)
    error = CliRunner().invoke(command, args).exception
    assert isinstance(error, UsageError)
    assert "the dispatch rules of PyTorch" in str(error) and "are unknown" in str(error)
    known = {"2.1": "known releases: 2.5.0, 2.5.1", "2.9.2": "known releases: 2.9.0, 2.9.1"}
    newest = "2.14.1" if gpu == "MI300X" else "2.15.0"
    assert known.get(release, f"the newest known release is {newest}") in str(error)
    assert ("on AMD GPUs" in str(error)) == (gpu == "MI300X")


def test_a_range_answers_the_releases_that_are_known_and_names_the_others() -> None:
    args = ("--config", "2,8,512,64,bf16", "--gpu", "A100", "--torch")
    done = CliRunner().invoke(command, [*args, "2.5..2.16", "--format", "json"])
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    assert answer["unknown_releases"] == ["2.16.0"]
    assert [row["environment"]["torch"] for row in answer["rows"]][:2] == ["2.5.0", "2.5.1"]
    assert len(answer["rows"]) == 16
    assert "unknown" not in {row["predicted"] for row in answer["rows"]}
    assert "their dispatch rules are unknown: PyTorch 2.16.0" in done.stderr
    single = CliRunner().invoke(command, [*args, "2.15..2.16"])
    assert single.exit_code == 0
    assert (
        "PyTorch 2.15 is predicted to run flash on an A100" in single.stdout
        and "are unknown: PyTorch 2.16.0" in single.stderr
    )
    frame = profharness.explain("2,8,512,64,bf16", torch="2.15..2.17", gpu="A100")
    assert frame.attrs["unknown_releases"] == ["2.16.0", "2.17.0"]


def test_a_cu130_build_of_2_9_takes_cudnn_and_is_not_called_a_cu128_one() -> None:
    config = ("--config", "2,8,512,64,bf16", "--torch", "2.9", "--gpu", "H100")
    (row,) = rows(*config, "--cuda", "13.0")
    assert (row["predicted"], row["priority_order"][0]) == ("cudnn", "cudnn")  # type: ignore[index]
    assert row["environment"]["cudnn"] == 91300  # type: ignore[index]
    assert "12.8" not in str(row["caveats"])
    assert "for CUDA 13.0" in row["caveats"][0]  # type: ignore[index]


def test_what_is_missing_is_named_and_may_be_said() -> None:
    config = ("--config", "2,8,512,64,bf16", "--torch", "2.9", "--gpu", "H100", "--cuda", "12.6")
    (row,) = rows(*config)
    assert row["predicted"] == "unknown"
    text = str(row["caveats"])
    assert "compiled with (--cudnn-compiled VERSION)" in text
    assert "12.8" not in text and "reasons" not in text
    for version, choice in (("9.8.0", "flash"), ("9.10.2", "cudnn")):
        (row,) = rows(*config, "--cudnn-compiled", version)
        assert (row["predicted"], "cannot decide" in str(row["caveats"])) == (choice, False)
    frame = profharness.explain(
        "2,8,512,64,bf16", torch="2.9", gpu="H100", cuda="12.6", cudnn_compiled="9.8"
    )
    assert list(frame["predicted"]) == ["flash"]
    args = ("--config", "2,8,512,64,fp16,dropout=0.5", *ON_H200, "--cuda", "12.8")
    (row,) = rows(*args)
    (caveat,) = [each for each in row["caveats"] if "cannot determine" in each]  # type: ignore[attr-defined]
    assert "depends on cuDNN's version (--cudnn VERSION)" in caveat
    assert "it is unknown whether cudnn can compute this call (see its reasons)" in caveat


def test_by_rule_an_eligible_backend_that_is_not_chosen_has_the_code_that_names_it() -> None:
    (row,) = rows("--config", "2,8,512,64,bf16", *ON_H200)
    sides = {side["backend"]: side["advice"] for side in row["backends"]}  # type: ignore[attr-defined]
    assert sides["cudnn"] == []
    for name, member in (("flash", "FLASH_ATTENTION"), ("efficient", "EFFICIENT_ATTENTION")):
        (way,) = sides[name]
        assert f"sdpa_kernel([SDPBackend.{member}])" in way["code"]
        assert (way["verified"], way["choice"]) == (True, name)


HUGE = "60000,60000,60000,60000,fp32"  # too large for any memory: PyTorch cannot be asked about it


def test_nothing_answered_is_an_error_with_the_rules_still_told() -> None:
    result = explain("--config", HUGE, "--device", "cpu")
    assert isinstance(result.exception, CaptureError), result.output
    label = "b60000-h60000-s60000-d60000-fp32"
    assert f"querying PyTorch failed for {label}" in str(result.exception)
    assert "--timeout DURATION" in str(result.exception)
    assert "math" in plain(result.stdout)
    edges = ("--config", "60000,60000,{60000,60001},60000,fp32", "--bisect", "seq")
    result = explain(*edges, "--device", "cpu")  # two values, two processes
    assert isinstance(result.exception, CaptureError), result.output


def test_one_answer_of_several_is_no_error() -> None:
    args = ("--config", "1,2,64,64,fp32", "--config", HUGE)
    found = rows(*args, "--device", "cpu", "--full")
    assert [row["error"] is None for row in found] == [True, False]


def test_a_stored_run_is_a_witness_and_tells_the_gain(store: Path) -> None:
    args = ("--config", "2,8,512,64,fp16", *ON_H200, "--store", store)
    (row,) = rows(*args)
    assert (row["predicted"], row["observed"], row["agree"]) == ("cudnn", "cudnn", True)
    cells = {cell.backend: cell for cell in read_run(H200).cells[:6]}
    sides = {side["backend"]: side["advice"] for side in row["backends"]}  # type: ignore[attr-defined]
    medians = [statistics.median(cells[name].samples["graph"]) for name in ("auto", "flash")]
    assert sides["flash"][0]["gain"] == pytest.approx(medians[0] / medians[1])
    source = f"graph median in run {H200.name}"
    assert sides["flash"][0]["gain_source"] == source
    assert source in plain(told(*args, "--full")) and source in plain(
        told(*args, "--backend", "flash")
    )
    text = plain(told(*args))
    assert "flash and efficient are predicted to be slower." in text
    assert "--full also shows how to run flash and efficient." in text


def test_a_run_of_another_release_or_gpu_is_no_witness(store: Path) -> None:
    config = ("--config", "2,8,512,64,fp16", "--store", store)
    for place in (("--torch", "2.13", "--gpu", "H200"), ("--torch", "2.11", "--gpu", "A100")):
        (row,) = rows(*config, *place)
        assert row["observed"] is None
        assert row["agree"] is None


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--torch", "2.8", "--gpu", "H2000"), "close matches are H200"),
        (("--torch", "2.8", "--gpu", "warp"), "choose from|close matches"),
        (("--torch", "new", "--gpu", "H100"), "invalid PyTorch release"),
        (("--torch", "2.9..2.8", "--gpu", "H100"), "is empty"),
        (("--cudnn", "9.10.2"), "requires --torch or --gpu"),
        (("--cuda", "12.8"), "requires --torch or --gpu"),
        (("--cudnn-compiled", "9.8"), "--cudnn-compiled requires --torch or --gpu"),
        (("--torch", "2.8", "--gpu", "H100", "--cudnn-compiled", "old"), "invalid cuDNN version"),
        (("--torch", "2.16x", "--gpu", "H100"), "invalid PyTorch release"),
        (("--torch", "2.8", "--gpu", "H100", "--cudnn", "nine"), "invalid cuDNN version"),
        (("--torch", "2.8", "--gpu", "H100", "--cuda", "x"), "invalid CUDA version"),
        (("--torch", "2.8", "--gpu", "cpu", "--cudnn", "9.1"), "do not apply to a CPU"),
        (("--bisect", "dtype"), "is not a numeric property"),
        (("--bisect", "sequence"), "is not a property"),
        (("--bisect", "seq", "--torch", "2.8..2.10", "--gpu", "H100"), "one release"),
        (("--bisect", "seq", "--full"), "it cannot be combined with --measure or --full"),
        (("--measure", "--torch", "2.8", "--gpu", "H100"), "use one of them"),
        (("--device", "cpu", "--gpu", "H100"), "use --gpu cpu"),
        (("--backend", "warp"), "PyTorch's own backends"),
        (("--backend", "naive"), "PyTorch's own backends"),
    ],
)
def test_errors_name_a_remedy(args: tuple[str, ...], text: str) -> None:
    result = explain("--config", "2,8,512,64", *args)
    assert isinstance(result.exception, UsageError), result.output
    assert re.search(text, str(result.exception))
    assert result.stdout == ""


def test_without_a_config_or_a_gpu_it_says_what_is_missing() -> None:
    assert "no config given" in str(explain().exception)
    from profharness.environment import gpu_name

    if gpu_name() is None:
        text = " with --gpu, such as --gpu H100"
        for options in (("--torch", "2.8"), ("--engine", "vllm")):
            assert text in str(explain("--config", "2,8,512,64", *options).exception)


def test_an_answer_by_rule_imports_no_torch(tmp_path: Path) -> None:
    arguments = ["explain", "--config", "2,8,512,100,bf16", *ON_H200]
    code = (
        "import sys\nfrom profharness.cli import cli\n"
        f"cli.main({arguments!r}, standalone_mode=False)\n"
        "print([n for n in ('torch', 'pandas', 'sqlite_utils') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_atlas_tells_time_and_best_backend_of_one_config() -> None:
    (row,) = rows("--config", "1,16,1024,64,bf16", *ON_H200)
    told_of = row["prediction"]
    assert isinstance(told_of, dict)
    assert told_of["choice"] == row["predicted"]
    assert told_of["source"] in ("measured", "model", "floor")
    assert "auto is predicted to run cudnn in " in plain(
        told("--config", "1,16,1024,64,bf16", *ON_H200)
    )
    for place in (A6000, (*ON_H200, "--cudnn", "9.10.2")):
        (row,) = rows("--config", "1,16,1024,64,bf16", *place)
        assert row["prediction"] is None


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (("--gpu", "H200", "--torch", "2.12"), "this GPU has atlases for PyTorch 2.11"),
        ((*ON_H200, "--cudnn", "9.10.2"), "not for cuDNN 91002"),
        (A6000, ""),
    ],
)
def test_why_there_is_no_time_is_told_of_a_gpu_with_an_atlas(
    place: tuple[str, ...], said: str
) -> None:
    done = CliRunner().invoke(command, ["--config", "1,16,1024,64,bf16", *place])
    assert done.exit_code == 0
    told = " ".join(done.stdout.split())
    assert said in told if said else "No time can be predicted" not in told
    assert not done.stderr
    # Bug: JSON had no reason why `prediction` is null.
    (row,) = rows("--config", "1,16,1024,64,bf16", *place)
    assert said in " ".join(row["caveats"])


def test_live_on_the_cpu_with_the_gain_measured(tmp_path: Path) -> None:
    """Real processes: PyTorch is asked, the config and the advised one are captured."""
    args = ("--config", "1,2,128,64,dropout=0.1", "--device", "cpu", "--measure")
    (row,) = rows(*args, "--store", tmp_path / "store.db")
    assert (row["source"], row["choice"], row["predicted"]) == ("live", "math", "math")
    assert (row["observed"], row["agree"]) == ("math", True)
    sides = {side["backend"]: side for side in row["backends"]}  # type: ignore[attr-defined]
    assert sides["flash"]["reasons"][0]["source"] == "live"
    best = sides["flash"]["advice"][0]
    assert best["verified"]
    assert best["gain"] > 0


def test_live_edges_on_the_cpu() -> None:
    args = ("--config", "1,2,64,64,fp32", "--bisect", "seq_kv", "--device", "cpu")
    found = json.loads(told(*args, "--format", "json"))
    assert [row["choice"] for row in found["rows"]] == ["flash"]
    assert found["asked"][0]["possible"] == 65_536


def test_the_python_interface_gives_one_row_per_config_and_release() -> None:
    frame = profharness.explain("2,8,512,{64,100},bf16", torch="2.10..2.11", gpu="H100")
    assert list(frame["predicted"]) == ["flash", "cudnn", "flash", "flash"]
    assert list(frame["cudnn_reasons"]) == ["", "", "head_dim_multiple", "head_dim_multiple"]
    assert len(frame.attrs["answers"]) == 4
    with pytest.raises(UsageError, match="requires --torch or --gpu"):
        profharness.explain("2,8,512,64", cudnn="9.1")


def test_several_gpus_get_a_row_each() -> None:
    args = ("--config", "2,8,512,64,fp16", "--gpu", "H200,A100,MI300X")
    said = plain(told(*args, "--torch", "2.11"))
    assert (
        "PyTorch 2.11 is predicted to run cudnn on an H200 and flash on an A100 and an MI300X."
        in said
    )
    assert [row["environment"]["gpu"] for row in rows(*args)] == ["H200", "A100", "MI300X"]  # type: ignore[index]
    assert len({row["environment"]["torch"] for row in rows(*args)}) == 1  # type: ignore[index]
    both = plain(told(*args[:3], "H200,cpu", "--torch", "2.10..2.11"))
    assert "The backend predicted for an H200 changes at PyTorch 2.11 from flash to cudnn." in both
    assert "The backend predicted for the CPU is flash in both releases." in both
    several = plain(told("--config", "2,8,{64,100},64", "--gpu", "A100,MI300X", "--torch", "2.11"))
    assert "For both configs, the chosen backend is the same on all GPUs." in several


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--gpu", "H200,h200"), "are the same GPU; give only one name"),
        (("--gpu", "H200,"), "a GPU name is empty"),
        (("--gpu", "H200,H999"), "unknown GPU 'H999'; choose from V100, .*, MI355X; you can also"),
        (("--gpu", "MI3000"), "close matches are MI300X"),
        (
            ("--gpu", "H200,A100", "--bisect", "seq"),
            "explain --bisect works with only one GPU at a time; name a single GPU",
        ),
        (
            ("--gpu", "H200,A100", "--engine", "vllm"),
            "explain --engine predicts for one GPU; name only one GPU",
        ),
    ],
)
def test_gpus_are_checked(args: tuple[str, ...], text: str) -> None:
    error = explain("--config", "2,8,512,64", *args).exception
    assert isinstance(error, UsageError) and re.search(text, str(error)), error


def test_without_a_gpu_the_answer_of_the_cpu_says_so() -> None:
    from profharness.environment import gpu_name

    if gpu_name() is not None:
        pytest.skip("there is a GPU")
    done = explain("--config", "1,1,16,16")
    assert (
        "This machine has no GPU, so the answer applies to the CPU. Name a GPU with --gpu"
        in done.stderr
    )
    assert "no GPU" not in explain("--config", "1,1,16,16", "--device", "cpu").stderr
    error = explain("--config", "1,1,16,16", "--device", "cuda").exception
    assert isinstance(error, UsageError)
    assert str(error) == "this machine has no GPU; use --device cpu, or leave --device out"


@pytest.mark.parametrize("shape", ["b1qk", "hqk", "qk"])
def test_advice_to_leave_out_a_mask_leaves_out_its_shape(shape: str) -> None:
    """Bug: the changed config kept `mask_shape`, so explain ended in an error about a config that
    nobody had given.
    """
    config = f"8,12,384,64,fp32,mask=bool,mask_shape={shape},layout=bshd"
    words = [config, "--gpu", "H200", "--torch", "2.11", "--backend", "flash"]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "PyTorch 2.11 is predicted to run efficient" in done.output


def test_every_table_has_the_same_words_for_verdicts() -> None:
    """Bug: a table of several GPUs said `yes` and `no: head_dim_multiple` instead."""
    text = told("--config", "2,8,512,100,fp16", "--torch", "2.11", "--gpu", "H200,H100")
    assert "refused: head_dim_multiple" in text and "no: " not in text and " yes" not in text
    assert any(
        line.split()[1:4] == ["H200", "flash", "runs"]
        for line in [f". {each}" for each in text.splitlines()]
    )
