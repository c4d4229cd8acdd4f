"""The Python interface, for editors and type checkers. The functions are imported at first use."""

from profharness.commands._python import cells as cells
from profharness.commands._python import launches as launches
from profharness.commands._python import observe as observe
from profharness.commands._python import query as query
from profharness.commands.analyze import analyze as analyze
from profharness.commands.backends import list_backends as list_backends
from profharness.commands.bench import bench as bench
from profharness.commands.capture import capture as capture
from profharness.commands.capture import resume as resume
from profharness.commands.diff import diff as diff
from profharness.commands.doctor import run_doctor as run_doctor
from profharness.commands.explain import explain as explain
from profharness.commands.explain_kernel import explain_kernel as explain_kernel
from profharness.commands.export import export as export
from profharness.commands.ingest import ingest as ingest
from profharness.commands.kernels import kernels as kernels
from profharness.commands.layers import layers as layers
from profharness.commands.predict import predict as predict
from profharness.commands.ranks import ranks as ranks
from profharness.commands.report import report as report
from profharness.commands.repro import repro as repro
from profharness.commands.runs import runs as runs
from profharness.commands.scrub import scrub_run as scrub_run
from profharness.commands.verify import verify as verify

__version__: str
