"""Atlases contain measured cells of GPUs. A model predicts cells that were not measured.

docs/atlas.md describes the atlases and the model.
"""
