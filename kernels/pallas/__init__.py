"""Kernels for TPUs: Pallas where a kernel of ours pays, XLA where its own scatter and gather do."""
