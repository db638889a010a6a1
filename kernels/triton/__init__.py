"""Triton kernels for CUDA and ROCm devices: paged decode, gather, and merges of partial results. They know torch tensors, and nothing of Forebay."""
