"""Kernels of paged decode, of the doors and of sampling in Triton: on CUDA and ROCm devices, and in Triton's interpreter."""
