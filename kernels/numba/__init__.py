"""numba"""
