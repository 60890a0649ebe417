"""Codec kernels: reference, CPU and CUDA, and their byte format."""
