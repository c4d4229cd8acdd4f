"""The result of a timed run: figures, doubts, the best backend of each config, and what PyTorch's
own choice cost.
"""
