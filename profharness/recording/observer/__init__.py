"""The code that runs in an observed program: it records attention calls and profiles a short window.

The rest of the package does not import it. The program finds `startup` first on its path, and loads
the other modules by path once torch is imported.
"""
