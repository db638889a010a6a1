"""The decode step as a Segment: embedding, slots, attention, choice of the token, advance and retirement, all on the device (C4)."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.specs.backend import Backend
from forebay.specs.dtypes import Array
from forebay.specs.pool import Pool
from forebay.specs.segment import Buffer, Segment
from forebay.specs.step_operations import fuses_step
from forebay.specs.write_loc import IDLE_POSITION, BlockTable, WriteLoc

from .models.llama import KVContext, Llama
from .sampler import choose, log_probabilities
from .state import BucketRows, DeviceState
from .variants import GREEDY, Variant


def decode_segment(
    model: Llama,
    pool: Pool,
    state: DeviceState,
    bucket: int,
    path: str,
    variant: Variant = GREEDY,
    *,
    emit_logits: bool = False,
) -> Segment:
    """One step over the first ``bucket`` slots.

    Emits ``receipt`` int32 ``[bucket, len(RECEIPT_FIELDS)]`` and, for comparisons of bits, ``logits [bucket, vocab]``. A sampled step
    also emits ``sampling`` int32 ``[bucket, len(SAMPLING_FIELDS)]``, and with n log-probabilities ``top_ids`` int32 ``[bucket, n]`` and
    ``logprobs`` float32 ``[bucket, 1 + n]``, the chosen token's first.
    """

    def step(b: Backend) -> tuple[Mapping[Buffer, Array], Mapping[str, Array]]:
        xp = b.xp
        rows = BucketRows.load(b, state, bucket)
        accepted = _rows_that_check(b, rows, pool)
        position = xp.where(accepted, rows.position, IDLE_POSITION)
        table = BlockTable(rows.table, physical=True)
        context = KVContext(
            pool=pool,
            loc=WriteLoc.paged(table, position, table_len=state.table_len),
            table=table,
            table_len=state.table_len,
            visible=xp.where(accepted, rows.visible, 0),
            batch=bucket,
            path=path,
        )
        hidden = model.forward(b, xp.where(accepted, rows.token, 0), position, context)
        logits = model.logits(b, hidden)
        emits = {"logits": logits} if emit_logits else {}
        updates: dict[Buffer, Array] = {}
        if variant.sampled:
            sampling = rows.sampling(state)
            next_token = choose(b, logits, sampling, state.sampling)
            updates[state.sampling.seen] = state.sampling.with_tokens(sampling, accepted, next_token)
            emits["sampling"] = state.sampling.receipt(sampling)
        else:
            next_token = xp.argmax(logits)
        if variant.logprobs:
            emits["top_ids"], emits["logprobs"] = log_probabilities(b, logits, next_token, variant.logprobs)
        emits["receipt"] = rows.receipt(b, accepted, next_token)
        return updates | _advance(b, state, rows, accepted, next_token), emits

    return Segment(
        "decode",
        step,
        key=(bucket, str(variant), state.table_len, path, pool.geometry.dtype, pool.generation),
        reads=(*model.buffers, *state.reads, *(state.sampling.reads if variant.sampled else ())),
        updates=(*state.updates, *(state.sampling.updates if variant.sampled else ())),
        pools=(pool,),
    )


def _rows_that_check(b: Backend, rows: BucketRows, pool: Pool) -> Array:
    """Device truth (clause C5a): bool ``[B]``, true where stamp, visible, limit and page all fit the row's position."""
    xp, g = b.xp, pool.geometry
    if fuses_step(xp):
        return xp.accepted_rows(
            rows.position,
            rows.visible,
            rows.epoch,
            rows.limit,
            rows.stamp,
            rows.table,
            block_size=g.block_size,
            first_block=pool.first_block,
            num_blocks=g.num_blocks,
        )
    width = xp.shape(rows.table)[1]
    column = rows.position // g.block_size
    page = xp.take_along(rows.table, xp.reshape(xp.clip(column, 0, width - 1), (-1, 1)))[:, 0]
    has_page = (column < width) & (page >= pool.first_block) & (page < g.num_blocks)
    live = (rows.position >= 0) & (rows.stamp == rows.epoch) & (rows.visible == rows.position + 1)
    return live & (rows.position < rows.limit) & has_page


def _advance(
    b: Backend, state: DeviceState, rows: BucketRows, accepted: Array, next_token: Array
) -> dict[Buffer, Array]:
    """Feed the token back and move on; a row that reached its limit or a stop token retires (position -1)."""
    xp = b.xp
    if fuses_step(xp):
        advanced = xp.advance_rows(rows.token, rows.position, rows.visible, rows.limit, rows.stop, accepted, next_token)
        return {state.scalars[name]: x for name, x in zip(("token", "position", "visible"), advanced, strict=True)}
    stops = xp.astype(rows.stop == xp.reshape(next_token, (-1, 1)), "int32")
    stopped = xp.sum(stops)[:, 0] > 0
    retires = accepted & ((rows.position + 1 >= rows.limit) | stopped)
    moved = xp.where(accepted, rows.position + 1, rows.position)
    return {
        state.scalars["token"]: xp.where(accepted, next_token, rows.token),
        state.scalars["position"]: xp.where(retires, IDLE_POSITION, moved),
        state.scalars["visible"]: xp.where(retires, 0, xp.where(accepted, rows.visible + 1, rows.visible)),
    }
