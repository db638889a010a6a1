"""The per-slot state of decoding, on the device and in the host's ledger (clauses C4 to C7).

Every per-slot input is a row of a *master* Buffer over all slots; a bucket is its first B rows. The host seeds a row at a request
boundary; the step advances it. A row checks itself before it acts: the stamp in the last column of its table row must be its
epoch, ``visible`` must be ``position + 1``, the position must be below its limit and its page must be a block of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from forebay.specs.backend import Backend
from forebay.specs.dtypes import Array, HostArray
from forebay.specs.segment import Buffer
from forebay.specs.step_operations import fuses_step

from .digests import digest_of, digest_weights
from .sampling import SamplingParams
from .sampling_rows import GREEDY_PARAMS, NOTHING_SEEN, Draw, SamplingRows, SamplingState, Seen

RECEIPT_FIELDS: Final = (
    "token",
    "position",
    "visible",
    "epoch",
    "limit",
    "seed",
    "table",
    "stop",
    "accepted",
    "next_token",
)
"""Columns of a receipt, int32: what the row consumed, then whether it acted, then what it emitted."""

CONSUMED: Final = RECEIPT_FIELDS[:8]
ACCEPTED: Final = RECEIPT_FIELDS.index("accepted")
NEXT_TOKEN: Final = RECEIPT_FIELDS.index("next_token")
SCALARS: Final = ("token", "position", "visible", "epoch", "limit", "seed")
IDLE: Final = {"token": 0, "position": -1, "visible": 0, "epoch": 0, "limit": 0, "seed": 0}
NO_STOP: Final = -1


@dataclass(frozen=True)
class SlotState:
    """What a slot's next step must consume, and the row of block ids it must find.

    Attributes:
        seed: of its draws.
        stop: the token ids that end it.
        params: how its tokens are chosen.
        seen: tokens up to ``position``, as far as ``params`` look at them (:meth:`Seen.of`).
    """

    token: int
    position: int
    epoch: int
    limit: int
    seed: int
    blocks: tuple[int, ...]
    stop: tuple[int, ...]
    params: SamplingParams = GREEDY_PARAMS
    seen: Seen = NOTHING_SEEN

    def advanced(self, token: int) -> SlotState:
        """After one step that emitted ``token``."""
        seen = self.seen.with_token(token) if self.params.penalises else self.seen
        return replace(self, token=token, position=self.position + 1, seen=seen)

    @property
    def draw(self) -> Draw:
        """What the choice of its next token depends on."""
        return Draw(self.params, self.seed, self.position, self.seen)

    def ends_with(self, token: int) -> bool:
        """True if the step that emits ``token`` retires the row: the limit is reached or the token stops it."""
        return self.position + 1 >= self.limit or token in self.stop


class DeviceState:
    """Master Buffers over all slots; they exist before the first capture (clause C7).

    Args:
        slots: S.
        table_len: block columns of a table row; one more column holds the stamp.
        max_stop: stop tokens a slot.
        vocab_size: tokens the logits have.
    """

    def __init__(self, backend: Backend, slots: int, table_len: int, max_stop: int, vocab_size: int) -> None:
        self._backend = backend
        self.slots = slots
        self.table_len = table_len
        self.max_stop = max_stop
        self.scalars = {name: backend.buffer(f"slot.{name}", np.full(slots, IDLE[name], np.int32)) for name in SCALARS}
        self.table = backend.buffer("slot.table", np.zeros((slots, table_len + 1), np.int32))
        self.stop = backend.buffer("slot.stop", np.full((slots, max_stop), NO_STOP, np.int32))
        self.table_weights = backend.buffer("digest.table", digest_weights(table_len)[None])
        self.stop_weights = backend.buffer("digest.stop", digest_weights(max_stop)[None])
        self.sampling = SamplingState(backend, slots, vocab_size)

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Buffers every step reads and never changes."""
        fixed = tuple(self.scalars[name] for name in ("epoch", "limit", "seed"))
        return (*fixed, self.table, self.stop, self.table_weights, self.stop_weights)

    @property
    def updates(self) -> tuple[Buffer, ...]:
        """Buffers every step advances."""
        return tuple(self.scalars[name] for name in ("token", "position", "visible"))

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All of them."""
        return (*self.reads, *self.updates, *self.sampling.reads, *self.sampling.updates)

    def seed(self, slot: int, state: SlotState) -> None:
        """Seed every per-slot input of one slot, each by itself (clause C6)."""
        values = {
            "token": state.token,
            "position": state.position,
            "visible": state.position + 1,
            "epoch": state.epoch,
            "limit": state.limit,
            "seed": state.seed,
        }
        self._backend.upload(self.stop, self.stop_row(state)[None], slot)
        self.sampling.seed(slot, state.params, state.seen)
        self.write_table(slot, state)
        for name in SCALARS:
            self._backend.upload(self.scalars[name], np.array([values[name]], np.int32), slot)

    def idle(self, slot: int) -> None:
        """Make a slot idle: position -1 first, so that no step between two uploads can act on the row."""
        for name in ("position", *(n for n in SCALARS if n != "position")):
            self._backend.upload(self.scalars[name], np.array([IDLE[name]], np.int32), slot)
        self._backend.upload(self.table, np.zeros((1, self.table_len + 1), np.int32), slot)
        self._backend.upload(self.stop, np.full((1, self.max_stop), NO_STOP, np.int32), slot)
        self.sampling.idle(slot)

    def write_table(self, slot: int, state: SlotState) -> None:
        """Upload one table row: blocks, sink ids behind them, the stamp in the last column."""
        row = np.append(self.table_row(state), np.int32(state.epoch))
        self._backend.upload(self.table, row[None], slot)

    def table_row(self, state: SlotState) -> HostArray:
        """Block columns of a slot's table row."""
        row = np.zeros(self.table_len, np.int32)
        row[: len(state.blocks)] = state.blocks
        return row

    def stop_row(self, state: SlotState) -> HostArray:
        """Stop tokens of a slot, padded with -1."""
        row = np.full(self.max_stop, NO_STOP, np.int32)
        row[: len(state.stop)] = state.stop
        return row

    def expected_receipt(self, state: SlotState) -> dict[str, int]:
        """What an honest step of this slot reports to have consumed."""
        return {
            "token": state.token,
            "position": state.position,
            "visible": state.position + 1,
            "epoch": state.epoch,
            "limit": state.limit,
            "seed": state.seed,
            "table": digest_of(state.blocks),
            "stop": digest_of((*state.stop, *[NO_STOP] * (self.max_stop - len(state.stop)))),
        }


@dataclass(frozen=True)
class BucketRows:
    """The first B rows of the master Buffers as device arrays, read inside a Segment."""

    bucket: int
    token: Array
    position: Array
    visible: Array
    epoch: Array
    limit: Array
    seed: Array
    table: Array
    stamp: Array
    stop: Array
    table_digest: Array
    stop_digest: Array

    @classmethod
    def load(cls, backend: Backend, state: DeviceState, bucket: int) -> BucketRows:
        """Read the bucket's rows; digests are over exactly what is read here."""
        xp = backend.xp
        rows = {name: xp.head(buffer.get(), bucket) for name, buffer in state.scalars.items()}
        full = xp.head(state.table.get(), bucket)
        table, stop = full[:, : state.table_len], xp.head(state.stop.get(), bucket)
        read = partial(cls, bucket=bucket, **rows, table=table, stamp=full[:, state.table_len], stop=stop)
        if fuses_step(xp):
            return read(
                table_digest=xp.digest_rows(table, state.table_weights.get()),
                stop_digest=xp.digest_rows(stop, state.stop_weights.get()),
            )
        return read(
            table_digest=xp.sum(table * state.table_weights.get())[:, 0],
            stop_digest=xp.sum(stop * state.stop_weights.get())[:, 0],
        )

    def sampling(self, state: DeviceState) -> SamplingRows:
        """What a sampled step consumes beside these rows."""
        return state.sampling.load(self.bucket, self.seed, self.position)

    def receipt(self, backend: Backend, accepted: Array, next_token: Array) -> Array:
        """Receipts int32 ``[B, len(RECEIPT_FIELDS)]``."""
        consumed: Sequence[Array] = (
            self.token,
            self.position,
            self.visible,
            self.epoch,
            self.limit,
            self.seed,
            self.table_digest,
            self.stop_digest,
        )
        return backend.xp.stack([*consumed, backend.xp.astype(accepted, "int32"), next_token])
