"""Forward passes in which the host supplies every id: prefill, and the eager arm's decode step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.specs.backend import Backend
from forebay.specs.pool import Pool
from forebay.specs.write_loc import BlockTable, WriteLoc

from .models.llama import KVContext, Llama
from .state import SlotState

PREFILL_CHUNK = 256
"""Prompt tokens a pass; bounds the memory of a long prompt's activations."""


class HostForward:
    """Runs the model op by op, outside any Segment, with numpy ids that the doors check before any device work."""

    def __init__(self, backend: Backend, model: Llama, pool: Pool, table_len: int, path: str) -> None:
        self._backend = backend
        self._model = model
        self._pool = pool
        self._table_len = table_len
        self._path = path

    def prefill(self, tokens: Sequence[int], blocks: Sequence[int], prompt_len: int) -> int:
        """Write the KV of ``tokens`` at positions 0, 1, … into ``blocks``; return the token that follows the last.

        The first ``prompt_len`` tokens are the request's prompt; any others it made itself, and their KV is recomputed.
        """
        table = self._table([blocks])
        token = -1
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = np.asarray(tokens[start : start + PREFILL_CHUNK], np.int32)
            positions = np.arange(start, start + len(chunk), dtype=np.int32)[None]
            last = start + len(chunk) == len(tokens)
            rope = self._model.prompt_rope(positions[0], prompt_len)
            rows = slice(len(chunk) - 1, len(chunk)) if last else None
            picked = self._pass(chunk, positions, table, rows, rope)
            token = picked[0] if last else token
        return token

    def decode(self, states: Sequence[SlotState]) -> list[int]:
        """One token for each state: its token at its position."""
        tokens = np.array([s.token for s in states], np.int32)
        positions = np.array([[s.position] for s in states], np.int32)
        return self._pass(tokens, positions, self._table([s.blocks for s in states]), rows=slice(None))

    def _pass(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        table: BlockTable,
        rows: slice | None,
        rope: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> list[int]:
        """Tokens ``[B*T]`` at ``positions [B, T]``; the greedy successors of the chosen rows. ``rope`` is that of the rows."""
        b = self._backend
        dtype = self._model.cos.dtype
        turns = None if rope is None else (b.to_device(rope[0], dtype), b.to_device(rope[1], dtype))
        context = KVContext(
            pool=self._pool,
            loc=WriteLoc.paged(table, positions, table_len=self._table_len),
            table=table,
            table_len=self._table_len,
            visible=positions[:, -1] + np.int32(1),
            batch=len(positions),
            path=self._path,
            rope=turns,
        )
        hidden = self._model.forward(b, b.to_device(tokens), b.to_device(positions.reshape(-1)), context)
        if rows is None:
            return []
        picked = b.xp.argmax(self._model.logits(b, hidden[rows]))
        return [int(t) for t in b.to_host(picked)]

    def _table(self, rows: Sequence[Sequence[int]]) -> BlockTable:
        table = np.zeros((len(rows), self._table_len), np.int32)
        for row, blocks in zip(table, rows, strict=True):
            row[: len(blocks)] = blocks
        return BlockTable(table, physical=True)
