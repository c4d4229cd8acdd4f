"""The evaluation of measured times: warnings, fastest backends and sweeps."""
