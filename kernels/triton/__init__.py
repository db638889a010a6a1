"""Triton kernels for CUDA and ROCm devices, or interpreted: they know torch tensors, and nothing of Forebay."""
