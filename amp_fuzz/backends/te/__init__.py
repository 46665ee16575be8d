"""Transformer Engine: with its kernels on CUDA, and its Python code alone on the CPU."""
