"""The config grammar: accepted texts, labels, and errors that name their token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profharness.attention.config import (
    LAYOUTS,
    MASK_SHAPES,
    MASKS,
    WHOLE_MASKS,
    Config,
    expand_configs,
    parse_config,
    parse_config_lines,
)
from profharness.commands._types import read_config_file
from profharness.dtypes import CONFIG_DTYPES
from profharness.errors import UsageError


@st.composite
def configs(draw: st.DrawFn) -> Config:
    kv_heads = draw(st.integers(1, 64))
    head_dim = draw(st.integers(1, 8192))
    head_dim_v = draw(st.one_of(st.none(), st.integers(1, 8192)))
    batch = draw(st.integers(1, 10**6))
    mask = draw(st.sampled_from(MASKS))
    shape = None if mask == "none" else draw(st.sampled_from([None, *MASK_SHAPES]))
    strides = st.lists(st.integers(0, 10**12), min_size=4, max_size=4).map(tuple)
    q_strides, k_strides = (draw(st.one_of(st.none(), strides)) for _ in range(2))
    layout = "contiguous" if q_strides or k_strides else draw(st.sampled_from(LAYOUTS))
    kv_batch = draw(st.sampled_from([None, 1 if batch > 1 else 7]))
    window = draw(st.none() | st.integers(1, 10**6)) if mask == "none" else None
    return Config(
        batch=batch,
        num_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        seq_len_q=draw(st.integers(1, 10**6)),
        seq_len_kv=draw(st.integers(1, 10**6)),
        head_dim=head_dim,
        dtype=draw(st.sampled_from([None, *CONFIG_DTYPES])),
        causal=draw(st.booleans()),
        mask=mask,
        dropout=draw(
            st.one_of(st.just(0.0), st.floats(0, 1, exclude_max=True, allow_subnormal=False))
        ),
        scale=draw(st.one_of(st.none(), st.floats(-1e6, 1e6, allow_nan=False))),
        layout=layout,
        bwd=draw(st.booleans()),
        head_dim_v=None if head_dim_v == head_dim else head_dim_v,
        deterministic=draw(st.booleans()),
        kv_batch=kv_batch,
        mask_shape=None if shape == WHOLE_MASKS.get(mask, "11qk") else shape,
        q_strides=q_strides,
        k_strides=k_strides,
        window=window,
    )


@given(configs())
def test_label_parses_back(config: Config) -> None:
    assert parse_config(config.label) == config


@given(st.text(max_size=60))
def test_any_text_is_configs_or_a_usage_error(text: str) -> None:
    try:
        assert all(isinstance(config, Config) for config in expand_configs(text))
    except UsageError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("2,8,512,64", "b2-h8-s512-d64"),
        ("2,8,512,64,fp16", "b2-h8-s512-d64-fp16"),
        (
            "1,32,1,128,bwd,bf16,causal,kv_heads=8,seq_kv=4096",
            "b1-h32-kv8-sq1-skv4096-d128-bf16-causal-bwd",
        ),
        (" 2, 8 ,512,64 , mask=float", "b2-h8-s512-d64-mask=float"),
        ("2,8,512,64,scale=1e-5,dropout=0.1", "b2-h8-s512-d64-dropout=0.1-scale=0.00001"),
        ("2,8,512,64,head_dim_v=32,deterministic", "b2-h8-s512-d64-dv32-deterministic"),
        ("2,8,512,64,head_dim_v=64,mask=bool_2d", "b2-h8-s512-d64-mask=bool_2d"),
        ("2,8,512,64,scale=-2,layout=bshd", "b2-h8-s512-d64-scale=-2-layout=bshd"),
        ("2,8,512,64,window=128,causal", "b2-h8-s512-d64-causal-window=128"),
        ("2,8,512,64,kv_batch=1", "b2-h8-kb1-s512-d64"),
        ("2,8,512,64,kv_batch=2", "b2-h8-s512-d64"),
        ("2,8,9,4,mask=bool,mask_shape=b1qk", "b2-h8-s9-d4-mask=bool-mask_shape=b1qk"),
        ("2,8,9,4,mask=float_bh,mask_shape=bhqk", "b2-h8-s9-d4-mask=float_bh"),
        ("2,1,9,4,k_strides=0x4x4x1", "b2-h1-s9-d4-k_strides=0x4x4x1"),
        ("2,1,9,4,mask=bool_2d,mask_strides=0x1", "b2-h1-s9-d4-mask=bool_2d-mask_strides=0x1"),
        ("1,32,1,128,kv8,skv4096", "b1-h32-kv8-sq1-skv4096-d128"),
        ("b1,h32,kv8, sq1,skv4096,d128,bf16", "b1-h32-kv8-sq1-skv4096-d128-bf16"),
        ("2,8,512,64,kb1,dv32", "b2-h8-kb1-s512-d64-dv32"),
    ],
)
def test_labels(text: str, label: str) -> None:
    assert parse_config(text).label == label


def test_sets_and_ranges_expand_to_their_product() -> None:
    labels = [config.label for config in expand_configs("{1,2},8,128:512:*2,{64,96},{fp16,bf16}")]
    assert len(labels) == 2 * 3 * 2 * 2
    assert labels[0] == "b1-h8-s128-d64-fp16"
    assert labels[-1] == "b2-h8-s512-d96-bf16"
    assert labels[:2] == [each.label for each in expand_configs("b1,h8,s128,d64,{fp16,bf16}")]
    lengths = [config.seq_len_q for config in expand_configs("1,1,{64:256:+64,1000,64},8")]
    assert lengths == [64, 128, 192, 256, 1000]


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("2,8,512", "3 of the 4"),
        ("2,8,512,x", "'x'"),
        ("2,8,512,64,fp8", "'fp8'"),
        ("2,8,512,64,mask=tri", "'tri'"),
        ("2,8,512,64,kv_heads=3", "kv_heads=3"),
        ("2,8,512,64,dropout=1", "dropout=1"),
        ("2,8,512,64,scale=nan", "'nan'"),
        ("2,8,{512,64", "braces"),
        ("0,8,512,64", "'0'"),
        ("2,8,512,64,kv_batch=3", "kv_batch=3"),
        ("2,8,512,64,mask_shape=b1qk", "require mask="),
        ("2,8,512,64,window=0", "'0'"),
        ("2,8,512,64,window=8,mask=bool", "cannot be combined with mask=bool"),
        ("2,8,512,64,q_strides=64x1", "q_strides has 2 numbers"),
        ("2,8,512,64,q_strides=a", "q_strides='a'"),
        ("2,8,512,64,q_strides=1x2x3x4,layout=bshd", "cannot be combined"),
        ("2,8,4096:128:*2,64", "never reaches"),
        ("2,8,1:9:*1,64", "never reaches"),
        ("2,8,512,64,causal,causal", "second time"),
        ("2,8,,64", "''"),
        ("1:999999999999:+1,8,1,64", "more than"),
        ("{1:99999:+1},{1:99999:+1},1,64", "the limit is"),
        ("b2-h8-d64", "label"),
        ("2,8,512,64,", "nothing follows a comma"),
        ("2,8,512,64,,causal", "nothing follows a comma"),
        ("2,8,512,64,float16", "write fp16"),
        ("2,8,512,64,FP16", "write fp16"),
        ("2,8,512,64,half,causal", "write fp16"),
        ("2,8,512,64,{bfloat16,Float32}", "write {bf16,fp32}"),
        ("2,8,512,64,dtype=bf16", "write bf16"),
        ("2,8,512,64,causal=true", "write causal without a value"),
        ("2,8,512,64,{causal,bwd}", "a set cannot contain flags"),
        ("99999999999999999999,8,512,64", "'99999999999999999999' is too large"),
        ("2,8,128:99999999999999999999:*2,64", "is too large"),
        ("2,8,512,64,scale=sNaN", "'sNaN' is not a number"),
        ("2,8,512,64,dropout=sNaN", "'sNaN' is not a number"),
        ("2,8,512,64,kv=4", "did you mean kv_heads="),
        ("2,8,512,64,h=4", "heads is one of the four numbers at the start"),
        ("2,8,512,64,h4", "'h4' sets heads a second time"),
        ("2,8,512,64,sq=32", "did you mean seq_q=32"),
        ("2,8,512,64,skv=8192", "did you mean seq_kv=8192"),
        ("2,8,512,64,kv=3", "did you mean kv_heads=3"),
        ("4,32/8,1024,128", "'32/8' is not a number; write 4,32,1024,128,kv_heads=8$"),
        ("4,32/8,1024,128,bf16", "write 4,32,1024,128,kv_heads=8,bf16$"),
        ("b=2,h=8,s=512,d=64", "'b=2' is not a number; write 2, or write the whole config as a"),
        ("4,32,kv8,s2048,128", "'kv8' is not a number; write kv_heads=8 after the four numbers"),
        (
            "4,32,s2048,128,kv8",
            "'s2048' is not a number; write 2048, or .* as a label, as in b4-h32",
        ),
        ("b2,h8,d64", "label"),
        ("", "0 of the 4"),
    ],
)
def test_bad_input_names_the_token(text: str, token: str) -> None:
    with pytest.raises(UsageError, match=token.replace("(", r"\(")):
        expand_configs(text)


def test_a_byte_order_mark_is_no_part_of_the_first_config(tmp_path: Path) -> None:
    file = tmp_path / "configs.txt"
    file.write_bytes(b"\xef\xbb\xbf2,8,512,64\n")
    assert read_config_file(file) == [parse_config("2,8,512,64")]


def test_no_dtype_matches_any_dtype() -> None:
    asked = parse_config("2,8,512,64")
    assert asked.matches(parse_config("2,8,512,64,bf16"))
    assert not asked.matches(parse_config("2,8,512,64,bf16,causal"))
    assert not parse_config("2,8,512,64,fp16").matches(parse_config("2,8,512,64,bf16"))
    assert asked.resolve("cuda").dtype == "fp16"
    assert asked.resolve("cpu").dtype == "fp32"


def test_files_have_comments_and_errors_have_lines() -> None:
    assert len(parse_config_lines(["# all", "", "2,8,512,64 # one", "2,8,512,64"], "f")) == 1
    with pytest.raises(UsageError, match=r"f, line 2: .*'zz'"):
        parse_config_lines(["1,1,1,1", "1,1,1,zz"], "f")
