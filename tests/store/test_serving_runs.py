"""A serving engine's trace, the captures of its graphs and its log are one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from graph_traces import SHAPE, decode, recording

from profharness.cli import cli
from profharness.commands._runs import find_one
from profharness.errors import UnknownNameError
from profharness.program.layer_map import find_layers
from profharness.store import ingest_path, open_store
from profharness.store.names import typed_names
from profharness.store.ranks import rank_rows
from profharness.store.sources import CAPTURES, find_sources

LOG = """\
(APIServer pid=1) INFO 11-24 20:03:00 [api_server.py:1] vLLM API server version 0.25.0
(EngineCore_DP0 pid=7) DEBUG 11-24 20:03:06 [cuda.py:410] Some attention backends are not valid for \
cuda with AttentionSelectorConfig(head_size=64, has_sink=True). Reasons: {FLASH_ATTN: [sink setting \
not supported], FLASHINFER: [compute capability not supported, sink setting not supported]}.
(EngineCore_DP0 pid=7) INFO 11-24 20:03:06 [cuda.py:416] Using TRITON_ATTN attention backend out of \
potential backends: ['TRITON_ATTN', 'FLEX_ATTENTION']
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder as an engine leaves it."""
    folder = tmp_path / "profile"
    (folder / CAPTURES).mkdir(parents=True)
    trace = json.dumps({"traceEvents": decode(8, 5000)})
    (folder / "decode_rank_0.json").write_text(trace)
    recording(folder / CAPTURES, 8, SHAPE)
    other = recording(tmp_path, 8, [2, 4, 32, 32])  # of another rank
    other.rename(folder / CAPTURES / "bs_8_rank_1.json")
    (folder / CAPTURES / "execution_details.json").write_text('[{"batch_size": 8, "mode": "FULL"}]')
    (folder / "server.log").write_text(LOG)
    return folder


def test_the_files_in_a_folder_are_one_run(folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    assert find_sources(folder) == [folder]
    (result,) = ingest_path(store, folder)
    assert (result.status, result.warnings) == ("new", ())
    assert [each.status for each in ingest_path(store, folder)] == ["unchanged"]
    with open_store(store) as opened:
        layers = find_layers(opened, result.run)
    (row,) = layers.rows
    assert row.config and row.config.startswith("b2-h4-s64-d32")
    assert (row.mode, row.calls) == ("graph", 1)
    (phase,) = layers.phases
    assert (phase.phase, phase.requests, phase.new_tokens) == ("decode", 8, 8)
    log = layers.engine
    assert log and (log.engine, log.version, log.backend) == ("vLLM", "0.25.0", "TRITON_ATTN")
    assert log.refusals["FLASH_ATTN"] == ("sink setting not supported",)


def test_a_trace_that_is_stored_gets_its_capture_later(tmp_path: Path) -> None:
    trace, store = tmp_path / "decode.json", tmp_path / "store.db"
    trace.write_text(json.dumps({"traceEvents": decode(8, 5000)}))
    capture = recording(tmp_path, 8, SHAPE)
    (before,) = ingest_path(store, trace)
    (after,) = ingest_path(store, trace, companions=[capture])
    assert (before.status, after.status, after.run) == ("new", "replaced", before.run)
    # the stored run is used if the trace is given without its capture
    assert ingest_path(store, trace)[0].status == "unchanged"
    with open_store(store) as opened:
        assert [row.config is None for row in find_layers(opened, after.run).rows] == [False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode.json", "--with", "missing.json"], "missing.json: no such file"),
        (["decode.json", "decode.json", "--with", "decode.json"], "name exactly one trace file"),
        (["decode.json", "--with", "broken.json"], "broken.json"),
    ],
)
def test_wrong_companions_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("decode.json").write_text(json.dumps({"traceEvents": decode(8, 5000)}))
    Path("broken.json").write_text('{"traceEvents": [{"ph"')
    result = CliRunner().invoke(cli, ["ingest", *arguments])
    assert result.exit_code != 0
    assert message in f"{result.output} {result.exception}"
    assert not Path("profharness.db").exists()


def test_a_run_has_the_name_that_the_user_gave(folder: Path, tmp_path: Path) -> None:
    """Bug: a folder with one trace was named by the trace, so `layers FOLDER` stored a run that
    `layers` did not find by the name of the folder.
    """
    store = tmp_path / "store.db"
    (result,) = ingest_path(store, folder)
    assert result.source == folder
    trace = folder / "decode_rank_0.json"
    with open_store(store) as opened:
        (row,) = opened.runs()
        assert (row.name, row.path, row.rank) == ("profile", str(folder), 0)
        assert find_layers(opened, result.run).name == "profile"
        assert opened.run_reference(result.run) == "profile"
        for name in ("profile", str(folder), trace.name):
            assert opened.resolve(name) == result.run
    for path in (trace, folder):
        with typed_names():
            assert find_one(path, store) == result.run
            with open_store(store) as opened:
                assert opened.run_name(result.run) == path.name


def test_a_stored_trace_keeps_its_name(folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    ingest_path(store, folder / "decode_rank_0.json")
    assert [each.status for each in ingest_path(store, folder)] == ["unchanged"]
    with open_store(store) as opened:
        assert [row.name for row in opened.runs()] == ["decode_rank_0.json"]


def test_a_folder_with_several_traces_names_none_of_them(folder: Path, tmp_path: Path) -> None:
    other = folder / "decode_rank_1.json"
    other.write_text(json.dumps({"traceEvents": decode(8, 6000)}))
    store = tmp_path / "store.db"
    assert len(ingest_path(store, folder)) == 2
    with open_store(store) as opened:
        assert sorted(row.name for row in opened.runs()) == ["decode_rank_0.json", other.name]


def test_the_name_of_a_trace_of_several_runs_is_ambiguous(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    for at, name in enumerate(("one", "two")):
        path = tmp_path / name / "decode.json"
        path.parent.mkdir()
        path.write_text(json.dumps({"traceEvents": decode(8, 5000 + at)}))
        ingest_path(store, path.parent)
    with open_store(store) as opened:
        assert {row.name for row in opened.runs()} == {"one", "two"}
        with pytest.raises(UnknownNameError, match=r"'decode.json' is ambiguous; choose from"):
            opened.resolve("decode.json")


def test_the_working_folder_names_a_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (result,) = ingest_path(tmp_path / "store.db", Path())
    with open_store(tmp_path / "store.db") as opened:
        assert opened.run_name(result.run) == "profile"


def test_the_ranks_of_a_folder_include_the_trace_that_was_given_first(
    folder: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store.db"
    ingest_path(store, folder)
    other = folder / "decode_rank_1.json"
    other.write_text(json.dumps({"traceEvents": decode(8, 6000)}))
    ingest_path(store, folder)
    with open_store(store) as opened:
        assert [row.rank for row in rank_rows(opened, [str(folder)])] == [0, 1]
        assert [row.rank for row in rank_rows(opened)] == [0, 1]
