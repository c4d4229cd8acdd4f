"""Parse the HTML page: texts stay texts, headings have anchors, and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from chart_samples import NASTY, SAMPLES
from hypothesis import given
from hypothesis import strategies as st

from profharness.columns import Column
from profharness.errors import one_line
from profharness.render.bars import draw_bars
from profharness.render.document import Chart, Code, Document, Heading, Note, Table
from profharness.render.html import MOST_SECTIONS, render_html
from profharness.render.renderers import RENDERERS, render_markdown

SECTIONS = tuple(Heading(f"section {number}") for number in range(MOST_SECTIONS))
"""Sections of a page that has a table of contents because of one further section."""
VOID = {"meta", "link", "input", "br", "hr", "wbr"}


class Page(HTMLParser):
    """Collect elements with attributes and text. Fail if tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"{tag} repeats an attribute"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text_of(self, tag: str) -> list[str]:
        return [data for name, data in self.texts if name == tag]


def document(text: str, rows: int = 2) -> Document:
    columns = (Column("name", text), Column("count", "n", "count"))
    body = tuple((text if n == 0 else f"row {n}", n) for n in range(rows))
    blocks = (
        Heading(text, text),
        Table(columns, body),
        Note(text, text, "warning"),
        Heading(text, level=3),
        Code(text),
    )
    return Document("t/1", f"page {text}", blocks, ("name",), ({"name": text},))


@given(st.text(min_size=1))
def test_any_text_stays_text(text: str) -> None:
    page = Page(render_html(document(text)))
    plain = Page(render_html(document("x")))
    tags = [tag for tag, _ in page.elements if tag not in ("wbr", "code")]  # in a text
    assert tags == [tag for tag, _ in plain.elements if tag != "code"]
    shown = one_line(text) if text != "" else ""
    if shown.strip():
        assert "".join(page.text_of("td")).startswith(shown)


def test_a_warning_is_a_sentence() -> None:
    """Bug: some warnings of a page had a capital and a full stop, and others had neither."""
    note = Note("the kernels of 2 launches are unknown", level="warning")
    html = render_html(Document("t/1", "t", (note,), (), ()))
    assert "warning: The kernels of 2 launches are unknown.</p>" in html


def test_a_shortened_name_opens_to_its_full_names() -> None:
    table = Table((Column("name", "kernel"), Column("op", "op")), (("a<…>", "x"), ("b", "a")))
    full = {"a<…>": ("void n::a<1>()", "void n::a<2>()")}
    html = render_html(Document("t/1", "t", (table,), (), (), full_names=full))
    assert (
        '<td><details class="full"><summary>a&lt;…&gt;</summary><div>void n::a&lt;1&gt;()</div>'
        "<div>void n::a&lt;2&gt;()</div></details></td>"
    ) in html
    assert html.count("<details class=") == 1
    assert Page(html)


def test_a_title_has_the_meaning_of_its_column_as_a_tip() -> None:
    columns = (Column("a", "a", meaning="the `first`"), Column("b", "b"))
    html = render_html(Document("t/1", "t", (Table(columns, ((1, 2),)),), (), ()))
    heads = [each for each in Page(html).named("button") if each.get("id") != "theme"]
    assert [each.get("title") for each in heads] == ["the first", None]


def test_a_long_path_wraps_between_its_parts() -> None:
    """Bug: lines ended within `{0-2}`, and within the name of a module."""
    path = "Decoder_{0-2}.Attention_{1,3}"
    table = Table((Column("m", "module"), Column("n", "n", "count")), ((path, 12_345),))
    html = render_html(Document("t/1", "t", (table, Note("text", path)), (), ()))
    wrapping = 'Decoder_<span class="span">{0-2}</span>.<wbr>Attention_{1,<wbr>3}'
    assert html.count(wrapping) == 2
    assert ">12,345</td>" in html


def test_an_option_does_not_wrap() -> None:
    """Bug: on a phone, a line ended after the hyphens of `--disable-cuda-graph`."""
    text = "do not set --disable-cuda-graph, well--known or a--b"
    table = Table((Column("a", "a"),), ((text,), ("--full",)))
    blocks = (Heading("h", text), Note(text), Code(text), table)
    html = render_html(Document("t/1", "t", blocks, (), (), answer=(text,)))
    option = '<span class="span">--disable-cuda-graph</span>'
    assert html.count(f"{option}, well--known or a--b") == 4
    assert '<span class="span">--full</span></td>' in html
    assert html.count('class="span"') == 5


def test_a_number_and_its_unit_do_not_wrap() -> None:
    """Bug: on a phone, lines ended between a number and its unit, as in `(440 / µs`."""
    text = "takes 27 % (1,440.5 µs of 2 ms) at 1.2 TFLOP/s, 3 GiB and 2 steps, 4 of them"
    columns = (Column("a", "a"), Column("b", "b"))
    blocks = (Heading("h", text), Note(text, text), Table(columns, ((text, "5 %"),)))
    html = render_html(Document("t/1", "t", blocks, (), (), answer=(text,)))
    figures = ("27 %", "1,440.5 µs", "2 ms", "1.2 TFLOP/s", "3 GiB")
    assert all(html.count(f'<span class="span">{each}</span>') == 5 for each in figures)
    assert html.count('class="span"') == 5 * len(figures) + 1


def test_a_subtitle_wraps_between_its_parts() -> None:
    """Bug: on a phone, the first line ended within the date."""
    html = render_html(Document("t/1", "t", (), (), (), subtitle="NVIDIA H200 · 2026-11-22"))
    assert '<p class="subtitle"><span>NVIDIA H200</span> · <span>2026-11-22</span></p>' in html


def test_a_name_breaks_between_its_words() -> None:
    """Bug: on a phone, a line could end within a word of a kernel's name and of the title."""
    kernel = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
    table = Table((Column("kernel", "kernel"),), ((kernel,),))
    text = RENDERERS["html"](Document("t/1", "my_trace.json: report", (table,), (), ()))
    parts = kernel.replace("_", "_<wbr>").replace("h_<wbr>bz", "h_bz")
    assert f'<td class="t n">{parts}</td>' in text
    assert "<h1>my_trace.<wbr>json: report</h1>" in text
    assert "<title>my_trace.json: report</title>" in text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        # Bug: the lines of this path ended after `sdpa_attention.` and within `integrations`.
        (
            "transformers/integrations/sdpa_attention.py:158",
            "transformers/<wbr>integrations/<wbr>sdpa_attention.py:158",
        ),
        ("layers_0.self_attn", "layers_0.<wbr>self_attn"),
        ("b2-h8-s512-d64-fp16-dropout=0.1-q_strides=256x64x512x1",) * 2,
        ("TransformerEncoderLayer_0", "TransformerEncoderLayer_0"),
        ("fprop_wgmma_knob_7_64x128x64", "fprop_<wbr>wgmma_<wbr>knob_7_64x128x64"),
    ],
)
def test_a_line_does_not_end_within_a_short_part_of_a_name(name: str, shown: str) -> None:
    table = Table((Column("name", "name"),), ((name,),))
    assert f">{shown}</td>" in render_html(Document("t/1", "t", (table,), (), ()))


def test_a_page_has_its_title_once() -> None:
    """Bug: the page of `diff` began with a heading that repeated its title."""
    made = Document("t/1", "a → b", (Heading("a → b", "3 changed"), Note("n")), (), ())
    html = render_html(made)
    assert "<h1>a → b</h1>" in html and "<h2" not in html
    assert '<p class="subtitle"><span>3 changed</span></p>' in html
    assert render_markdown(made) == "# a → b\n\n3 changed\n\n- n.\n"
    assert "a → b  3 changed" in RENDERERS["table"](made)


def test_code_in_a_text_has_no_backticks() -> None:
    """Bug: a page showed the backticks around a command."""
    text = "use `profharness explain`; `--full` shows 27 %"
    html = render_html(Document("t/1", "t", (Note(text),), (), (), answer=(text,)))
    shown = "se <code>profharness explain</code>; <code>--full</code> shows"
    assert html.count(shown) == 2 and "`" not in html.partition("<script>")[0]


def test_the_label_of_a_warning_needs_no_further_word() -> None:
    """Bug: a page showed `finding warning: math:`."""
    note = Note("math: the score matrix is written", "finding", "warning")
    html = render_html(Document("t/1", "t", (note,), (), ()))
    assert '<p class="warning"><b>finding</b> math: the score matrix is written</p>' in html


def test_markup_in_names_is_escaped_everywhere() -> None:
    html = render_html(document(NASTY))
    assert "<script>alert" not in html
    assert html.count("<script>") == 1
    assert Page(html).text_of("title") == [f"page {NASTY}"]


def test_headings_have_distinct_anchors_and_are_in_the_contents() -> None:
    made = document("flash & math")
    page = Page(render_html(replace(made, blocks=(*made.blocks, *SECTIONS))))
    anchors = [page.named(tag)[0]["id"] for tag in ("h2", "h3")]
    assert anchors == ["flash-math", "flash-math-2"]
    links = [each["href"] for each in page.named("a")]
    for anchor in anchors:
        assert links.count(f"#{anchor}") == 2  # next to the heading, and in the contents
    identities = [each["id"] for _, each in page.elements if "id" in each]
    assert len(identities) == len(set(identities))


def test_long_heading_is_short_in_the_contents() -> None:
    long = "range " + "x" * 100_000
    html = render_html(Document("t/1", "t", (Heading(long), *SECTIONS), (), ()))
    assert "<nav" in html and len(html) < 150_000
    assert html.count("x" * 1000) == 100  # the heading itself is not cut
    assert max(map(len, (str(each["href"]) for each in Page(html).named("a")))) < 200


def test_nothing_is_fetched_and_the_policy_forbids_it() -> None:
    html = render_html(document("x", 20))
    page = Page(html)
    for _, attributes in page.elements:
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        href = attributes.get("href")
        assert href is None or href.startswith("#") or href == "data:,"
    policy = next(
        str(each["content"])
        for each in page.named("meta")
        if each.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    (script,) = page.text_of("script")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize(("rows", "filters"), [(2, 0), (16, 1)])
def test_long_table_has_a_filter(rows: int, filters: int) -> None:
    page = Page(render_html(document("x", rows)))
    assert len(page.named("input")) == filters
    if filters:
        assert page.named("input")[0]["aria-controls"] == page.named("table")[0]["id"]


def test_values_are_sorted_by_number_not_by_text() -> None:
    columns = (Column("grid", "grid", "triple"), Column("us", "µs", "time"))
    table = Table(columns, (((4, 2, 8), 1234567), (None, None), ("", float("nan"))))
    page = Page(render_html(Document("t/1", "t", (table,), (), ())))
    assert [each.get("data-v") for each in page.named("td")] == [
        "64",
        "1234567",
        None,
        None,
        None,
        None,
    ]
    shown = [text for tag, text in page.texts if tag in ("td", "span")]
    assert shown[:3] == ["4,2,8", "1.23 ms", "-"]


def test_repeated_value_is_in_the_page_but_invisible() -> None:
    """Bug: each row of a group had the same config."""
    columns = (Column("a", "a", repeat=False), Column("b", "b", repeat=False), Column("c", "c"))
    rows = (("x", "flash", "1"), ("x", "flash", "1"), ("x", "math", "1"), ("y", "math", "1"))
    page = Page(render_html(Document("t/1", "t", (Table(columns, rows),), (), ())))
    assert page.text_of("td") == [text for row in rows for text in row]
    assert page.named("table")[0]["data-groups"] == "2"
    classes = [each.get("class") for each in page.named("td")]
    assert [at for at, name in enumerate(classes) if name == "same"] == [3, 4, 6]


def test_charts_are_inline_and_their_ids_differ() -> None:
    blocks = (*SAMPLES.values(), *SAMPLES.values())
    html = render_html(Document("t/1", "t", blocks, (), ()))
    # bars are HTML; every other chart is drawn for a desktop and for a phone
    assert html.count('<svg role="img"') == 2 * (len(blocks) - 2)
    found = re.findall(r' id="(chart\d+-\w+)"', html)
    assert len(found) == len(set(found))
    assert NASTY not in html


def test_text_formats_omit_charts() -> None:
    with_chart = Document(
        "t/1", "t", (Heading("h"), SAMPLES["map"], Note("n")), ("a",), ({"a": 1},)
    )
    without = Document("t/1", "t", (Heading("h"), Note("n")), ("a",), ({"a": 1},))
    for name in set(RENDERERS) - {"html"}:
        assert RENDERERS[name](with_chart) == RENDERERS[name](without), name


def test_markdown_links_to_its_pictures() -> None:
    blocks = (SAMPLES["map"], Note("n"), SAMPLES["dots"])
    text = render_markdown(Document("t/1", "t", blocks, (), ()), images=["out-1.svg", "a b-2.svg"])
    assert "![Map](<out-1.svg>)\n\n- n.\n\n![By config](<a b-2.svg>)" in text


@given(st.lists(st.text()))
def test_jsonl_has_one_record_per_line(names: list[str]) -> None:
    records = tuple({"name": name} for name in names)
    text = RENDERERS["jsonl"](Document("t/1", "t", (), ("name",), records))
    assert [json.loads(line) for line in text.split("\n") if line] == list(records)


def test_a_file_in_a_title_does_not_break() -> None:
    """Bug: the title of a column read `(llama_eager.jso n.gz) ran`."""
    columns = (
        Column("a", "NVIDIA H200 (llama_eager.json.gz) ran"),
        Column("b", "NVIDIA H200 (llama_eager.json.gz) µs", "time"),
        Column("c", "x" * 60),
    )
    html = render_html(Document("t/1", "t", (Table(columns, (("eager", 1, "c"),)),), (), ()))
    titles = re.findall(r'<th scope="col"([^>]*)>', html)
    assert titles == ["", ' class="r"', ' class="w"']


def test_each_part_of_a_few_bars_is_named_and_the_longest_bar_is_full() -> None:
    """Bug: bars of phases had neither names nor times, and `time` stood alone below them."""
    rows = tuple(
        {"step": phase, "µs": time, "kind": kind, "label": f"{time} µs"}
        for phase, parts in (("decode", (10, 40)), ("prefill", (60, 40)))
        for kind, time in zip(("attention: flash", "idle"), parts, strict=True)
    )
    html = draw_bars(Chart("stack", "", rows, "µs", "step", "kind", "µs", label="label"))
    text = re.sub(r"<[^>]+>", " ", html)
    for word in ("decode", "50.0 µs", "prefill", "100 µs", "attention: flash", "60 µs"):
        assert word in text
    assert 'class="bar" aria-hidden="true" style="width:50.000%"' in html
    assert "time" not in text


def test_the_bars_of_a_table_have_one_scale() -> None:
    """Bug: the bars of phases had the same length for 11 µs and 45 µs."""
    columns = (Column("a", "a"), Column("b", "b µs", "time"), Column("c", "c µs", "time"))
    rows = (("x", 1e3, 4e3), ("y", 2e3, None))
    page = render_html(Document("t/1", "t", (Table(columns, rows, ("b", "c")),), (), ()))
    assert re.findall(r'class="meter"[^>]*><i style="width:([^"]*)%', page) == [
        *("25.0", "100.0", "50.0"),  # an unknown time has no bar
    ]
    single = render_html(Document("t/1", "t", (Table(columns, rows[:1], ("b", "c")),), (), ()))
    assert 'class="meter"' not in single  # its length would say nothing


def test_a_page_shows_the_values_of_a_chart_once() -> None:
    """Bug: a folded table below a bar repeated the list of its parts."""
    rows = tuple(
        {"step": "step", "µs": time, "kind": kind, "label": f"{time} µs"}
        for kind, time in (("attention: flash", 60.0), ("idle", 40.0))
    )
    chart = Chart("stack", "", rows, "µs", "step", "kind", "µs", label="label")
    table = Table((Column("kind", "kind"),), (("idle",),), drawn=True)
    page = render_html(Document("t/1", "t", (chart, table), (), ()))
    assert "<table" not in page and "60.0 µs" in page
    assert "<table" in render_html(Document("t/1", "t", (table,), (), ()))  # without charts


@pytest.mark.parametrize(("count", "folded", "shown"), [(8, 0, False), (9, 0, True), (7, 9, False)])
def test_only_a_long_page_has_contents(count: int, folded: int, shown: bool) -> None:
    """Bug: a page of one screen began with a folded table of contents."""
    open_ = [Heading(f"section {number}") for number in range(count)]
    closed = [Heading("details", folded=True), *[Heading("part", level=3)] * folded]
    page = render_html(Document("t/1", "t", (*open_[1:], *closed, *open_[:1]), (), ()))
    assert ("<nav" in page) is shown


def test_the_columns_of_a_page_have_the_order_of_the_terminal() -> None:
    """Bug: a page showed ±% apart from its median, and tokens/s before the requests."""
    titles = ("config", "requests", "median µs/call", "±%", "tokens/s")
    columns = tuple(
        Column(title, title, importance="answer" if title in titles[2::2] else "normal")
        for title in titles
    )
    table = Table(columns, (("b2-h8-s512-d64-fp16", 4, 1.0, 2.0, 3.0),))
    page = render_html(Document("t/1", "t", (table,), (), ()))
    heads = re.findall(r"<th [^>]*><button [^>]*>(.*?)</button>", page)
    assert tuple(head.replace("<wbr>", "") for head in heads) == titles
    assert tuple(re.findall(r'data-label="([^"]*)"', page)) == titles
