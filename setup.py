"""What pyproject.toml cannot say of the build: `kernels/` travels in the wheel, and the scanner of
traces is compiled.

The home of `kernels/` stays the top-level folder, which an editable install uses as it is. One
compiled scanner serves every Python from 3.11 on; without a C compiler the rest is installed.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

KERNELS = sorted(
    path for path in Path("kernels").iterdir() if path.suffix in (".py", ".cu", ".cuh")
)
TARGET = "profharness/_kernels"  # where backends/sources.py looks for them
SCANNER = Extension(
    "profharness.traces._scanner",
    ["profharness/traces/scanner.c"],
    depends=["profharness/traces/json.h"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    optional=True,
)


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


setup(
    cmdclass={"build_py": BuildWithKernels},
    ext_modules=[SCANNER],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
