"""Parameters of paged attention and the host checks of ``paged_decode`` (clauses D1 to D12)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from .dtypes import FLOAT_DTYPES, Array, HostArray, is_host
from .errors import InvalidInput, UnmarkedWriteLoc, Unsupported
from .geometry import INT32_MAX
from .write_loc import BlockTable

if TYPE_CHECKING:
    from .array_namespace import ArrayNamespace
    from .capabilities import Capabilities
    from .pool import Pool

AttentionPath = Literal["direct", "gather"]
PATHS: Final = ("direct", "gather")
FLOAT32_MAX: Final = float(np.finfo(np.float32).max) / 2
"""Half the largest float32: a factor of base conversion must still fit."""
FLOAT32_LEAST: Final = float(np.finfo(np.float32).tiny)
"""The least normal float32: a device may flush smaller ones to zero."""


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """Parameters of one attention.

    Numbers may be Python's or numpy's scalars; they are kept as ``float`` and ``int``. A bool is none.

    Attributes:
        scale: multiplies q·k; None is ``1/sqrt(D)`` (Vaswani et al. 2017).
        window: sliding window W that counts the current token: query at position p sees keys > p - W.
        softcap: logit soft-cap c: ``c * tanh(score / c)`` (Gemma 2); not so small that float32 may flush it to zero.
        sinks: float32 ``[Hq]`` device array: one extra logit a head that takes part in the denominator and the LSE only. Each is
            finite, or -inf for a head without a sink. The values are the device's, so the host checks none: with +inf or NaN the rows
            and the LSE of that head are undefined.

    Raises:
        InvalidInput: a value out of range.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Array | None = None

    def __post_init__(self) -> None:
        window: object = self.window
        if window is not None:
            if isinstance(window, bool) or not isinstance(window, Integral) or window < 1:
                raise InvalidInput(
                    f"AttentionParams.window: got {window!r}, expected None or an int >= 1 (it counts the current token)"
                )
            if int(window) > INT32_MAX:
                raise InvalidInput(f"AttentionParams.window: got {window}, expected at most {INT32_MAX}")
            object.__setattr__(self, "window", int(window))
        for name in ("scale", "softcap"):
            value: object = getattr(self, name)
            if value is None:
                continue
            number = math.nan if isinstance(value, bool) else _as_float(value)
            if not abs(number) <= FLOAT32_MAX:
                raise InvalidInput(
                    f"AttentionParams.{name}: got {value!r}, expected None or a number finite in float32"
                )
            object.__setattr__(self, name, number)
        if self.softcap is not None and self.softcap < FLOAT32_LEAST:
            raise InvalidInput(
                f"AttentionParams.softcap: got {self.softcap!r}, expected None or a positive number, at least {FLOAT32_LEAST:.3g}"
            )


def _as_float(value: object) -> float:
    """A number as Python's, NaN where it is none or too large for one."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an int without bounds
        return math.nan


@dataclass(frozen=True, eq=False)
class DecodeCall:
    """A checked call of ``paged_decode``, as the driver gets it.

    ``q [B, T, Hq, D]``; ``table`` int32 ``[B, width]`` (any row stride); ``visible`` int32 ``[B]``; query t of row b sees
    ``visible - (T-1-t)`` keys. ``first_block`` is 1 with a sink, else 0. All arrays are device arrays.

    ``path`` says how: ``direct`` reads the pool in place, ``gather`` first copies the visible rows to contiguous memory. The driver
    calls ``gathered()`` where it launches, or records, that copy, once a call and nowhere else (clause D12): both paths give the same
    bits, so that nothing else tells which one was taken.
    """

    q: Array
    pool: Pool
    layer: int
    table: Array
    visible: Array
    table_len: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Array | None
    path: AttentionPath
    return_lse: bool
    gathered: Callable[[], None]


def check_table(table: object, xp: ArrayNamespace, what: str, *, needs_mark: bool) -> Array | HostArray:
    """The array of a block table, 2-D int32 (int64 from the host, narrowed with a check); reads no device value.

    Raises:
        UnmarkedWriteLoc: the pool needs physical ids and the table is bare or unmarked.
        InvalidInput: another type, dtype or rank, named.
    """
    marked = table.physical if isinstance(table, BlockTable) else False
    if needs_mark and not marked:
        kind = (
            "a BlockTable without physical=True" if isinstance(table, BlockTable) else f"a bare {type(table).__name__}"
        )
        raise UnmarkedWriteLoc(
            f"{what}: got {kind}; this pool translates ids, so pass BlockTable(translated, physical=True)"
        )
    array = table.array if isinstance(table, BlockTable) else table
    return check_int_array(array, xp, f"{what} block table", ndim=2)


def check_int_array(x: object, xp: ArrayNamespace, what: str, *, ndim: int | tuple[int, ...]) -> Array | HostArray:
    """An int32 device array as it is, or a host int32/int64 array as int32 (refused where a value would not fit)."""
    ranks = (ndim,) if isinstance(ndim, int) else ndim
    if xp.is_array(x):
        name, shape = xp.dtype(x), xp.shape(x)
        if name != "int32":
            raise InvalidInput(
                f"{what}: got a device array of {name}, expected int32 (int64 is accepted from the host only)"
            )
    elif isinstance(x, np.ndarray):
        name, shape = str(x.dtype), x.shape
        if x.dtype not in (np.int32, np.int64):
            raise InvalidInput(f"{what}: got numpy {name}, expected int32 or int64")
        narrow = x.astype(np.int32)
        if not np.array_equal(narrow, x):
            raise InvalidInput(f"{what}: int64 values {x.min()} to {x.max()} do not fit int32; nothing was read")
        x = narrow
    else:
        raise InvalidInput(f"{what}: got {type(x).__name__}, expected a numpy or device array of int32")
    if len(shape) not in ranks:
        raise InvalidInput(f"{what}: got shape {tuple(shape)}, expected {' or '.join(f'{r}-D' for r in ranks)}")
    return x


def check_decode(
    xp: ArrayNamespace,
    capabilities: Capabilities,
    q: Array,
    pool: Pool,
    table: object,
    visible: object,
    table_len: int,
    params: AttentionParams,
    path: str,
    return_lse: bool,
) -> tuple[Array, Array | HostArray, Array | HostArray, float]:
    """Check everything the host knows before any device work; return (q [B,T,Hq,D], table, visible, scale).

    Raises:
        UnmarkedWriteLoc, InvalidLayout, InvalidInput, Unsupported: see the clauses D1, D8, W3.
    """
    table = check_table(table, xp, "paged_decode", needs_mark=pool.requires_physical_write_loc)
    if not isinstance(params, AttentionParams):
        raise InvalidInput(f"paged_decode params: got {type(params).__name__}, expected AttentionParams")
    if path not in PATHS:
        raise InvalidInput(f"paged_decode path: got {path!r}, expected one of {', '.join(PATHS)}")
    if not xp.is_array(q):
        raise InvalidInput(f"paged_decode q: got {type(q).__name__}, expected a device array (use backend.to_device)")
    shape, g = xp.shape(q), pool.geometry
    if xp.dtype(q) not in FLOAT_DTYPES or len(shape) not in (3, 4):
        raise InvalidInput(
            f"paged_decode q: got {xp.dtype(q)}{list(shape)}, expected a float [B, Hq, D] or [B, T, Hq, D]"
        )
    rows, query_len, heads, dim = (shape[0], 1, *shape[1:]) if len(shape) == 3 else shape
    group = g.check_query_heads(heads, "paged_decode q")
    if dim != g.head_dim or query_len < 1:
        raise InvalidInput(
            f"paged_decode q: got shape {tuple(shape)}, expected head_dim {g.head_dim} and query_len >= 1"
        )
    check_decode_support(capabilities, pool, group=group, query_len=query_len, params=params, return_lse=return_lse)
    visible = check_int_array(visible, xp, "paged_decode visible", ndim=1)
    width = table.shape[1] if is_host(table) else xp.shape(table)[1]
    for name, x in (("block table", table), ("visible", visible)):
        got = x.shape[0] if is_host(x) else xp.shape(x)[0]
        if got != rows:
            raise InvalidInput(f"paged_decode {name}: got {got} rows, expected {rows} as in q")
    if isinstance(table_len, bool) or not isinstance(table_len, int) or not 0 <= table_len <= width:
        raise InvalidInput(f"paged_decode table_len: got {table_len!r}, expected 0 to the table's width {width}")
    if is_host(visible) and rows and not 0 <= int(visible.min()) <= int(visible.max()) <= table_len * g.block_size:
        raise InvalidInput(
            f"paged_decode visible: got {int(visible.min())} to {int(visible.max())}, expected 0 to table_len * block_size = "
            f"{table_len} * {g.block_size} = {table_len * g.block_size}"
        )
    sinks = params.sinks
    if sinks is not None and not (xp.is_array(sinks) and xp.dtype(sinks) == "float32" and xp.shape(sinks) == (heads,)):
        got = f"{xp.dtype(sinks)}{list(xp.shape(sinks))}" if xp.is_array(sinks) else type(sinks).__name__
        raise InvalidInput(
            f"paged_decode sinks: got {got}, expected a float32 device array [{heads}], one logit a query head"
        )
    q4 = q if len(shape) == 4 else xp.reshape(q, (rows, 1, heads, dim))
    return q4, table, visible, params.scale if params.scale is not None else 1.0 / math.sqrt(dim)


def check_decode_support(
    cap: Capabilities, pool: Pool, *, group: int, query_len: int, params: AttentionParams, return_lse: bool
) -> None:
    """Raise Unsupported with the reason and what is supported, before any device work (clause D8)."""
    g = pool.geometry
    sinks = None if params.sinks is None else "given"
    limits: tuple[tuple[str, str, Any, Any], ...] = (
        ("head_dims", "head_dim", g.head_dim, cap.head_dims),
        ("block_sizes", "block_size", g.block_size, cap.block_sizes),
        ("max_group", "query heads per KV head", group, f"at most {cap.max_group}"),
        ("max_query_len", "query_len", query_len, f"at most {cap.max_query_len}"),
        ("window", "window", params.window, "no sliding window"),
        ("softcap", "softcap", params.softcap, "no soft-cap"),
        ("sinks", "sinks", sinks, "no attention sinks"),
        ("lse", "return_lse", return_lse, "no log-sum-exp (needed to merge partial results)"),
    )
    for capability, name, got, supported in limits:
        if not cap.allows(capability, got):
            message = f"paged_decode {name}: got {got}, this backend supports {supported}"
            raise Unsupported(message, capability=capability, value=got)
