"""Measured cells of many GPUs, and the model that predicts the others (docs/atlas.md)."""
