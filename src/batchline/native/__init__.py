"""Kernels in C++ for what torch does badly on CPUs: attention, linear layers and the steps between them.

`library` loads them and calls those of decoders, `int8` those of linear layers in 8 bits, `encoder` those of encoders;
`packing` puts weights into their order. Nothing outside needs them: where they were not built, or are turned off,
everything runs on torch alone.
"""
