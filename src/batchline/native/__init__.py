"""Kernels in C++ for what torch does badly on CPUs: attention, linear layers and the steps between them.

`library` loads and calls them, `packing` puts weights into their order. Nothing outside needs the library: where it was
not built, or is turned off, everything runs on torch alone.
"""
