"""A pool of two parts, each behind a map of its own: what is forwarded and what each door checks (clauses W2 to W5, W9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from forebay.specs import AttentionParams, Backend, Batch, BlockTable, Buffer, Segment, UnmarkedWriteLoc, WriteLoc
from forebay.specs.suite import oracle
from forebay.specs.suite.kv import changed_slots, device_rows, geometry, held, int32, new_pool, refused, row_bits
from forebay.specs.suite.mapped import Composite, Mapped
from forebay.specs.suite.scenes import assert_near, tolerance
from forebay.specs.suite.staging import stage

NB, BS, HEADS, DIM = 8, geometry().block_size, geometry().num_kv_heads, geometry().head_dim
WINDOW, STAGED, MOVED, TOKENS = 3, 2 * BS - 3, 2 * BS + 1, 2 * BS + 4
BEFORE = ((0, 3, 1, 2, 7, 4, 6, 5), (0, 6, 5, 1, 2, 3, 4, 7))
AFTER = ((0, 5, 7, 3, 1, 2, 4, 6), (0, 2, 3, 6, 5, 7, 1, 4))
"""Where each virtual page is in the window's part and in the full one, before and after a compaction."""
PAGES = int32(1, 5, 2)
"""Virtual pages of one sequence; it has STAGED tokens from the start, MOVED when it is moved and TOKENS in the end."""


@pytest.fixture
def parts(backend: Backend) -> Iterator[tuple[Mapped, Mapped]]:
    """The window's part and the full one, each behind its own map."""
    g = geometry(num_blocks=NB)
    with (
        new_pool(backend, g, requires_physical_write_loc=True) as window,
        new_pool(backend, g, requires_physical_write_loc=True) as full,
    ):
        made = (Mapped(backend, window, BEFORE[0]), Mapped(backend, full, BEFORE[1]))
        yield made
        for part in made:
            backend.release(part.map)


@pytest.mark.clause("W5", "W2", "W4", "D9")
@pytest.mark.case("B10")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize(
    "how", ["eager", "run", pytest.param("replay", marks=[pytest.mark.clause("W9"), pytest.mark.smoke("W2", "W5")])]
)
def test_each_part_goes_by_its_own_location_and_map(
    backend: Backend, parts: tuple[Mapped, Mapped], how: str, path: str
) -> None:
    """Staged to both parts, then written, read back and attended to token by token, moved in between; each part is held against
    float64 attention over the pages its own map names."""
    both, random = Composite(*(part.pool for part in parts)), np.random.default_rng(0)
    q, k, v = (random.standard_normal((TOKENS, heads, DIM)).astype(np.float32) for heads in (2 * HEADS, HEADS, HEADS))
    host = {"q": q, "k": k, "v": v, "table": PAGES[None], "position": int32(0)}
    buffers = {name: backend.buffer(name, x) for name, x in host.items()}

    def step(b: Backend) -> Any:
        xp, emits = b.xp, {}
        position, table = buffers["position"].get(), buffers["table"].get()
        page = xp.take(xp.reshape(table, (3,)), position // BS)
        batch = Batch(int32(-1))
        batch.rebind(page * BS + position % BS, pool=parts[1])
        tables = [part.table(table) for part in parts]
        loc = WriteLoc.for_batch(batch, window_loc=WriteLoc.paged(tables[0], position, table_len=3))
        rows = [xp.take(buffers[name].get(), position) for name in "qkv"]
        for layer, window in enumerate((WINDOW, None)):
            both.write(layer, loc, rows[1], rows[2])
            emits[f"k{layer}"], emits[f"v{layer}"] = both.read(layer, loc)
            params = AttentionParams(window=window)
            pool, visible = both.parts[layer], position + 1
            emits[f"out{layer}"] = b.paged_decode(
                rows[0], pool, 0, tables[layer], visible, table_len=3, params=params, path=path
            )
        return {}, emits

    reads = (*buffers.values(), *(part.map for part in parts))
    segment = Segment("both", step, key=(path,), reads=reads, pools=both.parts)
    backend.run(segment).get()
    trace = backend.capture(segment)
    for part in parts:
        k_view, v_view = (np.zeros((2, BS, HEADS, DIM), np.float32) for _ in range(2))
        for view, rows in ((k_view, k), (v_view, v)):
            view.reshape(-1, HEADS, DIM)[:STAGED] = rows[:STAGED]
        physical = BlockTable(part.pages[PAGES[:2]], physical=True)
        stage(backend, k_view, v_view, part.pool, [0, 1], physical, STAGED)
    for t in range(STAGED, TOKENS):
        if t == MOVED:
            for part, pages in zip(parts, AFTER, strict=True):
                part.compact(pages)
        backend.upload(buffers["position"], int32(t))
        before = [row_bits(backend, part.pool) for part in parts]
        if how == "eager":
            got = {name: backend.to_host(x) for name, x in step(backend)[1].items()}
        else:
            got = (backend.replay(trace) if how == "replay" else backend.run(segment)).get()
        for layer, (part, window) in enumerate(zip(parts, (WINDOW, None), strict=True)):
            (target,) = part.physical([PAGES[t // BS] * BS + t % BS])
            assert changed_slots(before[layer], row_bits(backend, part.pool)) == [target]
            np.testing.assert_array_equal(got[f"k{layer}"][0], k[t])
            np.testing.assert_array_equal(got[f"v{layer}"][0], v[t])
            arrays = oracle.stored(backend, part.pool, 0)
            want = oracle.attend(
                part.pool, arrays, q[None, t : t + 1], part.pages[PAGES][None], int32(t + 1), table_len=3, window=window
            )
            assert_near(got[f"out{layer}"][:, None], want, tolerance(backend, "float32"), "float32")
    backend.release(trace)
    for buffer in buffers.values():
        backend.release(buffer)


Lost = Callable[[Any, Any], Any]
LOST: dict[str, tuple[int, Lost]] = {
    "the window's": (0, lambda w, f: WriteLoc.for_batch(Batch(f, physical=True), window_loc=WriteLoc.slots(w))),
    "the full part's": (
        1,
        lambda w, f: WriteLoc.for_batch(
            Batch(f, physical=True), window_loc=WriteLoc.slots(w, physical=True), full_loc=WriteLoc.slots(f)
        ),
    ),
    "a batch's that was built by hand": (
        1,
        lambda w, f: WriteLoc.for_batch(Batch(f), window_loc=WriteLoc.slots(w, physical=True)),
    ),
}
"""Which part's mark is lost, and the location of both parts' physical ids without it."""


@pytest.mark.clause("W5", "W2")
@pytest.mark.refuses("W5", "W3", "W4")
@pytest.mark.parametrize("door", ["write", "read", "copy src", "copy dst"])
@pytest.mark.parametrize("lost", LOST)
def test_a_mark_lost_for_one_part_is_refused_by_that_part_alone(
    backend: Backend, parts: tuple[Mapped, Mapped], lost: str, door: str
) -> None:
    """Eager, run or captured its door takes nothing and no byte of either part changes; the other part takes the same location."""
    both, (layer, give) = Composite(*(part.pool for part in parts)), LOST[lost]
    ids = [part.physical([2 * BS + 1]) for part in parts]
    marked = WriteLoc.for_batch(Batch(ids[1], physical=True), window_loc=WriteLoc.slots(ids[0], physical=True))
    k, v = device_rows(backend, both.parts[0].geometry, [7])
    for part in range(2):
        both.write(part, marked, k, v)
    host: dict[str, Any] = {"w": ids[0], "f": ids[1], "k": backend.to_host(k) + 1, "v": backend.to_host(v) - 1}
    buffers: dict[str, Buffer] = {name: backend.buffer(name, x) for name, x in host.items()}

    def go(part: int) -> dict[str, Any]:
        w, f, *rows = (buffers[name].get() for name in "wfkv")
        loc, good = give(w, f), WriteLoc.slots((w, f)[part], physical=True)
        if door == "write":
            both.write(part, loc, *rows)
        elif door == "read":
            return {"k": both.read(part, loc)[0]}
        else:
            both.copy(part, *((loc, good) if door == "copy src" else (good, loc)))
        return {}

    def segment(part: int) -> Segment:
        reads = tuple(buffers.values())
        return Segment("lost", lambda _: ({}, go(part)), key=(part,), reads=reads, pools=both.parts)

    wrong = segment(layer)
    acts: tuple[Callable[[], Any], ...] = (
        lambda: go(layer),
        lambda: backend.run(wrong),
        lambda: backend.capture(wrong),
    )
    for act in acts:
        with refused(backend, UnmarkedWriteLoc, "an unmarked WriteLoc", *both.parts):
            act()
    emitted = backend.run(segment(1 - layer)).get()
    assert held(backend, both.parts[1 - layer], ids[1 - layer]).tolist() == [8 if door == "write" else 7]
    if door == "read":
        assert (emitted["k"] == 7).all()
    for buffer in buffers.values():
        backend.release(buffer)
