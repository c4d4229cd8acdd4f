"""Why a backend is chosen: the rules, PyTorch's own answers and the store, joined."""
