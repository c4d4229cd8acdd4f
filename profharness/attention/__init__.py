"""Attention problems (configs, FLOPs and bytes), backends, and PyTorch's dispatch rules."""
