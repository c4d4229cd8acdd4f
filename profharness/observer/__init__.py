"""What goes into an observed program: it names attention calls and opens a short profiler window.

Nothing of the package imports this. The program finds `startup` first on its path, and loads the rest
by path once torch is there.
"""
