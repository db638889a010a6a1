"""CPU kernels in numba: paged decode attention and the doors of a KV pool. They know numpy arrays, and nothing of
Forebay."""
