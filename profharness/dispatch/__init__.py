"""Why a backend is or is not taken: PyTorch's dispatch rules as data, and its own reasons as codes."""
