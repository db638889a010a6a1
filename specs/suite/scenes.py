"""Calls of ``paged_decode`` to hold against the oracle: any sizes, dtypes, layer and parameters; eager, run or replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Unpack

import numpy as np

from forebay.specs import AttentionParams, Backend, Pool, Segment
from forebay.specs.clauses import catalogue
from forebay.specs.suite import attention, oracle
from forebay.specs.suite.attention import Array, Attention
from forebay.specs.suite.failure import SCENE
from forebay.specs.suite.kv import BAD_BLOCKS, Params, Sizes, geometry, launches, new_pool, put, same_arrays
from forebay.specs.suite.measured import tell

How = Literal["eager", "run", "replay"]
WAYS: Final[tuple[How, ...]] = ("eager", "run", "replay")
"""How a call is made: by itself, in a Segment that runs, in one whose trace is replayed."""
Q_DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass
class Scene:
    """One call of ``paged_decode``: a pool, and host copies of ``q [B, T, Hq, D]``, ``table [B, width]`` and ``visible [B]``.

    ``layer`` is the pool's only layer that holds rows; every other one is full of poison.
    """

    backend: Backend
    pool: Pool
    q: Array
    table: Array
    visible: Array
    table_len: int
    layer: int = 0

    def __str__(self) -> str:
        g = self.pool.geometry
        return (
            f"a {self.pool.layout} pool of {g.dtype}, {g.num_blocks} blocks of {g.block_size}, {g.num_kv_heads} KV heads of "
            f"{g.key_dim}, layer {self.layer} of {g.num_layers}; q {list(self.q.shape)}, visible {self.visible.tolist()}, "
            f"table_len {self.table_len}, table {self.table[:, : self.table_len].tolist()}"
        )

    def rows(self, *index: int) -> Scene:
        """The same call for rows ``index`` of q, table and visible, in this order; it shares the pool."""
        pick = list(index)
        return replace(self, q=self.q[pick], table=self.table[pick], visible=self.visible[pick])

    def decode(
        self,
        *,
        path: str = "direct",
        q_dtype: str = "float32",
        how: How = "eager",
        host: bool = False,
        **params: Unpack[Params],
    ) -> tuple[Array, Array]:
        """out ``[B, T, Hq, Dv]`` and lse ``[B, T, Hq]`` of the backend, on the host; nothing changes but the pool's counts.

        ``q_dtype`` is what q is rounded to on the device, and out's dtype there; ``host`` hands over numpy table and visible (eager
        only). Asserts that results of sequences with visible tokens are neither zeros nor all alike.
        """
        b = self.backend
        operands = {"q": self.q, "table": self.table, "visible": self.visible}
        if (sinks := params.get("sinks")) is not None:
            operands["sinks"] = sinks

        def call(given: dict[str, Any]) -> tuple[Any, Any]:
            options = AttentionParams(**(params | {"sinks": given.get("sinks")}))
            out, lse = b.paged_decode(
                given["q"],
                self.pool,
                self.layer,
                given["table"],
                given["visible"],
                table_len=self.table_len,
                params=options,
                path=path,
                return_lse=True,
            )
            assert b.xp.dtype(out) == q_dtype
            return out, lse

        if how == "eager":
            given = {name: b.to_device(x, q_dtype if name == "q" else None) for name, x in operands.items()}
            if host:
                given |= {"table": self.table, "visible": self.visible}
            out, lse = (b.to_host(x) for x in call(given))
        else:
            out, lse = self._as_a_step(call, operands, q_dtype, how)
        self._show_values(out, lse)
        return out, lse

    def _as_a_step(
        self, call: Callable[[dict[str, Any]], tuple[Any, Any]], operands: dict[str, Array], q_dtype: str, how: How
    ) -> tuple[Array, Array]:
        """The call in a Segment, warmed, captured and first replayed over zeros, which see nothing; then come the real operands."""
        b = self.backend
        buffers = {
            name: b.buffer(name, np.zeros_like(x), q_dtype if name == "q" else None) for name, x in operands.items()
        }

        def fn(_: Backend) -> Any:
            out, lse = call({name: buffer.get() for name, buffer in buffers.items()})
            return {}, {"out": out, "lse": lse}

        segment = Segment("decode", fn, key=(how,), reads=tuple(buffers.values()), pools=(self.pool,))
        b.run(segment)
        trace = b.capture(segment) if how == "replay" else None
        if trace is not None:
            b.replay(trace)
        for name, x in operands.items():
            b.upload(buffers[name], x)
        got = (b.run(segment) if trace is None else b.replay(trace)).get()
        out, lse = got["out"].copy(), got["lse"].copy()
        if trace is not None:
            b.release(trace)
        for buffer in buffers.values():
            b.release(buffer)
        return out, lse

    def both_paths(
        self, *, q_dtype: str = "float32", **params: Unpack[Params]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """(out, lse) as of :meth:`decode`, by the direct path and by gather.

        Asserts by the counters that the driver took the one and the other: agreeing bits alone do not tell.
        """
        before = launches(self.backend, "gather")
        direct = self.decode(q_dtype=q_dtype, **params)
        assert launches(self.backend, "gather") == before, "direct was asked for, and gather was launched"
        gather = self.decode(path="gather", q_dtype=q_dtype, **params)
        assert launches(self.backend, "gather") == before + 1, "gather was asked for, and the driver launched none"
        return direct, gather

    def _show_values(self, out: Array, lse: Array) -> None:
        """Each row that sees its last token holds something, and not all hold the same: a result like that can be compared."""
        bs, first, end = self.pool.geometry.block_size, self.pool.first_block, self.pool.geometry.num_blocks
        column = (self.visible - 1) // bs
        rows = np.flatnonzero((self.visible > 0) & (column < self.table_len))
        last = self.table[rows, column[rows]]
        rows = rows[(last >= first) & (last < end)]
        assert out[rows, -1].any(axis=(1, 2)).all(), "the rows of a sequence are nothing but zeros"
        calls = {(self.q[row].tobytes(), self.table[row].tobytes(), int(self.visible[row])) for row in rows[:8]}
        results = {(out[row].tobytes(), lse[row].tobytes()) for row in rows[:8]}
        assert len(calls) < 2 or len(results) > 1, "different rows have the same result"

    def expect(self, *, q_dtype: str = "float32", **params: Unpack[Params]) -> Attention:
        """The oracle's answer, in float64, for q as the device is given it and KV as the device stores it."""
        arrays, q = oracle.stored(self.backend, self.pool, self.layer), attention.nearest(self.q, q_dtype)
        return oracle.attend(self.pool, arrays, q, self.table, self.visible, table_len=self.table_len, **params)

    def check(
        self, *, path: str = "direct", q_dtype: str = "float32", how: How = "eager", **params: Unpack[Params]
    ) -> tuple[Array, Array]:
        """Assert that the result is the oracle's, within clause D6, and that the invalid blocks met were counted.

        Returns out and lse as :meth:`decode` does.
        """
        before = self.pool.invalid
        out, lse = self.decode(path=path, q_dtype=q_dtype, how=how, **params)
        want = self.expect(q_dtype=q_dtype, **params)
        assert self.pool.invalid - before == want.invalid
        self.hold(out, lse, want, q_dtype)
        return out, lse

    def check_every_way(
        self, *, path: str = "direct", q_dtype: str = "float32", **params: Unpack[Params]
    ) -> tuple[Array, Array]:
        """Like :meth:`check`; the same call in a Segment is right too, and its replay has the bits of its run (clause C3)."""
        out, lse = self.check(path=path, q_dtype=q_dtype, **params)
        ran = self.check(path=path, q_dtype=q_dtype, how="run", **params)
        same_arrays(self.decode(path=path, q_dtype=q_dtype, how="replay", **params), ran)
        return out, lse

    def hold(self, out: Array, lse: Array, want: Attention, q_dtype: str = "float32") -> None:
        """Assert that out ``[B, T, Hq, Dv]`` and lse ``[B, T, Hq]`` are ``want``, within clause D6; rows that see nothing are exact.

        ``out`` is rounded to q's dtype, so the looser of two limits is its; the LSE is float32, whatever q's dtype is.
        """
        kv = self.pool.geometry.dtype
        limits = {dtype: tolerance(self.backend, dtype) for dtype in (q_dtype, kv)}
        loosest = max(limits, key=lambda dtype: limits[dtype])
        assert_near(out, want, limits[loosest], loosest)
        empty = np.isneginf(want.lse)
        assert lse.dtype == np.float32
        np.testing.assert_array_equal(np.isneginf(lse), empty)
        np.testing.assert_allclose(lse[~empty], want.lse[~empty], rtol=limits[kv], atol=limits[kv])
        assert not out[empty].any()


def assert_near(out: Array, want: Attention, limit: float, dtype: str) -> None:
    """Assert that no element of out ``[B, T, Hq, Dv]`` is off by more than ``limit``, relative to the largest visible |V|.

    The error is told to whoever keeps a record, as one of ``dtype``.
    """
    off = np.abs(out - want.out)
    error = float(off.max(initial=0.0))
    tell(dtype, error / want.largest if want.largest else error, limit)
    assert error <= limit * want.largest, _worst(out, want, off, limit)


def _worst(out: Array, want: Attention, off: Array, limit: float) -> str:
    """The element that is off most, told as :data:`.failure.TOLD` reads it."""
    at = np.unravel_index(int(np.argmax(off)), off.shape)  # NaN counts as the largest
    place = ", ".join(f"{name} {index}" for name, index in zip(("row", "token", "head", "element"), at, strict=True))
    allowed = limit * want.largest
    return (
        f"expected: {want.out[at]:.7g}, off by at most {allowed:.3g}, which is {limit:g} of the largest visible |V|\n"
        f"got: {out[at]:.7g} in out at {place}, off by {off[at]:.3g}; {int((~(off <= allowed)).sum())} of {off.size} elements are off "
        "by more than that"
    )


def tolerance(backend: Backend, dtype: str) -> float:
    """Clause D6's limit relative to max |V|, from the contract."""
    return max(catalogue().tolerance(dtype), catalogue().tolerance("tf32") if backend.capabilities.tf32 else 0.0)


@contextmanager
def scene(
    backend: Backend,
    lengths: Sequence[int],
    *,
    layout: str | None = None,
    heads: int = 4,
    query_len: int = 1,
    extra_width: int = 2,
    layer: int = 0,
    seed: int = 0,
    **sizes: Unpack[Sizes],
) -> Iterator[Scene]:
    """Sequences of random rows in shuffled blocks of a pool that holds poison wherever ``lengths`` does not reach.

    The layout is the backend's own unless it is named; ``layer`` is the pool's last unless ``sizes`` name more of them. Table entries
    past the visible range, and the ``extra_width`` columns past ``table_len``, name blocks outside the pool or full of poison.
    ``heads`` are those of q, ``query_len`` its tokens a row, ``sizes`` those of :func:`.kv.geometry`. The pool is released at the end
    unless the test failed.

    Raises:
        Unsupported: a size, dtype or layout that the backend does not declare.
    """
    rng = np.random.default_rng(seed)
    sizes = {"num_layers": layer + 1, **sizes}
    g = geometry(layout or backend.capabilities.layouts[0], **sizes)
    needed = [-(-length // g.block_size) for length in lengths]
    g = replace(g, num_blocks=sum(needed) + 3)
    with new_pool(backend, g, layout) as pool:
        table_len = max(1, *needed)
        order = rng.permutation(np.arange(pool.first_block, g.num_blocks)).astype(np.int32)
        canaries = np.append(BAD_BLOCKS, order[-1])
        table = rng.choice(canaries, size=(len(lengths), table_len + extra_width)).astype(np.int32)
        slots: list[Array] = []
        taken = 0
        for b, (length, blocks) in enumerate(zip(lengths, needed, strict=True)):
            table[b, :blocks] = order[taken : taken + blocks]
            taken += blocks
            position = np.arange(length)
            slots.append(table[b, position // g.block_size] * g.block_size + position % g.block_size)
        rows = np.concatenate(slots)
        k = rng.standard_normal((len(rows), g.num_kv_heads, g.key_dim)).astype(np.float32)
        v = rng.standard_normal((len(rows), g.num_kv_heads, g.value_dim)).astype(np.float32)
        put(backend, pool, rows, k, v, layer)
        q = rng.standard_normal((len(lengths), query_len, heads, g.key_dim)).astype(np.float32)
        made = Scene(backend, pool, q, table, np.array(lengths, np.int32), table_len, layer)
        try:
            yield made
        except BaseException as error:
            error.add_note(f"{SCENE}{made}")
            raise
