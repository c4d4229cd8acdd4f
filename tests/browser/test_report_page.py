"""The HTML report in a real browser, opened from disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CONTRASTS, console, key, media, pixels, requests, unfold
from chart_samples import NASTY, SAMPLES

from profharness.columns import Column
from profharness.render.document import Code, Document, Heading, Note, Table
from profharness.render.html import MOST_SECTIONS, render_html

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


def column(browser: Any, table: str, place: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
        ".filter((row) => !row.hidden).map((row) => row.cells[arguments[1]].textContent)"
    )
    found: list[str] = browser.execute_script(script, table, place)
    return found


@pytest.fixture(scope="module")
def browser(new_shared_browser: Any) -> Any:
    return new_shared_browser()


@pytest.fixture
def report(browser: Any, report_page: Path) -> Iterator[Any]:
    media(browser, "light")
    requests(browser), console(browser)  # what came before is not of this page
    browser.get(report_page.as_uri())
    yield browser


def test_it_opens_from_disk_without_an_error_or_a_request(report: Any, report_page: Path) -> None:
    assert console(report) == []
    # chrome: is the browser's own first tab; no page from disk can ask for it
    asked = [
        url
        for url in requests(report)
        if not url.startswith(("data:", "chrome:", "chrome-untrusted:"))
    ]
    assert asked == [report_page.as_uri()]
    assert report.find_element("tag name", "h1").text.count("→") == 1


def test_the_policy_stops_a_script_that_somebody_smuggled_in(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    html = render_html(Document("t/1", "t", (Note("n"),), (), ()))
    page.write_text(html.replace("<main", "<script>document.title='bad'</script><main"))
    console(browser)
    browser.get(page.as_uri())
    assert browser.title == "t"
    assert any("Content Security Policy" in line for line in console(browser))


def test_charts_are_drawn(report: Any) -> None:
    charts = report.find_elements("css selector", "figure .wide svg")
    # On a busy machine, charts of figures that cannot be used are left out.
    assert len(charts) >= 3
    for chart in charts:
        marks = chart.find_elements("css selector", "path[aria-label]")
        sizes = [mark.rect["width"] * mark.rect["height"] for mark in marks]
        assert sizes
        assert all(size > 0 for size in sizes)
        assert all(mark.find_elements("css selector", "title") for mark in marks[:3])


@pytest.mark.parametrize(("width", "form"), [(390, "narrow"), (1200, "wide")])
def test_nothing_crosses_the_texts_of_a_roofline(
    new_browser: Any, report_page: Path, width: int, form: str
) -> None:
    """Bug: on a phone, the dotted line of a config crossed the names of other configs."""
    browser = new_browser(width)
    browser.get(report_page.as_uri())
    crossed = browser.execute_script(
        """
        const inside = (figure, query) => [...figure.querySelectorAll(query)].map(
          (each) => [each.textContent || each.tagName, each.getBoundingClientRect()]);
        const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
          && a.top < b.bottom - 2 && b.top < a.bottom - 2;
        const figures = [...document.querySelectorAll(`figure.roofline .${arguments[0]} svg`)];
        return figures.map((figure) => {
          const texts = inside(figure, ".mark-text.role-mark text");
          const others = [...texts, ...inside(figure, ".mark-rule.role-mark line, path[aria-label]")];
          return [texts.length, texts.flatMap(([text, box], at) => others
            .filter((other, place) => place !== at && meet(box, other[1]))
            .map(([other]) => [text, other]))];
        });
        """,
        form,
    )
    assert crossed
    for texts, found in crossed:
        assert texts > 4
        assert found == []


def test_a_phone_shows_the_whole_title_of_each_chart(new_browser: Any, report_page: Path) -> None:
    """Bug: a title was cut: `Time per call by config and backend (CUDA-graph`."""
    phone = new_browser(390, 844)
    phone.get(report_page.as_uri())
    sides = phone.execute_script(
        "return [...document.querySelectorAll('figure .narrow svg')].map((svg) => [svg.parentElement,"
        "svg.querySelector('.role-title-text text')].map((each) => each.getBoundingClientRect().right))"
    )
    assert sides and all(title <= frame for frame, title in sides)


def test_the_bottlenecks_of_all_backends_are_shown(report: Any) -> None:
    """Bug: this section of 20 rows was folded, between the open sections on the times and the map."""
    tables = report.find_elements("css selector", "[aria-label='Table: Bottlenecks'] table")
    assert tables and all(table.is_displayed() for table in tables)
    assert all("% of peak FLOP/s" in table.text for table in tables)
    assert all("few blocks" in table.text for table in tables)


def test_the_reason_for_a_blank_ratio_is_below_its_table(report: Any) -> None:
    """Bug: `time vs fastest` was blank for all-disabled, and the next line was about another subject."""
    below = report.execute_script(
        "return [...document.querySelectorAll('table')].filter((t) => t.checkVisibility())"
        ".filter((t) => t.textContent.includes('p10 µs/call') && t.textContent.includes('all-disabled'))"
        ".map((t) => { let e = t.parentElement.nextElementSibling;"
        " if (e.matches('.all')) e = e.nextElementSibling;"
        " return e.textContent; })"
    )
    assert below and all("so it is not ranked" in text for text in below)


def test_a_table_sorts_by_keyboard(report: Any) -> None:
    script = "return [...document.querySelectorAll('table')].findIndex((t) => t.textContent.includes('p10 µs/call'))"
    table = f"t{report.execute_script(script) + 1}"
    unfold(report)
    heads = report.find_elements("css selector", f"#{table} th")
    place = next(n for n, head in enumerate(heads) if "median" in head.text)
    before = column(report, table, place)
    report.execute_script(
        "arguments[0].focus()", heads[place - 1].find_element("tag name", "button")
    )
    key(report, "TAB")
    focused = report.switch_to.active_element
    assert "median" in focused.text
    style = report.execute_script("return getComputedStyle(arguments[0]).outlineStyle", focused)
    assert style != "none"
    states = []
    for name in ("ENTER", "SPACE", "ENTER"):
        key(report, name)
        states.append((heads[place].get_attribute("aria-sort"), column(report, table, place)))
    rest = [text for text in before if text == "refused"]  # comes last in both orders
    by_number = sorted((text for text in before if text != "refused"), key=float)
    assert rest and by_number + rest != before
    assert states == [
        ("ascending", by_number + rest),
        ("descending", by_number[::-1] + rest),
        (None, before),
    ]


def test_a_table_filters_by_keyboard(report: Any) -> None:
    unfold(report)
    field = report.find_element("css selector", ".filter input")
    table = field.get_attribute("aria-controls")
    rows = len(column(report, table, 0))
    word = column(report, table, 0)[0]
    report.execute_script("arguments[0].focus()", field)
    report.switch_to.active_element.send_keys(word.upper())
    shown = report.find_elements("css selector", f"#{table} tbody tr:not([hidden])")
    assert 0 < len(shown) < rows
    assert all(word in row.text for row in shown)
    output = report.find_element("css selector", ".filter output")
    assert output.text == f"{len(shown)} of {rows} rows"
    key(report, "ESCAPE")
    assert len(column(report, table, 0)) == rows


def test_a_repeated_config_is_shown_once_however_the_rows_are_ordered(report: Any) -> None:
    """Bug: each row of a table showed the config. A filter or a sort must not hide all of it."""
    unfold(report)
    shown = (
        "const of = (field) => document.getElementById(field.getAttribute('aria-controls'));"
        "const field = [...document.querySelectorAll('.filter input')].find((each) =>"
        "[...of(each).querySelectorAll('th button')].some((one) => one.textContent === 'backend'));"
        "const table = of(field);"
        "const {heading, words} = arguments[0];"
        "if (words !== undefined) { field.value = words; field.dispatchEvent(new Event('input')); }"
        "if (heading) [...table.querySelectorAll('th button')]"
        ".find((each) => each.textContent === heading).click();"
        "return [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => ["
        "row.cells[0].textContent, getComputedStyle(row.cells[0]).color !== 'rgba(0, 0, 0, 0)'])"
    )

    def expected(rows: list[list[Any]]) -> list[bool]:
        configs = [config for config, _ in rows]
        return [not at or configs[at - 1] != config for at, config in enumerate(configs)]

    words = ({}, {"words": "math"}, {"words": "fp16"}, {"words": ""})
    for state in (*words, *3 * [{"heading": "backend"}]):
        rows = report.execute_script(shown, state)
        assert [visible for _, visible in rows] == expected(rows), state
    assert not all(visible for _, visible in rows)  # the rows are in their first order again


def test_the_contents_and_the_skip_link_lead_to_their_places(report: Any) -> None:
    key(report, "TAB")
    assert report.switch_to.active_element.text == "To the content"
    links = report.find_elements("css selector", "nav a")
    assert len(links) > 8
    for link in links:
        target = str(link.get_attribute("href")).rpartition("#")[2]
        assert report.find_elements("id", target), target


def test_both_themes_are_read_and_the_button_wins(report: Any) -> None:
    light, button = pixels(report), report.find_element("id", "theme")
    told = report.execute_script(CONTRASTS)
    assert told[0] >= 4.5, told
    assert button.get_attribute("aria-pressed") == "false"
    media(report, "dark")
    dark = pixels(report)
    assert dark != light
    told = report.execute_script(CONTRASTS)
    assert told[0] >= 4.5, told
    assert button.get_attribute("aria-pressed") == "true"
    report.execute_script("arguments[0].focus()", button)
    key(report, "ENTER")
    background = "return getComputedStyle(document.body).backgroundColor"
    assert report.execute_script(background) == "rgb(255, 255, 255)"
    media(report, "light")
    key(report, "ENTER")
    assert report.execute_script(background) == "rgb(20, 23, 28)"


def test_a_phone_scrolls_code_inside_its_block(new_browser: Any, tmp_path: Path) -> None:
    """Bug: the second line of a wrapped comment looked like code, and wrapped code was not indented."""
    page = tmp_path / "page.html"
    code = Code("with a:\n    # a comment" + " of many words" * 9 + "\n    " + "x" * 200)
    page.write_text(render_html(Document("t/1", "t", (code,), (), ())))
    phone = new_browser(390, 844)
    phone.get(page.as_uri())
    outer, inner, lines, width = phone.execute_script(
        "const pre = document.querySelector('pre'), code = pre.firstElementChild;"
        "const height = parseFloat(getComputedStyle(code).lineHeight);"
        "return [pre.clientWidth, pre.scrollWidth, code.getBoundingClientRect().height / height,"
        " document.documentElement.scrollWidth]"
    )
    assert outer <= width <= 390 < inner
    assert lines < 3.5
    assert (
        phone.execute_script("return getComputedStyle(document.querySelector('pre')).overflowX")
        == "auto"
    )


def test_a_phone_keeps_a_number_and_its_unit_on_one_line(new_browser: Any, tmp_path: Path) -> None:
    """Bug: lines ended between a number and its unit, as in `(440 / µs`."""
    page = tmp_path / "page.html"
    notes = [Note("x" * length + " (440 µs of 7.45 ms) 27 % of it") for length in range(30, 60)]
    page.write_text(render_html(Document("t/1", "t", (*notes,), (), ())), encoding="utf-8")
    phone = new_browser(390, 844)
    phone.get(page.as_uri())
    spans = phone.execute_script(
        "return [...document.querySelectorAll('p .span')].map((e) => [e.getClientRects().length, e.textContent])"
    )
    assert len(spans) == 3 * len(notes) and {lines for lines, _ in spans} == {1}
    assert {text for _, text in spans} == {"440 µs", "7.45 ms", "27 %"}


def test_a_phone_scrolls_neither_tables_nor_the_page(new_browser: Any, report_page: Path) -> None:
    phone = new_browser(390, 844)
    phone.get(report_page.as_uri())
    wide = "return document.documentElement.scrollWidth"
    assert phone.execute_script("return innerWidth") == 390
    assert phone.execute_script(wide) <= 390
    boxes = phone.execute_script(
        "return [...document.querySelectorAll('.scroll')].map((b) => [b.clientWidth, b.scrollWidth, b.tabIndex])"
    )
    assert all(inner <= outer <= 390 and place == 0 for outer, inner, place in boxes)
    charts = phone.execute_script(
        "return [...document.querySelectorAll('figure .scroll')].filter((b) => b.clientWidth)"
        ".map((b) => [b.clientWidth, b.scrollWidth])"
    )
    assert charts and all(inner <= outer for outer, inner in charts)
    sizes = phone.execute_script(
        "return [...document.querySelectorAll('td, p')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12


def test_names_that_look_like_markup_stay_text(browser: Any, tmp_path: Path) -> None:
    blocks = (
        *(Heading(NASTY, NASTY), Heading(NASTY), Note(NASTY, NASTY), Code(NASTY)),
        Table((Column("kernel", NASTY),), ((NASTY,),) * 8),
        *SAMPLES.values(),
        *[Heading("section")] * MOST_SECTIONS,  # only a long page has contents
    )
    page = tmp_path / "nasty.html"
    page.write_text(render_html(Document("t/1", NASTY, blocks, (), ())), encoding="utf-8")
    console(browser)
    browser.get(page.as_uri())
    assert console(browser) == []
    assert browser.title == NASTY
    assert len(browser.find_elements("css selector", "script")) == 1
    unfold(browser)
    for selector in ("td", "h1", "code", "nav a"):
        assert NASTY in browser.find_element("css selector", selector).text
    titles = browser.execute_script(
        "return [...document.querySelectorAll('svg title')].map((e) => e.textContent)"
    )
    assert any(NASTY in title for title in titles)


def test_print_has_no_controls_and_whole_charts(report: Any) -> None:
    report.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    size = {"width": 760, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    report.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        charts = report.execute_script(
            "return [...document.querySelectorAll('figure .wide svg')].filter((e) => e.checkVisibility())"
            ".map((e) => e.getBoundingClientRect().right)"
        )
        # Bug: a printout cut the charts at the right.
        assert charts and max(charts) <= 760
        shown = report.execute_script(
            "return [...document.querySelectorAll('nav, #theme, .filter')].filter((e) => e.checkVisibility()).length"
        )
        assert shown == 0
        assert re.match(
            r"rgb\(0, 0, 0\)", report.execute_script("return getComputedStyle(document.body).color")
        )
    finally:
        report.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        size["width"] = 1200
        report.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
