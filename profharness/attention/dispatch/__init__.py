"""PyTorch's dispatch rules: which backend PyTorch selects, and why it refuses other backends."""
