"""Run the kernels of sampling on arrays that end where an unreadable page begins; a forbidden access ends this process.

``python -m tests.kernels.guarded_sampling`` exits with 0 when nothing beyond the arrays was touched and every result was right.
"""

from __future__ import annotations

import sys

import numpy as np

from forebay.specs.suite.attention import Array
from tests.kernels.guarded import PAGE, forbid, pages
from tests.kernels.sampling_cases import arguments


def ending(values: Array) -> Array:
    """A copy whose last byte is the last one before an unreadable page."""
    memory = pages(-(-values.nbytes // PAGE) + 1)
    forbid(memory[-PAGE // 4 :])
    end = memory.nbytes - PAGE
    array: Array = memory.view(np.uint8)[end - values.nbytes : end].view(values.dtype).reshape(values.shape)
    array[:] = values
    return array


def main() -> int:
    for n in (1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 267):
        for prepare, inputs, outputs in arguments(n).values():
            held = [ending(x) for x in outputs]
            prepare(*(ending(x) for x in inputs), *held)()
            prepare(*inputs, *outputs)()
            if any(x.tobytes() != y.tobytes() for x, y in zip(held, outputs, strict=True)):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
