"""The rules: what is private is found and replaced, what belongs to traces is left alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profharness.scrub.rules import RULES, SECRET, may_hold, may_hold_bytes
from profharness.scrub.text import REMOVED, Cleaner, machine_names, private_names

NAMES = Path(__file__).parents[1] / "data" / "kernel_names.tsv.gz"
CLEANER = Cleaner(frozenset({"blade17", "user7"}))

PRIVATE = [
    ("path", "cannot open /home/user7/run/x.py", "cannot open <path>"),
    ("path", "/srv/jobs/train.py(12): forward", "<path>(12): forward"),
    ("path", "see '/data/my models/a.pt' there", "see '<path>' there"),
    ("path", "gcc -I/opt/secret/include", "gcc -I<path>"),
    ("path", "at /root", "at <path>"),
    ("path", "in ~/notes/a.txt", "in <path>"),
    ("path", "file:///srv/a/b", "<path>"),
    ("path", r"C:\Users\user7\a.py failed", "<path> failed"),
    ("path", "/usr/lib/python3.11/site-packages/torch/nn/f.py(9): g", "torch/nn/f.py(9): g"),
    ("environment variable", "SECRET_TOKEN=abc,x", "<variable>,x"),
    ("environment variable", 'PATH="/a b/c" run', "<variable> run"),
    ("host or user name", "on blade17 by user7", "on <name> by <name>"),
    ("IP address", "peer 10.1.22.3 gone", "peer <address> gone"),
    ("IP address", "peer fe80::1ff:fe23:4567:890a gone", "peer <address> gone"),
    ("MAC address", "02:42:ac:11:00:02", "<address>"),
    ("uuid", "GPU-eda911fc-8e65-9cf4-1e73-c51d311ac2df", "<uuid>"),
    ("bus address", "at 00000000:3B:00.0", "at <bus>"),
    ("bus address", "at 0000:3b:00.0", "at <bus>"),
    ("mail address", "ask someone@example.org", "ask <mail>"),
    ("address", "http://build.intern:8080/x?y", "<url>"),
    ("command line", "running python3 -u train.py --lr 3", "running <command>"),
    ("command line", "torchrun --nproc 8 -m my.job", "<command>"),
    ("address", "https://bob:pw1@github.com/x", "<url>"),
    ("secret", "token=ghp_0123456789abcdefABCDEF0123456789abcd", "token=<secret>"),
    ("secret", "with ghp_0123456789abcdefABCDEF0123456789abcd.", "with <secret>."),
    ("secret", "github_pat_11ABCDEFG0abcdefghijklmnop", "<secret>"),
    ("secret", "HF_TOKEN: hf_abcdefghijKLMNOPqrst", "HF_TOKEN: <secret>"),
    ("secret", "log in (hf_abcdefghijKLMNOPqrst)", "log in (<secret>)"),
    ("secret", "sk-proj-abcDEF0123456789abcd", "<secret>"),
    ("secret", "sk-abcdefghijklmnopqrstuvwxyz", "<secret>"),
    ("secret", "id AKIAIOSFODNN7EXAMPLE", "id <secret>"),
    ("secret", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln-_9", "<secret>"),
    ("secret", "Authorization: Bearer abc.DEF-123", "Authorization: <secret>"),
    ("secret", "authorization: Basic dXNlcjpwdw==", "authorization: <secret>"),
    ("secret", "curl, bearer abcdef123456", "curl, bearer <secret>"),
    ("secret", "password=hunter2, lr=3", "password=<secret>, lr=3"),
    ("secret", "passwd: 12345", "passwd: <secret>"),
    ("secret", '{"api_key": "a b", "x": 1}', '{"api_key": "<secret>", "x": 1}'),
    ("secret", r"{\"client_secret\":\"ab9\"}", r"{\"client_secret\":\"<secret>\"}"),
    ("secret", "MY_KEY: q9", "MY_KEY: <secret>"),
    ("secret", "x --auth-token q9 y", "x --auth-token <secret> y"),
    ("host or user name", "blade17_eth0", "<name>_eth0"),
]
HARMLESS = [
    "b2h8s512d64-fp16/auto",
    "b2-h8-s512-d64-fp16-mask=bool",
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "memory bandwidth (GB/s)",
    "autograd::engine::evaluate_function: MmBackward0",
    "void at::native::(anonymous namespace)::f<c10::Half, 4>(c10::BFloat16*)",
    "https://pytorch.org/docs/stable/x.html",
    "nvidia-cudnn-cu13==9.19.0.56 is version 9.19.0.56, of 127.0.0.1",
    "2026-11-21T11:14:43+00:00",
    "20261121-151544-59c7",
    "3 / 4, a/b, n/a, 1/2/3",
    "x == y, M==N",
    "max_token=128, token: 5, next_token == 7",
    "key: [8, 64], key=value, cache_key=3, hf_attention, sk-learn, tokens: many",
    "token: Optional, std::token::next, secretary=x",
    '{"token": "", "key": 1, "password": null}',
    "1 of /2.13.0/2.14.1",
]


@pytest.mark.parametrize(("kind", "text", "clean"), PRIVATE)
def test_what_is_private_is_found_and_replaced(kind: str, text: str, clean: str) -> None:
    assert kind in {match.kind for match in CLEANER.find(text)}
    assert CLEANER.clean(text) == clean


@pytest.mark.parametrize("text", HARMLESS)
def test_what_traces_say_is_left_alone(text: str) -> None:
    assert CLEANER.clean(text) == text


def test_no_kernel_name_is_private() -> None:
    names = gzip.decompress(NAMES.read_bytes()).decode().splitlines()
    assert len(names) > 1000
    kernels = [line.split("\t")[0] for line in names]
    assert [name for name in kernels if CLEANER.clean(name) != name] == []


PIECES = st.sampled_from(
    [*(text for _, text, _ in PRIVATE), *HARMLESS, "/", "//", "=", ":", " ", "<path>", "-I", '"']
)


@given(st.lists(PIECES | st.text(max_size=8), max_size=6).map("".join))
def test_what_is_clean_stays_so(text: str) -> None:
    clean = CLEANER.clean(text)
    assert list(CLEANER.find(clean)) == [] or clean == REMOVED
    assert CLEANER.clean(clean) == clean


@given(st.lists(PIECES | st.text(max_size=8), max_size=6).map("".join))
def test_a_gate_opens_wherever_its_rule_matches(text: str) -> None:
    for rule in RULES:
        for match in rule.pattern.finditer(text):
            if rule.replace(match) is not None:
                assert rule.gate.search(text), (rule.kind, match[0])
                if rule.kind == SECRET and text.isascii():
                    assert may_hold(text) and may_hold_bytes(text.encode()), match[0]


def test_common_names_are_not_looked_for() -> None:
    assert private_names(["root", "vm", "localhost", "17"]) == frozenset()
    assert private_names(["blade17.intern"]) == {"blade17.intern", "blade17"}
    assert all(len(name) > 2 for name in machine_names())


def test_commits_of_backends_stay_and_a_key_beside_them_goes() -> None:
    commit = "ab195668fef5485c99d5cea017ac9bd57a5c5ab9"
    environment = {
        "backend_commit": {"naive": commit, "tiled": f"{commit}, changed"},
        "backend_keys": {"naive": commit},
    }
    cleaned = CLEANER.clean_json(environment)
    assert cleaned["backend_commit"] == environment["backend_commit"]
    assert cleaned["backend_keys"] == {"naive": "<secret>"}
    text = json.dumps(environment)
    assert [match.text for match in CLEANER.find(text)] == ["<secret>"]
    assert CLEANER.clean(json.dumps(cleaned)) == json.dumps(cleaned)
