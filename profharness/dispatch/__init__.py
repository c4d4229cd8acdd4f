"""Why a backend was or was not taken: reasons that PyTorch gives, as codes."""
