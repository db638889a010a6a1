"""Run a row operation on arrays that end where an unreadable page begins; a forbidden read ends this process.

``python -m tests.kernels.guarded_rows linear|rms_norm|rope|silu_mul|argmax DTYPE`` exits with 0 when nothing beyond the
arrays was touched.
"""

from __future__ import annotations

import sys
from typing import cast

import numpy as np

from forebay.kernels.numba import elementwise
from forebay.kernels.numba.linear import linear
from forebay.specs.suite.attention import Array
from tests.kernels.cases import Dtype, encode
from tests.kernels.guarded import PAGE, forbid, pages


def ending(shape: tuple[int, ...], dtype: Dtype, seed: int) -> Array:
    """Random numbers whose last byte is the last one before an unreadable page."""
    numbers = encode(np.random.default_rng(seed).standard_normal(shape), dtype)
    memory = pages(-(-numbers.nbytes // PAGE) + 1)
    forbid(memory[-PAGE // 4 :])
    end = memory.nbytes - PAGE
    array: Array = memory.view(np.uint8)[end - numbers.nbytes : end].view(numbers.dtype).reshape(shape)
    array[:] = numbers
    return array


def main(operation: str, dtype: Dtype) -> int:
    sizes = (1, 2, 3, 5, 15, 17, 31, 33, 100)
    for size in sizes:
        for rows in (1, 2, 3, 5):
            matrix = ending((rows, size), dtype, 0)
            if operation == "linear":
                out = ending((rows, size), "float32", 1)
                linear(matrix, ending((size, size), dtype, 2), out, ending((size,), "float32", 3))
            elif operation == "rms_norm":
                weight, out = ending((size,), dtype, 1), ending((rows, size), dtype, 2)
                elementwise.prepare_rms_norm(matrix, weight, out, 1e-5)()
            elif operation == "silu_mul":
                elementwise.prepare_silu_mul(matrix, ending((rows, size), dtype, 1), ending((rows, size), dtype, 2))()
            elif operation == "argmax":
                elementwise.prepare_argmax(matrix, ending((rows,), "float32", 1).view(np.int32))()
            else:
                heads = ending((rows, 2, 2 * size), dtype, 1)
                angles = [ending((rows, size), dtype, seed) for seed in (2, 3)]
                elementwise.prepare_rope(heads, angles[0], angles[1], ending(heads.shape, dtype, 4))()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], cast("Dtype", sys.argv[2])))
