"""The first page of `profharness serve` in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_serve import serving

from profharness.store import ingest_path

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
MODELS = Path(__file__).parents[2] / "traces" / "models"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    for name in ("llama_prefill", "llama_eager"):
        ingest_path(tmp_path / "s.db", MODELS / f"{name}.json.gz")
    with serving("--store", tmp_path / "s.db") as (_, address):
        yield f"http://{address}/"


@pytest.mark.parametrize("width", [390, 1280])
def test_the_first_page_leads_to_reports(new_browser: Any, address: str, width: int) -> None:
    browser = new_browser(width)
    browser.get(address)
    titles = [each.text for each in browser.find_elements("css selector", "h2")]
    assert titles[:4] == ["What is stored", "What is slow", "What changed", "Questions"]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.find_element("partial link text", "llama_eager.json.gz").click()
    assert "llama_eager.json.gz" in browser.find_element("css selector", "h1").text
    browser.back()
    browser.find_element("partial link text", "→").click()
    assert browser.title == "llama_prefill.json.gz → llama_eager.json.gz: attention report"
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [each for each in messages if each["method"] == "Network.requestWillBeSent"]
    addresses = {each["params"]["request"]["url"] for each in sent}
    assert {url for url in addresses if url.startswith("http") and address not in url} == set()
    # Datasette's pages have a script for its menu, which the policy of the server blocks.
    messages = [entry["message"] for entry in browser.get_log("browser")]
    assert [text for text in messages if "Executing inline script" not in text] == []
