"""A headless Chromium driven by selenium, and pages made from real runs and from nasty names."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from profharness.commands.report import report_document
from profharness.render.renderers import RENDERERS
from profharness.store import ingest_path, open_store

ROOT = Path(__file__).parents[2]
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
Browser = Any
NewBrowser = Callable[..., Browser]


@contextmanager
def browsers(folders: pytest.TempPathFactory) -> Iterator[NewBrowser]:
    """Yield a function that starts a browser of a width in pixels. Close all browsers at the end."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip(f"{'chromedriver' if binary else 'a Chromium'} is not installed")
    opened: list[Browser] = []

    def start(width: int = 1200, height: int = 900) -> Browser:
        options = webdriver.ChromeOptions()
        options.binary_location = binary
        profile = folders.mktemp("profile")
        for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1200,900"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        opened.append(browser)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        return browser

    try:
        yield start
    finally:
        for browser in opened:
            browser.quit()


@pytest.fixture
def new_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewBrowser]:
    with browsers(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="module")
def new_shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewBrowser]:
    """Start browsers that all tests of a module use."""
    with browsers(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def program_pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports on a training step, on decoding, on two programs, on an engine, and on a run of
    `bench`, as files.
    """
    folder = tmp_path_factory.mktemp("program pages")
    files = {
        "training": ["models/llama_train.json.gz"],
        "decoding": ["models/llama_generate"],
        "two": ["models/llama_eager.json.gz", "models/llama_prefill.json.gz"],
        "serving": ["serving/eager.json.gz"],
        "bench": ["h200-torch2.11"],
    }
    pages = {}
    for name, traces in files.items():
        store = folder / f"{name}.db"
        for trace in traces:
            ingest_path(store, ROOT / "traces" / trace)
        with open_store(store) as opened:
            document = report_document(opened, [row.run for row in opened.runs()])
        pages[name] = folder / f"{name}.html"
        pages[name].write_text(RENDERERS["html"](document), encoding="utf-8")
    return pages


@pytest.fixture(scope="session")
def report_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on both captured runs, as a file."""
    folder = tmp_path_factory.mktemp("report page")
    for run in sorted((ROOT / "traces").glob("h200-*")):
        ingest_path(folder / "store.db", run)
    with open_store(folder / "store.db") as store:
        document = report_document(store, [row.run for row in store.runs()])
    page = folder / "report & page.html"
    page.write_text(RENDERERS["html"](document), encoding="utf-8")
    return page
