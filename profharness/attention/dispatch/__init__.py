"""PyTorch's dispatch rules as data: which backend PyTorch selects, and why it refuses the others."""
