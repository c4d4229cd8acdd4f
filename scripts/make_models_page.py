"""Write the maps of traces/models into docs/models.md, between its two marks.

python scripts/make_models_page.py [--check]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from profharness.commands.layers.tables import layers_document
from profharness.program.layer_map import find_layers
from profharness.render.terminal import render_table
from profharness.store import ingest_path, open_store

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- maps -->\n", "<!-- end of maps -->\n"
TORCH = "2.11"  # release of the traces


def maps() -> str:
    """Return the map of every trace, as printed by `profharness layers` at a width of 200."""
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "models.db"
        for path in sorted((ROOT / "traces" / "models").iterdir()):
            (result,) = ingest_path(store, path)
            with open_store(store) as opened:
                layers = find_layers(opened, result.run, torch=TORCH)
            own = replace(layers, store=None)  # commands on the page use the default store
            text = render_table(layers_document(own), width=200).rstrip()
            name = path.name.removesuffix(".json.gz")
            parts.append(f"### {name}\n\n```text\n{text}\n```\n")
    return "\n" + "\n".join(parts) + "\n"


def main() -> None:
    """Write the page, or with --check report whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    made = f"{head}{BEGIN}{maps()}{END}{tail}"
    if given.check:
        sys.exit(0 if made == page else "docs/models.md is out of date")
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
