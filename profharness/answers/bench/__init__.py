"""What a timed run says: figures, doubts, the best backend of each config, and what PyTorch's own
choice cost.
"""
