"""The one thing of the build that pyproject.toml cannot say: `kernels/` travels in the wheel.

Its home stays the top-level folder, which an editable install uses as it is.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

KERNELS = sorted(
    path for path in Path("kernels").iterdir() if path.suffix in (".py", ".cu", ".cuh")
)
TARGET = "profharness/_kernels"  # where backends/sources.py looks for them


class BuildWithKernels(build_py):
    """Copies the implementations into the package, and names them as sources for an sdist."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.mkpath(str(Path(self.build_lib, TARGET)))
            for path in KERNELS:
                self.copy_file(str(path), str(Path(self.build_lib, TARGET, path.name)))

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *map(str, KERNELS)]


setup(cmdclass={"build_py": BuildWithKernels})
