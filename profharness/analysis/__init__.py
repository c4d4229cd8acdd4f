"""What one cell's figures say: findings with their evidence, a bottleneck, and ranked remedies."""

from profharness.analysis.analyze import analyze, analyze_all, sweep
from profharness.analysis.model import CellAnalysis, Evidence, Finding, Machine, Remedy, machine_of

__all__ = [
    "CellAnalysis",
    "Evidence",
    "Finding",
    "Machine",
    "Remedy",
    "analyze",
    "analyze_all",
    "machine_of",
    "sweep",
]
