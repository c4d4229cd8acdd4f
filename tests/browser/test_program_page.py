"""The report on a program in a real browser: its sections, its bars and its timeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CONTRASTS, console, key, media, requests, unfold

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

# Width of the page and of everything in it that is not inside a box which scrolls.
OVERFLOW = """
const wide = [...document.querySelectorAll("main *")].filter((element) =>
  !element.closest(".scroll, .tip, canvas, pre, .bars .track, .bar") && element.getClientRects().length
  && element.getBoundingClientRect().right > innerWidth + 1);
return [document.documentElement.scrollWidth, wide.map((e) => e.outerHTML.slice(0, 120))];
"""
CUT = """
return [...document.querySelectorAll(".scroll > table")].filter((table) => table.getClientRects().length)
  .filter((table) => table.scrollWidth > table.parentElement.clientWidth + 1)
  .map((table) => table.id + ": " + table.tHead.textContent);
"""


@pytest.fixture(scope="module")
def browser(new_shared_browser: Any) -> Any:
    return new_shared_browser(1280)


@pytest.fixture
def page(browser: Any, program_pages: dict[str, Path]) -> Iterator[Any]:
    media(browser, "light")
    requests(browser), console(browser)
    browser.get(program_pages["training"].as_uri())
    yield browser


def view(page: Any) -> tuple[float, float]:
    """Return the period that the timeline shows, in ns."""
    script = (
        "return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {"
        "const { from, to } = document.querySelector('.timeline').dataset;"
        "done([Number(from), Number(to)]); })))"
    )
    begin, end = page.execute_script(script)
    return begin, end


def press(page: Any, action: str) -> None:
    button = page.find_element("css selector", f".timeline [data-do={action}]")
    # the page scrolls smoothly, and a click does not wait for that
    page.execute_script(
        "arguments[0].scrollIntoView({behavior: 'instant', block: 'center'})", button
    )
    button.click()


def send(page: Any, kind: str, **values: object) -> None:
    """Send an event to the canvas, at a place in CSS pixels from its corner."""
    script = """
    const canvas = document.querySelector(".timeline canvas");
    const box = canvas.getBoundingClientRect();
    const [kind, values] = arguments;
    const options = { bubbles: true, cancelable: true, ...values };
    options.clientX = box.left + (values.x ?? 0);
    options.clientY = box.top + (values.y ?? 0);
    const type = kind === "wheel" ? WheelEvent : PointerEvent;
    canvas.setPointerCapture = () => {};
    return canvas.dispatchEvent(new type(kind, options));
    """
    page.execute_script(script, kind, values)


def test_the_sections_stand_in_their_order(page: Any, program_pages: dict[str, Path]) -> None:
    assert console(page) == []
    asked = [
        url
        for url in requests(page)
        if not url.startswith(("data:", "chrome:", "chrome-untrusted:"))
    ]
    assert asked == [program_pages["training"].as_uri()]
    assert (
        page.find_element("tag name", "h1").text
        == page.title
        == "llama_train.json.gz: attention report"
    )
    assert "H200" in page.find_element("css selector", ".subtitle").text
    order = page.execute_script(
        "return [...document.querySelectorAll('.answer, h2, .bar, .bars, .timeline, table')]"
        ".map((e) => e.tagName === 'H2' ? e.firstChild.data.trim() : e.tagName === 'TABLE' ? 'table' : e.className)"
    )
    shown = order[: order.index("timeline") + 1]
    assert shown == [
        *("answer", "Advice", "The step", "bar", "Layers", "table", "table"),
        *("Top kernels", "table"),
        *("Timeline", "timeline"),
    ]
    open_ = page.execute_script("return document.querySelectorAll('details.fold[open]').length")
    assert open_ == 0


def test_the_parts_of_the_step_add_up(page: Any) -> None:
    widths = page.execute_script(
        "return [...document.querySelectorAll('.bar i')].map((e) => e.style.width)"
    )
    assert sum(float(width.rstrip("%")) for width in widths) == pytest.approx(100, abs=0.1)
    legend = page.find_element("css selector", ".legend.parts").text
    for word in ("attention: cudnn", "matrix products", "optimizer", "other kernels", "idle"):
        assert word in legend
    timeline = page.find_element("css selector", "figure.timeline .legend").text
    assert "optimizer" in timeline.splitlines()


def test_a_backend_has_one_color_on_the_whole_page(page: Any) -> None:
    colors = page.execute_script(
        "return [...document.querySelectorAll('.legend li')].filter((e) => e.textContent.includes('cudnn'))"
        ".map((e) => getComputedStyle(e.firstChild).backgroundColor)"
    )
    assert len(colors) == 2
    assert len(set(colors)) == 1
    painted = page.execute_script(
        "const canvas = document.querySelector('canvas');"
        "const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
        "let count = 0;"
        "for (let at = 0; at < data.length; at += 4) "
        "if (`rgb(${data[at]}, ${data[at + 1]}, ${data[at + 2]})` === arguments[0]) count += 1;"
        "return count",
        colors[0],
    )
    assert painted > 100


def test_a_cut_name_of_a_kernel_has_a_tip_and_opens(page: Any) -> None:
    name = page.execute_script(
        "return [...document.querySelectorAll('main > .scroll details.full')]"
        ".find((each) => each.firstChild.textContent.startsWith('elementwise<'))"
    )
    short = name.find_element("tag name", "summary")
    full = name.find_element("tag name", "div")
    assert not full.is_displayed()
    page.execute_script("arguments[0].click()", short)
    assert full.is_displayed()
    assert full.text.startswith("void at::native::") and len(full.text) > len(short.text)
    assert short.get_attribute("title").split("\n")[0] == full.text


def test_buttons_zoom_and_reset(page: Any) -> None:
    whole = view(page)
    press(page, "in")
    begin, end = view(page)
    assert end - begin == pytest.approx((whole[1] - whole[0]) / 2)
    press(page, "out")
    assert view(page) == pytest.approx(whole)
    for _ in range(40):
        press(page, "in")
    begin, end = view(page)
    assert 0 < end - begin <= 20.1  # ns
    press(page, "reset")
    assert view(page) == whole
    assert "ms" in page.find_element("css selector", ".timeline output").text


def test_the_wheel_zooms_with_ctrl_and_scrolls_without(page: Any) -> None:
    whole = view(page)
    send(page, "wheel", deltaY=-200, x=300, y=60)
    assert view(page) == whole
    send(page, "wheel", deltaY=-200, x=300, y=60, ctrlKey=True)
    begin, end = view(page)
    assert end - begin == pytest.approx((whole[1] - whole[0]) / 2)
    assert begin > 0
    send(page, "wheel", deltaX=100, x=300, y=60)
    assert view(page)[0] > begin


def test_two_fingers_pinch_and_one_drags(page: Any) -> None:
    whole = view(page)
    for finger, place in ((1, 400), (2, 600)):
        send(page, "pointerdown", pointerId=finger, x=place, y=60)
    send(page, "pointermove", pointerId=2, x=800, y=60)
    begin, end = view(page)
    assert end - begin == pytest.approx((whole[1] - whole[0]) / 2, rel=0.01)
    for finger in (1, 2):
        send(page, "pointerup", pointerId=finger, x=400, y=60)
    send(page, "pointerdown", pointerId=3, x=400, y=60)
    send(page, "pointermove", pointerId=3, x=300, y=60)
    assert view(page)[0] > begin
    assert view(page)[1] - view(page)[0] == pytest.approx(end - begin)


def test_keys_move_zoom_and_find_attention(page: Any) -> None:
    whole = view(page)
    page.execute_script("document.querySelector('canvas').focus()")
    key(page, "ARROW_UP")
    begin, end = view(page)
    assert end - begin < whole[1] - whole[0]
    key(page, "ARROW_RIGHT")
    assert view(page)[0] > begin
    key(page, "HOME")
    assert view(page) == whole
    press(page, "next")
    tip = page.find_element("css selector", ".tip")
    assert tip.is_displayed()
    assert "attention: cudnn" in tip.text
    assert "LlamaAttention" in tip.text
    first = view(page)
    press(page, "next")
    assert sum(view(page)) > sum(first)


def test_a_tooltip_names_the_kernel_below_the_pointer(page: Any) -> None:
    press(page, "next")
    begin, end = view(page)
    box = page.execute_script(
        "const box = document.querySelector('canvas').getBoundingClientRect(); return [box.width, box.height]"
    )
    send(page, "pointermove", x=box[0] / 2, y=box[1] - 20)
    tip = page.find_element("css selector", ".tip")
    lines = [part.text for part in tip.find_elements("css selector", "b, span")]
    assert lines[0]
    assert "from" in lines[1]
    assert 0 < begin < end
    send(page, "pointerleave")
    assert not tip.is_displayed()


@pytest.mark.parametrize("name", ["training", "decoding", "two", "serving"])
def test_nothing_is_cut_on_a_desktop_and_on_a_phone(
    new_browser: Any, browser: Any, program_pages: dict[str, Path], name: str
) -> None:
    browser.get(program_pages[name].as_uri())
    assert browser.execute_script(CUT) == []
    unfold(browser)
    width, wide = browser.execute_script(OVERFLOW)
    assert width <= 1280 and wide == []
    phone = new_browser(390, 844)
    phone.get(program_pages[name].as_uri())
    unfold(phone)
    width, wide = phone.execute_script(OVERFLOW)
    assert width <= 390 and wide == []
    sizes = phone.execute_script(
        "return [...document.querySelectorAll('main *')].filter((e) => e.childNodes.length && "
        "[...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))"
        ".map((e) => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12


@pytest.mark.parametrize("width", [390, 1280])
def test_the_bars_of_layers_have_the_lengths_of_their_times(
    new_browser: Any, program_pages: dict[str, Path], width: int
) -> None:
    """Bug: the bars of decode (11 µs) and prefill (45 µs) had the same length."""
    browser = new_browser(width)
    browser.get(program_pages["serving"].as_uri())
    bars = browser.execute_script(
        "return [...document.querySelectorAll('.meter')].filter((e) => e.checkVisibility())"
        ".map((e) => [e.firstChild.getBoundingClientRect(), e.parentElement])"
        ".map(([bar, cell]) => [bar.width, Number(cell.dataset.v), parseFloat(cell.textContent),"
        " bar.left, bar.bottom - cell.getBoundingClientRect().top])"
    )
    (decode, prefill) = bars
    assert decode[0] / prefill[0] == pytest.approx(decode[1] / prefill[1], rel=0.02)
    assert [bar[2] for bar in bars] == pytest.approx([66.4, 273])  # beside each bar
    assert decode[3] == pytest.approx(prefill[3])
    assert all(bottom < 30 for *_, bottom in bars)  # on the line of its value
    colors = browser.execute_script(
        "const color = (element) => getComputedStyle(element).backgroundColor;"
        "const legend = [...document.querySelectorAll('.legend li')];"
        "const own = legend.find((e) => e.textContent.includes('flashinfer')).firstChild;"
        "return [color(own), ...[...document.querySelectorAll('.meter i')].map(color)]"
    )
    assert len(colors) > 2 and len(set(colors)) == 1  # that of the backend
    browser.get(program_pages["training"].as_uri())  # has one group of layers
    shown = (
        "return [...document.querySelectorAll('.meter, ul.bars')].some((e) => e.checkVisibility())"
    )
    assert browser.execute_script(shown) is False


@pytest.mark.parametrize("name", ["training", "serving"])
def test_a_short_page_shows_each_table_once_and_no_contents(
    browser: Any, program_pages: dict[str, Path], name: str
) -> None:
    """Bug: `The step as a table` repeated the list below the bar, and `Attention by layer` twice."""
    browser.get(program_pages[name].as_uri())
    assert not browser.find_elements("css selector", "nav")
    titles = browser.execute_script(
        "return [...document.querySelectorAll('h2, h3')].map((e) => e.firstChild.data.trim())"
    )
    assert [title for title in titles if "as a table" in title] == ["The timeline as a table"]
    assert not [title for title in titles if title.startswith("Attention by layer")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_readable_in_both_themes(page: Any, scheme: str) -> None:
    media(page, scheme)
    unfold(page)
    told = page.execute_script(CONTRASTS)
    assert told[0] >= 4.5, told


def test_a_printout_is_light_and_unfolded(page: Any) -> None:
    media(page, "dark")
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    folds = page.execute_script(
        "const all = [...document.querySelectorAll('details.fold')];"
        "return [all.length, all.filter((e) => e.open).length]"
    )
    assert folds[0] == folds[1] > 3
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    shown = page.execute_script(
        "return [...document.querySelectorAll('nav, #theme, .filter, .tools, .keys')]"
        ".filter((e) => e.checkVisibility()).length"
    )
    background = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    assert shown == 0
    assert background == "rgb(255, 255, 255)"
    assert page.execute_script("return document.querySelectorAll('details.fold[open]').length") == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_the_labels_of_a_bar_fit_their_segments(
    new_browser: Any, program_pages: dict[str, Path], width: int
) -> None:
    """Bug: on a phone, the labels of neighbours read `8 %10 %`."""
    browser = new_browser(width)
    for name in ("training", "two"):
        browser.get(program_pages[name].as_uri())
        shown = browser.execute_script(
            "return [...document.querySelectorAll('.bar b')].filter((b) => b.getClientRects().length)"
            ".map((b) => [b.getBoundingClientRect().width, b.parentElement.clientWidth])"
        )
        assert shown and all(text < room for text, room in shown), shown


def test_a_phone_shows_each_value_of_a_row_with_its_name(
    new_browser: Any, program_pages: dict[str, Path], report_page: Path
) -> None:
    """Bug: a phone showed 3 of 9 columns, and the config was not among them."""
    browser = new_browser(390, 844)
    for page in (program_pages["training"], program_pages["two"], report_page):
        browser.get(page.as_uri())
        unfold(browser)
        tables = browser.execute_script(
            "return [...document.querySelectorAll('.cards')].map((table) => ["
            "[...table.tHead.rows[0].cells].map((th) => th.textContent.trim()),"
            "...[...table.tBodies[0].rows].slice(0, 3).map((row) => [...row.cells].map((td) =>"
            "[td.dataset.label ?? '', getComputedStyle(td, '::before').content,"
            " td.getBoundingClientRect().right, td.offsetHeight > 0]))])"
        )
        assert tables
        for titles, *rows in tables:
            for row in rows:
                (_, before, _, _), *others = row
                assert before == "none"  # the first value is the title of the card
                assert all(right <= 390 for *_, right, _ in row)
                assert [label for label, *_ in row] == titles
                assert all(label in before or not shown for label, before, _, shown in others)
        assert browser.execute_script(CUT) == []


def test_a_phone_shows_short_columns_side_by_side(new_browser: Any, report_page: Path) -> None:
    """Bug: the latencies of 20 cells were a list of 20 cards."""
    browser = new_browser(390, 844)
    browser.get(report_page.as_uri())
    heads, height_of_head, rows, width = browser.execute_script(
        "const table = [...document.querySelectorAll('.grouped')].find("
        "  (each) => each.textContent.includes('p10 µs/call') && each.checkVisibility());"
        "const lefts = (row) => [...row.cells].slice(1).map("
        "  (cell) => Math.round(cell.getBoundingClientRect().left));"
        "return [lefts(table.tHead.rows[0]),"
        "  Math.max(...[...table.tHead.rows[0].cells].map((cell) => cell.firstChild.offsetHeight)),"
        "  [...table.tBodies[0].rows].map((row) => ["
        "  lefts(row), row.cells[0].offsetHeight > 0, row.offsetHeight]),"
        "  document.documentElement.scrollWidth]"
    )
    assert width <= 390
    assert len(set(heads)) == len(heads)
    assert height_of_head < 50  # two lines; bug: `µs/call` was broken, so there were three
    assert all(lefts == heads for lefts, *_ in rows)
    assert rows[0][1] and not rows[1][1]  # a config is shown once, above its rows
    assert all(height < 40 for _, head, height in rows if not head)


def test_a_card_is_compact(new_browser: Any, report_page: Path) -> None:
    """Bug: each card repeated the config and had its values in ragged lines, below a card of titles."""
    browser = new_browser(390, 844)
    browser.get(report_page.as_uri())
    heads, cards = browser.execute_script(
        "const table = [...document.querySelectorAll('.cards')].find("
        "  (each) => each.textContent.includes('% of call') && each.checkVisibility());"
        "return [table.tHead.offsetHeight, [...table.tBodies[0].rows].map((row) =>"
        "  [...row.cells].filter((cell) => cell.offsetHeight).map((cell) => ["
        "    cell.classList.contains('l'), Math.round(cell.getBoundingClientRect().left),"
        "    Math.round(cell.getBoundingClientRect().top)]))]"
    )
    assert heads == 0
    first, second, *_ = cards
    assert len(second) == len(first) - 1  # the config is shown once
    for card in (first[1:], second):
        short = [(left, top) for long, left, top in card if not long]
        assert len(short) > 3
        assert len({left for left, _ in short}) == 2
        assert len({top for _, top in short}) == (len(short) + 1) // 2


def test_a_phone_shows_the_first_cards_of_a_long_table(
    new_browser: Any, program_pages: dict[str, Path]
) -> None:
    """Bug: the table of kernels was 1,400 pixels tall on a phone."""
    browser = new_browser(390, 844)
    browser.get(program_pages["training"].as_uri())
    script = (
        "const table = [...document.querySelectorAll('.cards')].find((each) =>"
        "  each.checkVisibility() && each.tBodies[0].rows.length >= 10);"
        "const box = table.parentElement.nextElementSibling.querySelector('input');"
        "const count = () => [...table.tBodies[0].rows].filter((row) => row.offsetHeight).length;"
        "const first = count(); box.click();"
        "return [first, count(), table.tBodies[0].rows.length]"
    )
    first, all_shown, rows = browser.execute_script(script)
    assert (first, all_shown) == (5, rows)


def test_a_wide_page_does_not_break_titles_if_the_table_fits(
    new_browser: Any, program_pages: dict[str, Path]
) -> None:
    """Bug: titles such as `mean µs/step` took two lines beside wide columns of texts."""
    browser = new_browser(1280, 900)
    browser.get(program_pages["training"].as_uri())
    heights, overflow = browser.execute_script(
        "const tables = [...document.querySelectorAll('table.titles')].filter("
        "  (each) => each.checkVisibility());"
        "return [tables.map((each) => each.tHead.offsetHeight),"
        "  tables.some((each) => each.parentElement.scrollWidth > each.parentElement.clientWidth)]"
    )
    assert len(heights) >= 2 and max(heights) < 40
    assert not overflow


def test_a_card_hides_when_it_is_filtered_out(new_browser: Any, report_page: Path) -> None:
    browser = new_browser(390, 844)
    browser.get(report_page.as_uri())
    script = (
        "const field = document.querySelector('.filter input');"
        "field.value = 'flash'; field.dispatchEvent(new Event('input'));"
        "return [...document.getElementById(field.getAttribute('aria-controls')).tBodies[0].rows]"
        ".map((row) => [row.textContent.includes('flash'), row.offsetHeight > 0])"
    )
    shown = browser.execute_script(script)
    assert shown and all(found == visible for found, visible in shown)


@pytest.mark.parametrize("width", [390, 800, 1024, 1280, 1600])
def test_no_table_is_cut(
    new_browser: Any, program_pages: dict[str, Path], report_page: Path, width: int
) -> None:
    """Bug: whole titles made a table of phases wider than the page, which cut its last column.

    A small tablet has no room for the widest tables, which scroll and fade out at the edge.
    """
    browser = new_browser(width, 844)
    for page in (*program_pages.values(), report_page):
        browser.get(page.as_uri())
        unfold(browser)
        cut = browser.execute_async_script(
            "const done = arguments[0]; setTimeout(() => done("
            "  [...document.querySelectorAll('.scroll > table')].map((t) => [t, t.parentElement])"
            "  .filter(([t, box]) => box.clientWidth && t.scrollWidth > box.clientWidth)"
            "  .map(([t, box]) => [t.rows[0].cells.length, box.matches('.more'),"
            "    getComputedStyle(box).overflowX])), 100)"
        )
        assert cut == [] or width == 800
        assert all(each[0] > 12 and each[1:] == [True, "auto"] for each in cut)
        assert console(browser) == []


def test_a_wide_table_on_a_tablet_keeps_its_first_column_and_shows_that_it_continues(
    new_browser: Any, report_page: Path
) -> None:
    browser = new_browser(680, 844)
    browser.get(report_page.as_uri())
    unfold(browser)
    found = """
        const box = [...document.querySelectorAll("main .scroll:has(> table)")]
            .find((box) => box.scrollWidth > box.clientWidth);
        box.scrollLeft = arguments[0] * (box.scrollWidth - box.clientWidth);
        const done = arguments[1];
        requestAnimationFrame(() => requestAnimationFrame(() => done([
            box.querySelector("td").getBoundingClientRect().left - box.getBoundingClientRect().left,
            getComputedStyle(box).maskImage !== "none",
        ])));
    """
    for place, continues in ((0, True), (0.5, True), (1, False)):
        left, fades = browser.execute_async_script(found, place)
        assert 0 <= left <= 1 and fades == continues
