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

    def chunk(
        self, tokens: Sequence[int], start: int, blocks: Sequence[int], *, prompt_len: int, last: bool
    ) -> Array | None:
        """Write the KV of ``tokens`` at positions ``start``, ``start + 1``, … into ``blocks``; earlier positions are there already.

        The first ``prompt_len`` positions are the request's prompt; later tokens it made itself, and their KV is recomputed. With
        ``last``, the logits ``[1, vocab]`` behind the last token. A backend that takes fewer queries at once is given them in pieces.
        """
        ids, table = np.asarray(tokens, np.int32), self._table([blocks])
        positions = np.arange(start, start + len(ids), dtype=np.int32)[None]
        longest = self._backend.capabilities.max_query_len or len(ids)
        for first in range(0, len(ids), longest):
            piece = slice(first, first + longest)
            rope = self._model.prompt_rope(positions[0, piece], prompt_len)
            hidden = self._pass(ids[piece], positions[:, piece], table, rope)
        return self._model.logits(self._backend, hidden[len(ids[piece]) - 1 :]) if last else None

    def decode(self, states: Sequence[SlotState]) -> Array:
        """Logits ``[B, vocab]`` behind each state's token at its position, whose KV is written."""
        tokens = np.array([s.token for s in states], np.int32)
        positions = np.array([[s.position] for s in states], np.int32)
        hidden = self._pass(tokens, positions, self._table([s.blocks for s in states]))
        return self._model.logits(self._backend, hidden)

    def choose(self, logits: Array, draws: Sequence[Draw]) -> list[Chosen]:
        """The token each row of ``logits [R, vocab]`` gives by its draw; one row may serve several draws."""
        b = self._backend
        if b.xp.shape(logits)[0] < len(draws):
            logits = b.xp.take(logits, b.to_device(np.zeros(len(draws), np.int32)))
        return self._sampler.choose(logits, draws)

    def _pass(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        table: BlockTable,
        rope: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Array:
        """Hidden states ``[B*T, hidden]`` of tokens ``[B*T]`` at ``positions [B, T]``; ``rope`` where the tables do not serve."""
        b, dtype = self._backend, self._model.cos.dtype
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
        return self._model.forward(b, b.to_device(tokens), b.to_device(positions.reshape(-1)), context)

    def _table(self, rows: Sequence[Sequence[int]]) -> BlockTable:
        table = np.zeros((len(rows), self._table_len), np.int32)
        for row, blocks in zip(table, rows, strict=True):
            row[: len(blocks)] = blocks
        return BlockTable(table, physical=True)
