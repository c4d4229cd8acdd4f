"""PyTorch's dispatch rules as data: which backend it selects, and the reasons against the others."""
