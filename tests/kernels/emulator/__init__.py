"""Kernels of .cu files run on the CPU, for tests; see `emulate`."""

from emulator.launch import COMPILER, EmulatorError, compile_kernels, emulate

__all__ = ["COMPILER", "EmulatorError", "compile_kernels", "emulate"]
