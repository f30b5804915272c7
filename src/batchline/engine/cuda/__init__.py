"""The engine on CUDA: attention over the blocked cache in Triton, and decode steps as CUDA graphs.

Imported on a CUDA device only (`placement`), since Triton comes with torch's CUDA builds alone. Nothing here makes the
host wait for the device within a step.
"""
