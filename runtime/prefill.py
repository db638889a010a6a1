"""Where prompts are computed: on the device itself, or on a host backend whose KV is then staged to the device."""

from __future__ import annotations

from typing import Protocol

from forebay.specs.backend import Backend
from forebay.specs.dtypes import Array
from forebay.specs.pool import Pool

from .forward import HostForward
from .host_kv import HostKV
from .request import Request


class Prefill(Protocol):
    """Computes the KV of a request's known tokens, a chunk at a time.

    Attributes:
        forward: chooses tokens from the logits this gives.
        keeps_chunks: the KV of a part of a prompt is in the request's blocks, so a request that is preempted can keep it.
    """

    forward: HostForward
    keeps_chunks: bool

    def may_advance(self, request: Request) -> bool:
        """False while it is busy with another request."""

    def advance(self, request: Request, stop: int) -> Array | None:
        """Compute positions ``request.computed`` to ``stop``; the logits ``[1, vocab]`` behind a whole prompt without a token yet."""


def wants_logits(request: Request, stop: int) -> bool:
    """True if the request's first token follows once it is computed up to ``stop``; what is recomputed has its next token already."""
    return stop == request.to_compute and not request.token_ids


class DevicePrefill:
    """On the engine's own backend, straight into the request's blocks."""

    keeps_chunks = True

    def __init__(self, forward: HostForward) -> None:
        self.forward = forward

    def may_advance(self, request: Request) -> bool:
        """Always."""
        return True

    def advance(self, request: Request, stop: int) -> Array | None:
        """Chunks of several requests may alternate."""
        tokens, start = request.known[request.computed : stop], request.computed
        wanted = wants_logits(request, stop)
        return self.forward.chunk(tokens, start, request.blocks, prompt_len=len(request.prompt), last=wanted)


class HostPrefill:
    """On a host backend into a pool of one sequence there; the finished KV is staged to the request's blocks on the device.

    Args:
        forward: of the host backend and ``host_pool``.
        host_pool: blocks of the device pool's geometry, enough for one sequence.
    """

    keeps_chunks = False

    def __init__(self, forward: HostForward, host: Backend, host_pool: Pool, device: Backend, pool: Pool) -> None:
        self.forward = forward
        self._host = host
        self._host_pool = host_pool
        self._device = device
        self._pool = pool
        self._busy: Request | None = None

    def may_advance(self, request: Request) -> bool:
        """One prompt at a time: the host pool has room for one."""
        busy = self._busy
        return busy is None or busy is request or busy.slot is None or busy.computed in (0, busy.to_compute)

    def advance(self, request: Request, stop: int) -> Array | None:
        """The chunk on the host; after the last one the whole sequence is staged."""
        self._busy = request
        first = self._host_pool.first_block
        size = self._host_pool.geometry.block_size
        blocks = range(first, first + -(-request.to_compute // size))
        tokens = request.known[request.computed : stop]
        wanted, start = wants_logits(request, stop), request.computed
        logits = self.forward.chunk(tokens, start, blocks, prompt_len=len(request.prompt), last=wanted)
        if stop == request.to_compute:
            HostKV.read(self._host, self._host_pool, blocks, stop).stage(self._device, self._pool, request.blocks)
            self._busy = None
        return logits
