"""Raw reports of nsys and ncu: they hold the environment of their process, so a copy is made of
their export.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from profharness.errors import MissingExtraError, ProfharnessError, TraceFormatError, UsageError
from profharness.nsight.failures import NsightError
from profharness.parse.packed import SUFFIX, unpacked

NSYS_REPORT = ".nsys-rep"
NCU_REPORT = ".ncu-rep"
# Suffix of a report, packed or not: what its export ends in.
EXPORTS = {
    f"{NSYS_REPORT}{SUFFIX}": ".sqlite",
    f"{NCU_REPORT}{SUFFIX}": ".csv",
    NSYS_REPORT: ".sqlite",
    NCU_REPORT: ".csv",
}
PRODUCTS = {".sqlite": "nsys", ".csv": "ncu"}


class StaleExportError(ProfharnessError):
    """The export beside a report cannot be trusted, and another one cannot be made."""


def report_suffix(name: str) -> str | None:
    """The suffix by which a file is a raw report; None for any other."""
    return next((suffix for suffix in EXPORTS if name.lower().endswith(suffix)), None)


def check_name(source: Path, output: Path) -> None:
    """Raises UsageError when the name of a copy promises what the copy cannot be."""
    suffix = report_suffix(source.name)
    wrong = report_suffix(output.name)
    if suffix is None:
        if wrong is not None:
            raise UsageError(
                f"{output}: a copy is never a {wrong}; keep the suffix of {source.name}"
            )
        return
    made = EXPORTS[suffix]
    if not output.name.lower().endswith((made, f"{made}{SUFFIX}")):
        raise UsageError(
            f"{output}: the copy of a {suffix} is a {made}, because a report holds the "
            f"environment of its process; name it {_stem(output.name)}{made}"
        )


def exported(report: Path, made: Path) -> Path:
    """An export of the report: the one beside it if it is newer than the report and an export of
    that product, else a new one at `made`.

    Raises StaleExportError where the one beside it will not do and no tool is there to make
    another, and what the exporters raise.
    """
    suffix = report_suffix(report.name) or ""
    beside = report.with_name(report.name[: -len(suffix)] + EXPORTS[suffix])
    doubt = _doubt(beside, report) if beside.is_file() else None
    if beside.is_file() and doubt is None:
        return beside
    made.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unpacked(report) as plain:
            _export(plain, made)
    except (NsightError, MissingExtraError) as error:
        if doubt is None:
            raise
        raise StaleExportError(
            f"{report}: {beside.name} beside it {doubt}, so it is not used in its place, and "
            f"another export cannot be made: {error}"
        ) from None
    return made


def _export(report: Path, output: Path) -> None:
    if report.name.lower().endswith(NSYS_REPORT):
        from profharness.nsight.nsys import export_report

        export_report(report, output)
    else:
        from profharness.parse.ncu_write import report_to_csv

        report_to_csv(report, output)


def _doubt(export: Path, report: Path) -> str | None:
    """Why an export is not to be taken for that of the report; None when it may be."""
    if export.stat().st_mtime_ns < report.stat().st_mtime_ns:
        return "is older than the report"
    product = PRODUCTS[export.suffix]
    try:
        _CHECKS[product](export)
    except TraceFormatError:
        return f"is no whole export of {product}"
    return None


def _check_nsys(export: Path) -> None:
    from profharness.parse.nsys_export import opened

    with opened(export, export):
        pass


def _check_ncu(export: Path) -> None:
    from profharness.parse.ncu_csv import read_table, read_text

    read_table(read_text(export), export)


_CHECKS: dict[str, Callable[[Path], None]] = {"nsys": _check_nsys, "ncu": _check_ncu}


def _stem(name: str) -> str:
    suffix = report_suffix(name)
    return name[: -len(suffix)] if suffix else Path(name).stem
