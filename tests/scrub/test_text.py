"""Texts keep names of software; everything else is replaced."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profharness.recording.observe import ELSEWHERE, RECORD_THREAD
from profharness.rows import SHARED_CORES
from profharness.scrub.allowed import Scrubber

NAMES = Path(__file__).parents[1] / "data" / "kernel_names.tsv.gz"
# name, text, and the part of it that must not stay
FORMS = [tuple(row) for row in json.loads(Path(__file__).with_name("forms.json").read_text())]
AROUND = (
    "{}", "step 3: {} done", "a\n{}\nb", "({})", '{{"x": "{}"}}', "k={}", "[{}]", "aten::add {}",
    "void at::native::{}<float>(int)",
)  # fmt: skip
HARMLESS = [
    "b2h8s512d64-fp16/auto",
    "b2-h8-s512-d64-fp16-mask=bool",
    "b1h32kv8sq1s4096d128-bf16/flash",
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "memory bandwidth (GB/s)",
    "autograd::engine::evaluate_function: MmBackward0",
    "void at::native::(anonymous namespace)::f<c10::Half, 4>(c10::BFloat16*)",
    "aten::add, seq = 12345678, op_id = 9876543, sizes = [[2, 8, 512, 64], []]",
    "torch/nn/modules/module.py(1773): _call_impl",
    "nn.Module: LlamaDecoderLayer_11",
    "model.layers.0.self_attn.q_proj",
    "ProfilerStep#16",
    "Optimizer.step#AdamW.step",
    "Memcpy HtoD (Pageable -> Device)",
    "Torch-Compiled Region: 0/0_1",
    "triton_per_fused_native_layer_norm_0",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_kernel",
    "smsp__average_warps_issue_stalled_drain_per_issue_active.ratio",
    "NVIDIA H200",
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB.",
    "Memory Efficient attention has been runtime disabled.",
    # stored in run folders
    SHARED_CORES,
    ELSEWHERE,
    RECORD_THREAD,
    "",
    "12",
    "removed_12",
]


@pytest.mark.parametrize(
    ("text", "secret"), [pytest.param(text, secret, id=name) for name, text, secret in FORMS]
)
def test_private_forms_are_removed(text: str, secret: str) -> None:
    for around in AROUND:
        scrubber = Scrubber()
        assert secret not in scrubber.clean(around.format(text)), around
        assert scrubber.changes


@pytest.mark.parametrize("text", HARMLESS)
def test_names_of_software_stay(text: str) -> None:
    scrubber = Scrubber()
    assert scrubber.clean(text) == text
    assert not scrubber.changes


def test_systems_stay_and_what_tells_a_host_goes() -> None:
    known = {"os": "Ubuntu 24.04", "os_kernel": "6.18.44", "cpu_cores": 16, "cpu_count": 32}
    assert Scrubber().value(known) == known
    private = {"os": "Acme Farm Linux 3", "os_kernel": "6.8.0-1057-acme"}
    cleaned = Scrubber().value(private)
    assert not any("cme" in text for text in cleaned.values())


def test_every_known_kernel_name_stays() -> None:
    lines = gzip.decompress(NAMES.read_bytes()).decode().splitlines()
    names = [line.split("\t")[0] for line in lines]
    assert len(names) > 1000
    assert [name for name in names if Scrubber().clean(name) != name] == []


PIECES = st.sampled_from([text for _, text, _ in FORMS] + HARMLESS + ["/", "=", ":", " ", '"'])


@given(st.lists(PIECES | st.text(max_size=8), max_size=5).map(" ".join))
def test_a_clean_text_stays_as_it_is(text: str) -> None:
    clean = Scrubber().clean(text)
    again = Scrubber()
    assert again.clean(clean) == clean
    assert not again.changes


@given(st.binary(min_size=20, max_size=60), st.sampled_from(AROUND))
def test_random_keys_are_removed_in_every_encoding(key: bytes, around: str) -> None:
    encodings = (base64.b64encode, base64.urlsafe_b64encode, base64.b32encode, base64.b16encode)
    for encode in encodings:
        text = encode(bytes(byte ^ 0x5A for byte in key) + b"\xfe\x9d\xb7").decode()
        if len(set(text)) > 8:
            assert text not in Scrubber().clean(around.format(text))


@given(st.from_regex(r"[0-9]{6,20}", fullmatch=True), st.sampled_from(["{}", "call {}", "id {}."]))
def test_long_numbers_are_removed(number: str, around: str) -> None:
    assert number not in Scrubber().clean(around.format(number))


@given(st.text(alphabet=st.characters(min_codepoint=0x80), min_size=1, max_size=20))
def test_words_in_other_scripts_are_removed(text: str) -> None:
    assert not set(text) & set(Scrubber().clean(f"step {text}"))


def test_the_same_text_gets_the_same_number() -> None:
    scrubber = Scrubber()
    assert scrubber.clean("run wombat") == "run removed_1"
    assert scrubber.clean("wombat") == "removed_1"
    assert scrubber.clean("void acme::k<int>()") == "void removed_2"
    assert scrubber.clean("/home/x/mine.py:attention") == "removed_3:attention"


def test_members_with_unknown_keys_are_removed() -> None:
    scrubber = Scrubber()
    value = {"gpu": "NVIDIA H200", "serial_wombat": 1654922009988, "wombat": {"calls": 1}}
    assert scrubber.value(value) == {"gpu": "NVIDIA H200"}
    assert {kind for _, kind, _ in scrubber.changes} == {"key"}


def test_hashes_stay_under_the_keys_of_hashes_only() -> None:
    commit = "ab195668fef5485c99d5cea017ac9bd57a5c5ab9"
    kept = {"torch_git": commit, "backend_commit": {"naive": f"{commit}, changed"}}
    assert Scrubber().value(kept) == kept
    assert Scrubber().value({"message": commit}) == {"message": "removed_1"}
