"""Wrong versions of the kernel, each one change to its text, and the cases that show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.kernels_pallas.cases import Case

CASES: Final = {
    "chunks": Case(
        (0, 300, 129, 0, 64, 700, 0),
        group=3,
        dim=128,
        block_size=64,
        table_len=5,
        sinks=True,
        bad=((1, 1), (2, 0), (1, 2), (5, 4)),
    ),
    "window": Case(
        (380, 105, 640, 0, 300, 130, 2),
        group=2,
        dim=64,
        block_size=64,
        table_len=6,
        query_len=3,
        window=40,
        softcap=3.0,
    ),
    "pages": Case(
        (0, 70, 9, 40, 0, -(2**31)),
        group=2,
        dim=32,
        block_size=8,
        table_len=20,
        query_len=3,
        sinks=True,
        bad=((1, 3), (3, 0), (3, 3)),
        torn=((3, 39),),
    ),
    "latent": Case(
        (0, 150, 33),
        heads=1,
        group=4,
        dim=80,
        value_dim=64,
        spare=48,
        block_size=32,
        table_len=5,
        dtype="bfloat16",
        bad=((1, 4),),
    ),
    "queries": Case((200, 0, 130), heads=1, group=48, dim=64, block_size=64, table_len=4, query_len=5, bad=((0, 0),)),
}
"""Rows of no keys first, between and last; several chunks, and windows that skip some; blocks that are none; keys that are NaN."""

MODES: Final = ("plain", "on_wait", "eager", "xla")
"""Pallas's own interpreter, that of TPUs with copies done when they are waited for or when they are begun, and the loop in XLA."""


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        file: of ``kernels/pallas``.
        old: text that the file has exactly once; new: what takes its place.
        shown: the kind of finding: ``value``, ``race``, ``reads``, ``left``, ``raised`` or ``hang``.
        case, mode: where it is found; it is to be found there by that kind.
    """

    file: str
    old: str
    new: str
    shown: str
    case: str
    mode: str


KERNEL, SOFTMAX, DECODE, LOOP = "decode_kernel.py", "softmax.py", "paged_decode.py", "decode_loop.py"


def _kernel(old: str, new: str, case: str) -> Mutant:
    return Mutant(KERNEL, old, new, "value", case, "plain")


def _shared(old: str, new: str, case: str) -> Mutant:
    # the loop compiles in half the time, and has the same mathematics
    return Mutant(SOFTMAX, old, new, "value", case, "xla")


MUTANTS: Final = {
    "a copy is never waited for": Mutant(KERNEL, "copy_of(page, half, j).wait()", "pass", "race", "chunks", "eager"),
    "the other half is waited for": Mutant(
        KERNEL, "copy_of(page, half, j).wait()", "copy_of(page, 1 - half, j).wait()", "hang", "chunks", "on_wait"
    ),
    "a copy goes into the half that is being read": Mutant(
        KERNEL,
        "copy_of(page, 1 - half, j).start()",
        "pltpu.make_async_copy(pages_ref.at[page], place_of(half, j), arrived.at[1 - half]).start()",
        "race",
        "chunks",
        "eager",
    ),
    "a copy goes into the half that is being read, and says so": Mutant(
        KERNEL, "copy_of(page, 1 - half, j).start()", "copy_of(page, half, j).start()", "hang", "chunks", "eager"
    ),
    "copies signal and are waited for in one half": Mutant(
        KERNEL,
        "place_of(half, j), arrived.at[half])",
        "place_of(half, j), arrived.at[0])",
        "value",
        "chunks",
        "on_wait",
    ),
    "both halves lie in one place": Mutant(
        KERNEL,
        "return buffers.at[half, :, pl.ds(first_token, walk.block_size)]",
        "return buffers.at[0, :, pl.ds(first_token, walk.block_size)]",
        "race",
        "chunks",
        "eager",
    ),
    "the halves never turn": Mutant(KERNEL, "half_ref[0] = 1 - half", "half_ref[0] = half", "hang", "chunks", "eager"),
    "the first chunk is never fetched": Mutant(
        KERNEL,
        "lax.fori_loop(jnp.where(program == 0, -1, 0), count",
        "lax.fori_loop(0, count",
        "hang",
        "queries",
        "on_wait",
    ),
    "the last program fetches once more": Mutant(
        KERNEL, "@pl.when(is_block & (following < programs))", "@pl.when(is_block)", "left", "queries", "eager"
    ),
    "every page is fetched": Mutant(
        KERNEL,
        "return seen, seen & (page >= walk.first_block) & (page < walk.num_blocks), page",
        "page = table_ref[row_of(of) * walk.table_len + jnp.minimum(column, walk.table_len - 1)]\n"
        "            return seen, (page >= walk.first_block) & (page < walk.num_blocks), page",
        "reads",
        "chunks",
        "eager",
    ),
    "pages before the window are fetched": Mutant(
        KERNEL, "& ((column + 1) * walk.block_size > low)", "", "reads", "window", "on_wait"
    ),
    "chunks before the window are not skipped": Mutant(
        KERNEL,
        "return jnp.minimum(low, high), high",
        "return jnp.minimum(low, high) * 0, high",
        "reads",
        "window",
        "eager",
    ),
    "a skipped chunk is not counted as passed": _kernel(
        "at = (first + i) * walk.chunk_tokens", "at = i * walk.chunk_tokens", "window"
    ),
    "the next row begins at its first chunk": _kernel(
        "jnp.where(last, chunks(visible_ref, window, ahead)[0], first + i + 1)",
        "jnp.where(last, 0, first + i + 1)",
        "window",
    ),
    "the next chunk is one too far": _kernel("[0], first + i + 1)", "[0], first + i + 2)", "chunks"),
    "the page after is read": _kernel("jnp.where(seen, column, 0)]", "jnp.where(seen, column, 0) + 1]", "chunks"),
    "rows of the table are one column wider": _kernel(
        "page = table_ref[row_of(of) * walk.table_len", "page = table_ref[row_of(of) * (walk.table_len + 1)", "chunks"
    ),
    "the sink is a block": _kernel("seen & (page >= walk.first_block)", "seen & (page >= 0)", "chunks"),
    "a block behind the pool is one": Mutant(
        KERNEL, "& (page < walk.num_blocks), page", ", page", "raised", "chunks", "eager"
    ),
    "a block that is none is not cleared": _kernel(
        "@pl.when(seen & ~is_block & (i >= 0))", "@pl.when(seen & ~is_block & (i > programs))", "chunks"
    ),
    "keys behind the table are taken from it": _kernel(
        "seen_end = jnp.minimum(end, walk.most)", "seen_end = end", "chunks"
    ),
    "keys behind the table are looked up in it": Mutant(
        KERNEL, "- last), 0), walk.most)", "- last), 0), 2**31 - 1)", "raised", "chunks", "eager"
    ),
    "the end is that of the block's first query": _kernel(
        "visible - (walk.query_len - 1 - last), 0)", "visible - (walk.query_len - 1 - first), 0)", "queries"
    ),
    "the start is that of the block's last query": _kernel(
        "visible - (walk.query_len - 1 - first), 0) - window",
        "visible - (walk.query_len - 1 - last), 0) - window",
        "window",
    ),
    "a block of queries is a row": _kernel(
        "return quotient(program, walk.blocks_of_queries)", "return program", "queries"
    ),
    "all blocks of queries are the first": _kernel(
        "jnp.int32(walk.blocks_of_queries)) * softmax.queries", "jnp.int32(1)) * softmax.queries", "queries"
    ),
    "the sink is forgotten": _kernel(
        "sinks = None if sinks_ref is None else sinks_ref[:, :, :1]", "sinks = None", "chunks"
    ),
    "the sums start as the row before left them": _kernel(
        "summed_ref[...] = jnp.zeros_like(summed_ref)", "pass", "chunks"
    ),
    "missing columns beside a sink are not counted": _shared(
        "jnp.exp(sinks - base) + missing * jnp.exp(zero - base)", "jnp.exp(sinks - base)", "chunks"
    ),
    "missing columns are not counted": _shared(
        "missing = jnp.maximum(end - jnp.maximum(start, most), 0)", "missing = 0 * jnp.maximum(end, 0)", "chunks"
    ),
    "missing columns before the window are counted": _shared(
        "end - jnp.maximum(start, most), 0)", "end - most, 0)", "window"
    ),
    "keys behind the visible ones are seen": _shared(
        "((position >= start) & (position < end))", "(position >= start)", "chunks"
    ),
    "one key too many is seen": _shared("& (position < end))", "& (position <= end))", "chunks"),
    "keys before the window are seen": _shared(
        "((position >= start) & (position < end))", "(position < end)", "window"
    ),
    "values that no query sees are not masked": _shared(
        "return jnp.where((at >= lowest) & (at < highest), values, jnp.zeros_like(values))", "return values", "chunks"
    ),
    "values before the window are not masked": _shared(
        "(at >= lowest) & (at < highest), values", "at < highest, values", "window"
    ),
    "what is not finite is not looked for": _shared(
        "jnp.where(jnp.abs(shown.astype(jnp.float32)) < jnp.inf, 0, 1)) > 0",
        "jnp.where(shown == shown, 0, 0)) > 0",
        "pages",
    ),
    "lanes beside the keys are not masked": _shared(
        "keys = jnp.where(lane < form.key_dim, keys, jnp.zeros_like(keys))", "pass", "pages"
    ),
    "values are taken for keys": _shared(
        "keys = page[..., : form.key_lanes]", "keys = page[..., form.value_offset :][..., : form.key_lanes]", "chunks"
    ),
    "keys are taken for values, whole registers": _shared(
        "values = page[..., low : low + width]", "values = page[..., : width]", "chunks"
    ),
    "keys are taken for values, all lanes": Mutant(
        DECODE, "low = page.value_offset - page.value_slice[0]", "low = 0", "value", "window", "plain"
    ),
    "the sum is not rescaled": _shared("total = shrink * total +", "total = total +", "chunks"),
    "the values are not rescaled": _shared(
        "return new_peak, total, shrink * summed + weighted(weights, shown)",
        "return new_peak, total, summed + weighted(weights, shown)",
        "chunks",
    ),
    "the values of several queries are not rescaled": _shared(
        "return new_peak, total, shrink * summed + added", "return new_peak, total, summed + added", "queries"
    ),
    "a row's query is its head": _shared(
        "query = first_query + lax.div(row,", "query = first_query + lax.rem(row,", "window"
    ),
    "a row's query is its head where keys are NaN": _shared(
        "mine = lax.div(row, jnp.int32(softmax.group)) == t",
        "mine = lax.rem(row, jnp.int32(softmax.queries)) == t",
        "pages",
    ),
    "visible keys may be fewer than none": Mutant(
        DECODE,
        "seen = jnp.maximum(visible, 0)\n    width_of",
        "seen = visible\n    width_of",
        "value",
        "pages",
        "plain",
    ),
    "weights are rounded to the type of the values": _shared(
        "low = (weights - high.astype(jnp.float32)).astype(values.dtype)", "low = jnp.zeros_like(high)", "latent"
    ),
    "the soft-cap is left out": _shared("if softmax.capped else found", "if softmax.queries == 0 else found", "window"),
    "a row without keys keeps its sink": _shared(
        "lse = jnp.where(any_key, peak +", "lse = jnp.where(peak > -jnp.inf, peak +", "chunks"
    ),
    "the loop takes blocks that are none": Mutant(
        LOOP, "held = known & (ids >= walk.first_block) &", "held = known & (ids >= 0) &", "value", "chunks", "xla"
    ),
    "the loop looks behind the table": Mutant(
        LOOP, "seen_end = jnp.minimum(end, walk.most)", "seen_end = end", "value", "chunks", "xla"
    ),
    "the loop does not clear blocks that are none": Mutant(
        LOOP,
        "found = jnp.where(held[:, None, None, None], found, jnp.zeros_like(found))",
        "pass",
        "value",
        "chunks",
        "xla",
    ),
    "the loop ends a chunk early": Mutant(
        LOOP, "(jnp.max(seen_end) + walk.chunk_tokens - 1) //", "jnp.max(seen_end) //", "value", "chunks", "xla"
    ),
    "the loop gives all queries to the first block": Mutant(
        LOOP,
        "visible[row], block * softmax.queries,",
        "visible[row], 0 * block,",
        "value",
        "queries",
        "xla",
    ),
}
