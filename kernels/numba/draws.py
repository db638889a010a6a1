"""Random numbers and the repetition penalty of sampling, on one thread; the bits of a row depend on that row alone.

Each operation has a ``prepare_`` form that resolves addresses once; its callable works on what the arrays hold when it
is called.
"""

from __future__ import annotations

from collections.abc import Callable

from .address import load_f32, load_i32
from .checks import Array, place_rows
from .compiled import SOURCES, compiled
from .draw_ops import gumbel_row, penalise_row

Rows = tuple[int, int]
"""Address, bytes from row to row; elements of 4 bytes lie side by side."""


@compiled
def _draw_rows(keys: Rows, blocks: int, y: Rows, n: int, count: int, _sources: int = SOURCES) -> None:
    for i in range(n):
        gumbel_row(load_i32(keys[0] + i * keys[1]), blocks, y[0] + i * y[1], count)


@compiled
def _penalise_rows(x: Rows, seen: Rows, penalty: Rows, y: Rows, n: int, count: int, _sources: int = SOURCES) -> None:
    for i in range(n):
        factor = load_f32(penalty[0] + i * penalty[1])
        penalise_row(x[0] + i * x[1], seen[0] + i * seen[1], factor, y[0] + i * y[1], count)


def prepare_gumbel(keys: Array, blocks: Array, out: Array) -> Callable[[], None]:
    """Prepare standard Gumbel variates ``-log(-log(1 - u))``, u the upper 31 bits of a hash of key and block.

    The hash is what MurmurHash3_x86_32 (A. Appleby, public domain) does with its second and last block.

    Args:
        keys: int32 ``[N, 1]``, the state after the first block.
        blocks: int32 ``[1, C]``, second blocks, mixed already.
        out: float32 ``[N, C]``, rows contiguous; written.

    Raises:
        ValueError: arrays that do not fit together.
    """
    n, count = out.shape if out.ndim == 2 else (0, 0)
    states = place_rows("keys", keys, (n, 1), integers=True)
    second, target = place_rows("blocks", blocks, (1, count), integers=True)[0], place_rows("out", out, (n, count))

    # The default keeps the arrays alive: compiled code sees only their addresses.
    def gumbel(_alive: tuple[Array, ...] = (keys, blocks, out)) -> None:
        _draw_rows(states, second, target, n, count)

    return gumbel


def prepare_penalise(x: Array, seen: Array, penalty: Array, out: Array) -> Callable[[], None]:
    """Prepare ``out = x``, but ``x / penalty`` where a column's bit is set and ``x * penalty`` where ``x`` is negative too.

    Args:
        x: float32 ``[N, C]``, rows contiguous, any step from row to row.
        seen: int32 ``[N, ceil(C / 32)]``; column c is bit c % 32 of word c // 32.
        penalty: float32 ``[N, 1]``.
        out: float32 ``[N, C]``; written.

    Raises:
        ValueError: arrays that do not fit together.
    """
    n, count = x.shape if x.ndim == 2 else (0, 0)
    source, target = place_rows("x", x, (n, count)), place_rows("out", out, (n, count))
    held = place_rows("seen", seen, (n, -(-count // 32)), integers=True)
    factors = place_rows("penalty", penalty, (n, 1))

    def penalise(_alive: tuple[Array, ...] = (x, seen, penalty, out)) -> None:
        _penalise_rows(source, held, factors, target, n, count)

    return penalise
