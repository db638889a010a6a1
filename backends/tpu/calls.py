"""The driver's operations as compiled functions of raw arrays: the pool's storage seen as pages, the kernels, and the count.

Each is compiled once for its shapes and sizes. Called by itself it takes over the memory of what it replaces; inside a step that is
traced it becomes part of the step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, Generic, TypeVar

import jax
import jax.export
import jax.numpy as jnp
from jax import lax

from forebay.kernels.pallas import rows
from forebay.kernels.pallas.paged_decode import count_invalid, paged_decode
from forebay.kernels.pallas.pages import PageFormat

from .compiles import make_room
from .formats import described

T = TypeVar("T")
KEPT: Final = 96
"""Executables of a kind that are kept."""
ROUND: Final = 32
"""New ones until it is looked at how much they take."""


@dataclass(frozen=True)
class Store:
    """How a pool is stored.

    Attributes:
        form: where K and V lie in the lanes of a page.
        latent: the storage is ``[NB, BS, 1, lanes]`` and V part of K; otherwise it is ``[NB, Hkv, BS, lanes]``.
        first_block: 1 with a sink, else 0.
    """

    form: PageFormat
    latent: bool
    first_block: int

    def pages(self, storage: jax.Array) -> jax.Array:
        """The storage as ``[NB, Hkv, BS, lanes]``."""
        blocks, second, third, lanes = storage.shape
        return storage.reshape(blocks, third, second, lanes) if self.latent else storage

    def storage(self, pages: jax.Array) -> jax.Array:
        """Pages as the storage."""
        blocks, second, third, lanes = pages.shape
        return pages.reshape(blocks, third, second, lanes) if self.latent else pages

    def first_slot(self, pages: jax.Array) -> int:
        """The first slot that is no sink's."""
        return self.first_block * int(pages.shape[2])


@dataclass(frozen=True)
class Where:
    """A location as raw arrays: slots ``ids``, or a table and positions with the columns that are blocks."""

    table_len: int | None

    def slots(self, pages: jax.Array, given: tuple[jax.Array, ...]) -> jax.Array:
        """Slots int32 ``[N]``."""
        if self.table_len is None:
            return given[0]
        blocks, _, block_size, _ = pages.shape
        return rows.slots_of(given[0], given[1], table_len=self.table_len, block_size=block_size, num_blocks=blocks)


Given = tuple[jax.Array, ...]


def write(
    storage: jax.Array,
    dropped: jax.Array,
    given: Given,
    k: jax.Array,
    v: jax.Array | None,
    *,
    store: Store,
    where: Where,
) -> tuple[jax.Array, jax.Array]:
    """Storage and count after rows landed."""
    pages = store.pages(storage)
    slots = where.slots(pages, given)
    pages, dropped = rows.write_rows(pages, dropped, slots, k, v, first_slot=store.first_slot(pages))
    return store.storage(pages), dropped


def read(
    storage: jax.Array, dropped: jax.Array, given: Given, *, store: Store, where: Where
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """K ``[N, Hkv, D]``, V ``[N, Hkv, Dv]``, and the count."""
    pages = store.pages(storage)
    found, dropped = rows.read_rows(pages, dropped, where.slots(pages, given), first_slot=store.first_slot(pages))
    form = store.form
    return (
        found[..., : form.key_dim],
        found[..., form.value_offset : form.value_offset + form.value_dim],
        dropped,
    )


def copy(
    layers: tuple[jax.Array, ...],
    dropped: jax.Array,
    source: Given,
    target: Given,
    *,
    store: Store,
    from_where: Where,
    to_where: Where,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Storage of every layer and the count after rows were copied."""
    pages = tuple(store.pages(storage) for storage in layers)
    moved, dropped = rows.copy_rows(
        pages,
        dropped,
        from_where.slots(pages[0], source),
        to_where.slots(pages[0], target),
        first_slot=store.first_slot(pages[0]),
    )
    return tuple(store.storage(x) for x in moved), dropped


def stage(storage: jax.Array, new: jax.Array, targets: jax.Array, tokens: jax.Array, *, store: Store) -> jax.Array:
    """Storage after pages ``new [n, Hkv, BS, lanes]`` landed at blocks ``targets [n]``: ``tokens [n]`` rows of each."""
    form = store.form
    used = max(form.key_dim, form.value_offset + form.value_dim)
    return store.storage(rows.stage_pages(store.pages(storage), new, targets, tokens, lanes=used))


def attend(
    storage: jax.Array,
    invalid: jax.Array,
    q: jax.Array,
    table: jax.Array,
    visible: jax.Array,
    sinks: jax.Array | None,
    scale: jax.Array,
    window: jax.Array,
    softcap: jax.Array | None,
    *,
    store: Store,
    table_len: int,
    path: str,
    by: str,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output, LSE, and the count of invalid blocks."""
    pages, query_len = store.pages(storage), q.shape[1]
    bad = count_invalid(
        table,
        visible,
        table_len=table_len,
        first_block=store.first_block,
        num_blocks=pages.shape[0],
        block_size=pages.shape[2],
        query_len=query_len,
        window=window,
    )
    invalid = invalid + jnp.minimum(bad, rows.MOST - invalid)
    first_block = store.first_block
    if path == "gather":
        pages = rows.gather_pages(
            pages,
            table,
            visible,
            table_len=table_len,
            first_block=first_block,
            query_len=query_len,
            window=window,
        )
        # Not to be fused with what reads them: gathering is a pass of its own.
        pages = lax.optimization_barrier(pages)
        table = lax.iota(jnp.int32, pages.shape[0]).reshape(table.shape[0], -1)
        first_block = 0
    out, lse = paged_decode(
        q,
        pages,
        table,
        visible,
        sinks,
        page=store.form,
        table_len=table_len,
        first_block=first_block,
        scale=scale,
        window=window,
        softcap=softcap,
        by=by,
        interpret=interpret,
    )
    return out, lse, invalid


def merge(outs: Given, lses: Given) -> tuple[jax.Array, jax.Array]:
    """Output and LSE of the whole."""
    return rows.merge_partials(outs, lses)


def set_rows(whole: jax.Array, part: jax.Array, row: jax.Array) -> jax.Array:
    """``whole`` with ``part`` as its rows from ``row`` on."""
    start = (row, *(jnp.zeros((), jnp.int32) for _ in whole.shape[1:]))
    return lax.dynamic_update_slice(whole, part, start)


_DONATED: Final = {write: (0, 1), read: (1,), copy: (0, 1), stage: (0,), attend: (1,), set_rows: (0,)}
"""The positions of arguments whose memory a function takes over; the first argument is what Buffers hold."""


class Compiled:
    """The functions of this module, compiled with a device's options.

    The executables used last are kept, and no more of them: on the host each takes about a hundred mappings of memory, of which a
    process has 65,530.

    Args:
        options: of XLA, as ``jax.stages.Lowered.compile`` takes them.
        lower_once: a function is lowered once for its shapes, and what came of it goes into every program that has it. An interpreted
            kernel takes longer to lower than to compile.
    """

    def __init__(self, options: dict[str, Any] | None, *, lower_once: bool) -> None:
        self._options = options
        self._lower_once = lower_once
        self._kept: Recent[Any] = Recent()
        self._lowered: Recent[Any] = Recent()

    def __call__(self, function: Callable[..., Any], *arrays: Any, **sizes: Any) -> Any:
        """Ask for ``function`` with its sizes given, on arrays or tuples of arrays."""
        key = _key(function, arrays, sizes)
        executable = self._kept.get(key)
        if executable is None:
            call = self._callable(key, function, arrays, sizes)
            ready = lowered(function, tuple(sizes.items()), *arrays, call=call)
            executable = self._kept.put(key, ready.compile(compiler_options=self._options))
        return executable(*arrays)

    def traced(self, function: Callable[..., Any], *arrays: Any, **sizes: Any) -> Any:
        """The same inside a trace."""
        return self._callable(_key(function, arrays, sizes), function, arrays, sizes)(*arrays)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._lowered.clear()

    def _callable(
        self, key: Hashable, function: Callable[..., Any], arrays: tuple[Any, ...], sizes: dict[str, Any]
    ) -> Callable[..., Any]:
        jitted: Any = _jitted(function, tuple(sizes.items()))
        if not self._lower_once:
            inline: Callable[..., Any] = jitted
            return inline
        lowered = self._lowered.get(key)
        if lowered is None:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
            # Within a jit, whose trace is kept: by itself an export is another function each time it is called.
            lowered = self._lowered.put(key, jax.jit(jax.export.export(jitted)(*shapes).call))
        called: Callable[..., Any] = lowered
        return called


class Recent(Generic[T]):
    """The values used last, by key."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._put = 0
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable) -> T | None:
        """The value, if it is still there."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: Hashable, value: T) -> T:
        """Keep a value, and drop the one that was used longest ago where there are too many."""
        self._values[key] = value
        self._put += 1
        if len(self._values) > self._most:
            self._values.popitem(last=False)
        if self._put % ROUND == 0:
            make_room()
        return value

    def clear(self) -> None:
        """Drop all."""
        self._values.clear()


def _key(function: Callable[..., Any], arrays: tuple[Any, ...], sizes: dict[str, Any]) -> Hashable:
    leaves, tree = jax.tree.flatten(arrays)
    return (function, tuple(sizes.items()), tree, *((x.shape, x.dtype) for x in leaves))


def lowered(
    function: Callable[..., Any],
    sizes: tuple[tuple[str, Any], ...],
    *arrays: Any,
    call: Callable[..., Any] | None = None,
) -> Any:
    """``function`` with its sizes given (``call``, where that is made already), ready to be compiled for arrays or their like."""
    call = partial(function, **dict(sizes)) if call is None else call
    if function not in _DONATED:
        return jax.jit(call).lower(*arrays)
    cells = jax.tree.map(described, arrays[0])
    formats = jax.tree.map(lambda cell: cell.format, cells)
    made = {write: (formats, None), copy: (formats, None), stage: formats, set_rows: formats}.get(function)
    jitted = jax.jit(call, donate_argnums=_DONATED[function], keep_unused=True, out_shardings=made)
    return jitted.lower(cells, *arrays[1:])


@lru_cache(maxsize=4 * KEPT)
def _jitted(function: Callable[..., Any], sizes: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(partial(function, **dict(sizes)))
