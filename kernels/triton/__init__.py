"""Triton kernels for CUDA and ROCm: paged decode, gather, merges of partial results. They know torch, and nothing of Forebay."""
