"""Parse GPU names, releases and cuDNN versions in common spellings."""

from __future__ import annotations

import pytest

from profharness.attention.config import parse_config
from profharness.attention.dispatch.machine import (
    OTHER_BUILDS,
    RELEASES,
    Machine,
    build_of,
    machine_for,
    machine_of,
    parse_cudnn,
    parse_release,
    parse_releases,
    skipped_releases,
)
from profharness.attention.dispatch.predict import predict_cell
from profharness.devices import (
    GPUS,
    context_text,
    find_gpu,
    platform_text,
    short_device_name,
    short_device_names,
    with_article,
)
from profharness.errors import UsageError


@pytest.mark.parametrize(
    ("text", "capability", "sm_count"),
    [
        ("rtx a6000", (8, 6), 84),
        ("NVIDIA RTX A6000", (8, 6), 84),
        ("H100 SXM", (9, 0), 132),
        ("h100-pcie", (9, 0), 114),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 108),
        ("NVIDIA GeForce RTX 4090", (8, 9), 128),
        ("NVIDIA A100-PCIE-40GB", (8, 0), 108),
        ("NVIDIA H100 PCIe", (9, 0), 114),
        ("NVIDIA B300 SXM6 AC", (10, 3), None),
        ("Tesla T4", (7, 5), 40),
        ("l40 s", (8, 9), 142),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188),
        ("sm90", (9, 0), None),
        ("SM_120", (12, 0), None),
        ("9.0", (9, 0), None),
        ("12.1", (12, 1), None),
        ("sm_90a", (9, 0), None),
    ],
)
def test_a_gpu_is_found(text: str, capability: tuple[int, int], sm_count: int | None) -> None:
    gpu = find_gpu(text)
    assert (gpu.capability, gpu.sm_count) == (capability, sm_count)


def test_every_gpu_of_the_table_is_found_by_its_name() -> None:
    for gpu in GPUS:
        for text in (gpu.name, gpu.name.lower(), gpu.name.replace(" ", ""), f"NVIDIA {gpu.name}"):
            assert find_gpu(text) is gpu


@pytest.mark.parametrize(
    ("text", "near"), [("H1000", "H100"), ("A6001", "RTX A6000"), ("MI300X", "")]
)
def test_an_unknown_gpu_gets_similar_names(text: str, near: str) -> None:
    with pytest.raises(UsageError) as raised:
        find_gpu(text)
    assert str(raised.value).startswith(f"unknown GPU {text!r}; ")
    assert near in str(raised.value)
    assert "sm90" in str(raised.value)


def test_releases() -> None:
    assert parse_release("2.9") == (2, 9, 1)
    assert parse_release("2.5") == (2, 5, 1)
    assert parse_release("2.5.0") == (2, 5, 0)
    assert parse_release("2.11.0+cu130") == (2, 11, 0)
    assert parse_releases("2.5..2.15") == sorted(RELEASES)
    assert parse_releases("2.5.1 .. 2.7") == [(2, 5, 1), (2, 6, 0), (2, 7, 0), (2, 7, 1)]
    assert parse_releases("2.13,2.8") == [(2, 8, 0), (2, 13, 0)]
    for text, error in (
        ("2.9..2.8", "is empty"),
        ("2.16..2.18", r"2\.16\.0, 2\.18\.0 are unknown; the newest known release is 2\.15\.0"),
    ):
        with pytest.raises(UsageError, match=error):
            parse_releases(text)
    for text in ("", "two", "2", "2.x", f"2.{'9' * 5000}"):
        with pytest.raises(UsageError, match="invalid PyTorch release"):
            parse_release(text)
    with pytest.raises(UsageError, match="invalid cuDNN version"):
        parse_cudnn(f"9.{'9' * 5000}")


@pytest.mark.parametrize(
    ("text", "known", "unknown"),
    [
        ("2.15..2.18", [(2, 15, 0)], [(2, 16, 0), (2, 17, 0), (2, 18, 0)]),
        ("2.15..3.1", [(2, 15, 0)], [(3, 1, 0)]),
        ("2.8.0..2.8.5", [(2, 8, 0)], [(2, 8, 5)]),
        ("2.8..2.9,2.15", [(2, 8, 0), (2, 9, 0), (2, 9, 1), (2, 15, 0)], []),
    ],
)
def test_a_range_has_known_and_unknown_releases(
    text: str, known: list[tuple[int, ...]], unknown: list[tuple[int, ...]]
) -> None:
    assert (parse_releases(text), skipped_releases(text)) == (known, unknown)


@pytest.mark.parametrize("text", ["2.1", "2.4.1", "1.13", "2.0..2.15", "2.8,2.4", "2.8,2.16"])
def test_unknown_releases_are_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"unknown; (known releases: 2\.5\.0|the newest known release is 2)"
    ):
        parse_releases(text)


def test_the_wheel_fills_the_machine() -> None:
    assert machine_for("H200", "2.11") == Machine((2, 11, 0), (9, 0), 91900, "13.0", 91900)
    assert machine_for("H200", "2.11", "9.20.0.48").cudnn == 92000
    assert not machine_for("H100", "2.4.1").known
    assert (machine_for("H100", "2.16").known, machine_for("H100", "2.16").cudnn) == (False, None)


def test_a_build_for_another_cuda_has_its_known_versions() -> None:
    built = machine_for("H100", "2.9", cuda="13.0")
    assert (built.cuda, built.cudnn, built.cudnn_compiled) == ("13.0", 91300, 90900)
    assert build_of((2, 9, 1), "13.0.2") == OTHER_BUILDS[2, 9, 1][0]
    other = machine_for("H100", "2.9", cuda="12.6")
    assert (other.cuda, other.cudnn, other.cudnn_compiled) == ("12.6", None, None)
    said = machine_for("H100", "2.9", "9.10.2", "12.6", "9.8.0")
    assert said == Machine((2, 9, 1), (9, 0), 91002, "12.6", 90800)
    assert machine_for("H100", "2.16", cuda="13.0").cuda == "13.0"
    told = {"torch": "2.9.1+cu130", "torch_cuda": "13.0", "capability": "9.0", "cudnn": 91300}
    assert machine_of(told) == built


def test_cudnn_versions() -> None:
    assert [parse_cudnn(text) for text in ("9.19.0", "9.1.0.70", 91900, "91900", "9.26")] == [
        91900, 90100, 91900, 91900, 92600
    ]  # fmt: skip
    assert [parse_cudnn(text) for text in ("8.9.2.26", "8.5.0", 8902)] == [8902, 8500, 8902]
    with pytest.raises(UsageError, match=r"write, for example, 9\.19\.0 or 91900"):
        parse_cudnn("nine")


@pytest.mark.parametrize(
    "key", ["torch", "torch_cuda", "cudnn", "capability", "device_type", "env"]
)
@pytest.mark.parametrize("value", ["x", 5, 1.5, True, [1], {"a": 1}, None])
def test_values_of_a_damaged_environment_are_unknown(key: str, value: object) -> None:
    environment = {
        "torch": "2.11.0+cu130",
        "torch_cuda": "13.0",
        "cudnn": 91900,
        "capability": "9.0",
        "device_type": "cuda",
        key: value,
    }
    machine = machine_of(environment)
    assert isinstance(machine.cuda, str | None) and isinstance(machine.cudnn, int | None)
    predict_cell(parse_config("2,8,512,64,fp16"), "auto", environment)


@pytest.mark.parametrize(
    ("name", "spoken"),
    [
        ("NVIDIA H100 80GB HBM3", "an H100"),
        ("NVIDIA H200", "an H200"),
        ("NVIDIA H200 NVL", "an H200 NVL"),  # slower than an H200
        ("NVIDIA B200", "a B200"),
        ("NVIDIA GeForce GTX 970", "a GeForce GTX 970"),  # in no table
        ("NVIDIA H100 MIG 1g.10gb", "an H100 MIG 1g.10gb"),
        ("AMD Instinct MI300X VF", "an MI300X"),
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", "an Intel Xeon Platinum 8480C"),
        ("AMD EPYC 9654 96-Core Processor", "an AMD EPYC 9654"),
        ("Neoverse-N1", "a Neoverse-N1"),
        ("x86_64", "an x86_64"),
        ("11th Gen Intel(R) Core(TM) i7-1165G7 @ 2.80GHz", "an 11th Gen Intel Core i7-1165G7"),
    ],
)
def test_devices_have_short_names(name: str, spoken: str) -> None:
    assert with_article(name) == spoken
    assert short_device_name(name) == spoken.split(" ", 1)[1]


def test_variants_with_equal_short_names_keep_their_names() -> None:
    variants = "NVIDIA H100 80GB HBM3", "NVIDIA H100"
    assert short_device_names(variants) == {name: name for name in variants}
    assert short_device_names(variants[:1]) == {variants[0]: "H100"}


def test_an_environment_is_described_in_one_order() -> None:
    environment = {
        "driver": "580.1",
        "cudnn": 91900,
        "torch": "2.11.0+cu130",
        "gpu": "NVIDIA H200",
        "device_type": "cuda",
    }
    assert context_text(environment, "live") == "H200, torch 2.11.0, cuDNN 91900, live"
    assert context_text(environment, full=True) == (
        "NVIDIA H200, torch 2.11.0+cu130, cuDNN 91900, driver 580.1"
    )
    assert platform_text(environment) == ("PyTorch 2.11", "an H200")
    assert context_text({"device_type": "cpu", "torch": "2.9.1"}) == "CPU, torch 2.9.1"
    assert platform_text({"device_type": "cpu", "torch": "2.9.1"}) == ("PyTorch 2.9.1", "the CPU")
