"""Forward passes in which the host supplies every id: prefill, and the eager arm's decode step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.specs.backend import Backend
from forebay.specs.dtypes import Array
from forebay.specs.pool import Pool
from forebay.specs.write_loc import BlockTable, WriteLoc

from .models.llama import KVContext, Llama
from .sampler import Chosen, HostSampler
from .sampling_rows import Draw
from .state import SlotState

PREFILL_CHUNK = 256
"""Prompt tokens a pass; bounds the memory of a long prompt's activations."""


class HostForward:
    """Runs the model op by op, outside any Segment, with numpy ids that the doors check before any device work."""

    def __init__(
        self, backend: Backend, model: Llama, pool: Pool, sampler: HostSampler, table_len: int, path: str
    ) -> None:
        self._backend = backend
        self._model = model
        self._pool = pool
        self._sampler = sampler
        self._table_len = table_len
        self._path = path

    def prefill(self, tokens: Sequence[int], blocks: Sequence[int], draw: Draw) -> Chosen:
        """Write the KV of ``tokens`` at positions 0, 1, … into ``blocks``; choose the token that follows the last."""
        table = self._table([blocks])
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = np.asarray(tokens[start : start + PREFILL_CHUNK], np.int32)
            positions = np.arange(start, start + len(chunk), dtype=np.int32)[None]
            hidden = self._pass(chunk, positions, table)
        return self._choose(hidden[len(chunk) - 1 : len(chunk)], [draw])[0]

    def decode(self, states: Sequence[SlotState]) -> list[Chosen]:
        """One token for each state: its token at its position."""
        tokens = np.array([s.token for s in states], np.int32)
        positions = np.array([[s.position] for s in states], np.int32)
        hidden = self._pass(tokens, positions, self._table([s.blocks for s in states]))
        return self._choose(hidden, [s.draw for s in states])

    def _choose(self, hidden: Array, draws: Sequence[Draw]) -> list[Chosen]:
        return self._sampler.choose(self._model.logits(self._backend, hidden), draws)

    def _pass(self, tokens: np.ndarray, positions: np.ndarray, table: BlockTable) -> Array:
        """Hidden states of tokens ``[B*T]`` at ``positions [B, T]``."""
        b = self._backend
        context = KVContext(
            pool=self._pool,
            loc=WriteLoc.paged(table, positions, table_len=self._table_len),
            table=table,
            table_len=self._table_len,
            visible=positions[:, -1] + np.int32(1),
            batch=len(positions),
            path=self._path,
        )
        return self._model.forward(b, b.to_device(tokens), b.to_device(positions.reshape(-1)), context)

    def _table(self, rows: Sequence[Sequence[int]]) -> BlockTable:
        table = np.zeros((len(rows), self._table_len), np.int32)
        for row, blocks in zip(table, rows, strict=True):
            row[: len(blocks)] = blocks
        return BlockTable(table, physical=True)
