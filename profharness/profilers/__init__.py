"""Nsight Systems and Nsight Compute as command-line tools: where they are, how they are called, and
how they fail.
"""
