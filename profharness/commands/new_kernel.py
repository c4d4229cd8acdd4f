"""`profharness new-kernel`: create a template for an attention implementation, and its test."""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path
from typing import Annotated

import click

from profharness.attention.backends import ALL, BACKENDS
from profharness.attention.backends.sources import FOLDER, implementation_names
from profharness.attention.backends.templates import check_text, kernel_text
from profharness.commands._command import as_is, command, declaration_of
from profharness.commands._options import Option
from profharness.commands._output import echo
from profharness.commands._types import PathLike
from profharness.errors import CaptureError, UsageError

Name = Annotated[str, Option()]
Triton = Annotated[bool, Option(("--triton",), help="Create a Triton kernel.")]
Cuda = Annotated[
    bool, Option(("--cuda",), help="Create a CUDA kernel that is compiled at the first call.")
]
KernelFolder = Annotated[
    PathLike,
    Option(
        ("--out",),
        type=click.Path(file_okay=False, path_type=Path),
        help="The folder for NAME.py. The test is written to a folder named `tests` next to the "
        "folder of NAME.py.",
    ),
]


@command("new-kernel", frame=as_is)
def new_kernel(
    name: Name, *, triton: Triton = False, cuda: Cuda = False, out: KernelFolder = "kernels"
) -> None:
    """Create a template for your own attention implementation, and a test for it.

    The command writes NAME.py with a working implementation, by default in plain torch. The test
    test_NAME.py compares the implementation with plain attention in fp64. Existing files are not
    overwritten.

    \b
    Examples:
      profharness new-kernel mine
      profharness new-kernel mine --triton
    """
    if triton and cuda:
        raise UsageError("choose either --triton or --cuda, not both")
    kind = "triton" if triton else "cuda" if cuda else "torch"
    if not name.isidentifier() or name.startswith("_") or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} cannot be the name of a Python module; use letters, digits and _, but no "
            "keyword"
        )
    if name in sys.builtin_module_names or importlib.util.find_spec(name) is not None:
        raise UsageError(f"a module {name!r} already exists; choose another name")
    if name in BACKENDS or name in (ALL, FOLDER, *implementation_names()):
        raise UsageError(f"a backend {name!r} already exists; choose another name")
    folder = Path(out)
    kernel = folder / f"{name}.py"
    test = folder.parent / "tests" / f"test_{name}.py"
    # check both files before writing, so that an error leaves neither of them
    for path in (kernel, test):
        if path.exists():
            raise UsageError(
                f"{path} already exists; choose another name, or another folder with --out"
            )
    texts = {kernel: kernel_text(name, kind)}
    texts[test] = check_text(name, kind, f"../{folder.resolve().name}/{name}.py")
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # mode x does not overwrite a file created in the meantime
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise CaptureError(
                f"cannot write {path}: {error.strerror}; choose another folder with --out"
            ) from None
    backend = name if folder == Path("kernels") else kernel.as_posix()
    echo(f"wrote {kernel} and {test}; next:")
    echo(f"  pytest {test}")
    echo(f"  profharness capture 2,8,512,64 --backend {backend},math")
    echo("  profharness diff math " + backend)


DECLARATION = declaration_of(new_kernel)
