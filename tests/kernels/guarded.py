"""Run attention with every page that it may not read made unreadable; a forbidden read ends this process.

``python -m tests.kernels.guarded direct|gather DIM`` exits with 0 when nothing outside the visible range was touched.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np

from forebay.kernels.numba.paged_decode import paged_decode
from forebay.specs.suite.attention import Array
from tests.kernels import oracle
from tests.kernels.oracle import Options

PAGE = mmap.PAGESIZE
UNREADABLE = 0


def pages(count: int) -> Array:
    """``count`` pages of zeros, float32."""
    return np.frombuffer(mmap.mmap(-1, count * PAGE), np.float32)


def forbid(array: Array) -> None:
    """Make the pages of ``array`` unreadable."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), UNREADABLE):
        raise OSError(ctypes.get_errno(), "mprotect")


def main(path: str, dim: int) -> int:
    block_size = PAGE // 4 // dim
    k, v = (pages(16).reshape(16, block_size, 1, dim) for _ in range(2))
    blocks = [3, 9, 14, 6, 2]
    length, window = 4 * block_size + 1, 2 * block_size
    rng = np.random.default_rng(0)
    for plane in (k, v):
        for block in blocks[2:]:
            plane[block] = rng.standard_normal(plane.shape[1:])
    # The visible columns end with their page; the columns past them and the first row's start lie on unreadable ones.
    cells = pages(3).view(np.int32)
    last = 2 * PAGE // 4
    table = np.lib.stride_tricks.as_strided(cells[last - 5 :], (1, 600), (0, 4))
    cells[last - 5 : last] = blocks
    for plane in (k, v):
        for block in set(range(16)) - set(blocks[2:]):
            forbid(plane[block])
    forbid(cells[last:])
    q = rng.standard_normal((1, 1, 4, dim)).astype(np.float32)
    out, lse = np.empty((1, 1, 4, dim), np.float32), np.empty((1, 1, 4), np.float32)
    options: Options = {
        "table_len": 600,
        "first_block": 0,
        "num_blocks": 16,
        "block_size": block_size,
        "scale": 0.1,
        "window": window,
        "softcap": None,
        "sinks": None,
    }
    visible = np.array([length], np.int32)
    paged_decode(
        q,
        k,
        v,
        table,
        visible,
        out,
        lse,
        np.zeros(1, np.int32),
        path="gather" if path == "gather" else "direct",
        **options,
    )
    want = oracle.attend(q, k, v, table, visible, **options)
    return int(np.abs(out - want.out).max() > oracle.TOLERANCE * want.largest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
