"""Start the observer. Python imports this module at startup if its folder is on the path.

This module hides the user's own `sitecustomize` module, and therefore runs that module afterwards.
"""

import os
import sys

# importlib.util has these functions too, but importing it takes a millisecond
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import (
    PathFinder,
    SourceFileLoader,
)

FOLDER = "PROFHARNESS_OBSERVE"  # the run folder; set by `profharness observe`


def _observe(here: str, folder: str) -> None:
    try:
        name = "profharness.recording.observer.hook"
        loader = SourceFileLoader(name, os.path.join(os.path.dirname(here), "hook.py"))  # noqa: PTH118, PTH120
        module = type(sys)(name)
        module.__file__ = loader.path
        module.__loader__ = loader
        sys.modules[name] = module
        loader.exec_module(module)
        module.wait_for_torch(folder)
    except Exception as error:
        print(f"profharness: this process is not observed: {error!r}", file=sys.stderr)


def _chain(here: str) -> None:
    """Run the user's own `sitecustomize` module, which this module hides."""
    sys.path[:] = [path for path in sys.path if path != here]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    _here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    if os.environ.get(FOLDER):
        _observe(_here, os.environ[FOLDER])
    _chain(_here)
