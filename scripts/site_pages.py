"""Build the site from the same files that GitHub shows: a hook of MkDocs, used by mkdocs.yml.

The pages keep the paths that they have in the repository, so that their links work in both places.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = (  # files outside of docs/ that pages link to
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "traces/README.md",
    "traces/atlas-h200.tar.xz",
    "traces/cublas-h200.json.xz",
    "traces/studies.tar.xz",
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that GitHub gives them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = github_anchor
    return config


def github_anchor(heading: str, separator: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Move the files of docs/ into a folder of that name, and add those of OUTSIDE beside it."""
    folder = Path(config.docs_dir)
    paths = {ROOT / name for name in OUTSIDE}
    paths |= {folder / file.src_uri for file in files if file.src_dir == config.docs_dir}
    moved = [
        File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
        for path in sorted(paths)
    ]
    return Files([*moved, *(file for file in files if file.src_dir != config.docs_dir)])
