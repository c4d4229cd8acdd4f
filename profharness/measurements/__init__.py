"""Measured times: their intervals, doubts, best backends and sweeps."""
