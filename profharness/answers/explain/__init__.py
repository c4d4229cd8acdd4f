"""Why a backend is chosen, for one config or many: joins the rules, PyTorch's own answers and the
store.
"""
