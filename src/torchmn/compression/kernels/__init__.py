"""Kernels of the codecs: reference, CPU and CUDA, and the layout of their bytes."""
