"""Fused kernels of the native decoder in Triton, each with a plain torch reference in `reference`.

Importing a kernel's module imports triton: only what runs on CUDA, or under Triton's interpreter, may do so.
"""
