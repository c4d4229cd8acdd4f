"""The code that runs in an observed program, records its attention calls and profiles a few steps.

The rest of the package does not import this code. Python imports `startup/sitecustomize.py` when
the program starts. The other modules are loaded by path once the program has imported torch.
"""
