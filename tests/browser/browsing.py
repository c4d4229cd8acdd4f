"""Helpers of tests in a browser: requests, messages, colours, keys and folded sections."""

from __future__ import annotations

import base64
import json
from typing import Any

CONTRASTS = """
const luminance = (color) => {
  const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const color = getComputedStyle(element).backgroundColor;
    if (!/, 0\\)$|transparent/.test(color)) return color;
  }
  return getComputedStyle(document.documentElement).backgroundColor;
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let worst = [99, "", ""];
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const text = walker.currentNode.data.trim();
  if (!text || !element.checkVisibility({visibilityProperty: true})) continue;
  if (element.closest(".same")) continue;  // repeats the value above
  if (["TITLE", "SCRIPT", "STYLE", "title"].includes(element.tagName)) continue;
  const style = getComputedStyle(element);
  if (element.closest("svg") && style.fill === "rgb(255, 255, 255)") continue;  // on a tile
  const ink = element.closest("svg") ? style.fill : style.color;
  const [low, high] = [luminance(ink), luminance(behind(element))].sort((a, b) => a - b);
  const contrast = (high + 0.05) / (low + 0.05);
  if (contrast < worst[0]) worst = [contrast, text, element.tagName];
}
return worst;
"""


def requests(browser: Any) -> list[str]:
    """The address of everything that the page asked for."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]


def console(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def media(browser: Any, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def pixels(browser: Any) -> bytes:
    return base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {})["data"])


def key(browser: Any, name: str) -> None:
    """Press a key wherever the focus is."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    ActionChains(browser).send_keys(getattr(Keys, name)).perform()


def unfold(browser: Any) -> None:
    """Open every folded section."""
    browser.execute_script(
        "document.querySelectorAll('details').forEach((d) => { d.open = true; })"
    )
