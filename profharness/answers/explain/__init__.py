"""Explain why a backend is chosen: by the rules, by PyTorch's own choice, and by the store."""
