"""What requests give when each runs alone: the reference of every test that compares runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from forebay.runtime import Model, Request, SamplingParams
from forebay.runtime.host_kv import HostKV
from forebay.specs import Backend
from tests.runtime.harness import FloatArray, make_engine

ROUNDING = 2e-4
"""Largest difference of two ways to compute the same KV, whose values reach 9: one pass over all tokens, chunks of it and decode steps
differ by 2e-5 at most (rows of a product may be summed in another order); other tokens differ by far more than 1."""


class Plain:
    """One sequence at a time in the eager arm, with no reuse and room for everything; every answer is kept.

    Args:
        length: longest sequence asked for.
    """

    def __init__(self, model: Model, backend: Backend, length: int = 64) -> None:
        self._engine = make_engine(model, backend, arm="eager", slots=1, block_size=16, max_len=length)
        self._length = length
        self._continuations: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._draws: dict[tuple[tuple[int, ...], SamplingParams], tuple[int, ...]] = {}
        self._kv: dict[tuple[int, ...], FloatArray] = {}

    def close(self) -> None:
        self._engine.close()

    def continuation(self, prompt: Sequence[int], at_least: int = 1) -> tuple[int, ...]:
        """At least so many tokens of the prompt alone, whatever they are."""
        key = tuple(prompt)
        if len(self._continuations.get(key, ())) < at_least:
            room = min(max(at_least, 12), self._length - len(key))
            params = SamplingParams(max_tokens=room, ignore_eos=True)
            self._continuations[key] = self._engine.generate([list(key)], params)[0].token_ids
        return self._continuations[key]

    def tokens(self, request: Request, first: int | None = None) -> tuple[int, ...]:
        """All tokens of a request alone; ``first`` is its first one where that was not the model's choice."""
        if not request.params.plain:
            return self._drawn(request.prompt, replace(request.params, seed=request.seed, n=1))
        params, own = request.params, () if first is None else (first,)
        more = params.max_tokens - len(own)
        made = own + (self.continuation((*request.prompt, *own), more)[:more] if more else ())
        ends = [i for i, token in enumerate(made) if token in request.stop]
        return made[: ends[0] + 1] if ends else made

    def _drawn(self, prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        if (prompt, params) not in self._draws:
            self._draws[prompt, params] = self._engine.generate([prompt], params)[0].token_ids
        return self._draws[prompt, params]

    def kv(self, tokens: Sequence[int]) -> FloatArray:
        """KV of ``tokens`` computed in one pass: ``[layers, 2, len(tokens), Hkv, D]``."""
        key = tuple(tokens)
        if key not in self._kv:
            # What follows does not change the KV of what stands before, so a longer sequence answers for its beginnings too.
            blocks = range(1, 1 - (-len(key) // 16))
            self._engine._core._prefill.forward.chunk(key, 0, blocks, prompt_len=len(key), last=False)
            made = rows_of(HostKV.read(self.backend, self._engine._parts.pool, blocks, len(key)))
            for stop in range(1, len(key) + 1):
                self._kv.setdefault(key[:stop], made[:, :, :stop])
        return self._kv[key]

    @property
    def backend(self) -> Backend:
        """Where it runs."""
        return self._engine.backend


def rows_of(kv: HostKV) -> FloatArray:
    """The rows of float32 KV on the host: ``[layers, 2, tokens, Hkv, D]``."""
    layers = [x.view(np.float32).transpose(1, 0, 2, 3, 4) for x in kv.layers]
    return np.stack([x.reshape(2, -1, *x.shape[3:])[:, : kv.tokens] for x in layers])
