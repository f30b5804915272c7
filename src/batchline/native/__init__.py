"""C++ kernels for operations that are slow in torch on CPUs: attention, linear layers, and the steps between them.

`library` loads them and calls the kernels for decoders, `int8` those for 8-bit linear layers, and `encoder` those for
encoders. `packing` reorders weights for them. They are optional: if they were not built, or are turned off, everything
runs on torch.
"""
