"""The evaluation of measured times: intervals, doubts, best backends and sweeps."""
