"""A greedy engine over B slots: requests start and end at any step, prompts are prefilled through the pool's own doors.

Three arms give the same tokens: *eager* (the host supplies ids, position and slot each step), *hostfree* (the decode Segment,
run) and *captured* (the same Segment, replayed). Between two steps the engine admits requests, grows block tables, and releases
the tokens whose receipts checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

from forebay.specs.backend import Backend
from forebay.specs.errors import Cancelled, DeviceLost, ForebayError, InvalidInput, StaleTrace
from forebay.specs.segment import Ticket

from .admission import MAX_STOP_TOKENS, checked_request, pair_with_params
from .allocator import BlockAllocator
from .decode_step import decode_segment
from .forward import HostForward
from .lanes import Lanes, capture_mode
from .ledger import Ledger, Mismatch, Release
from .model import Model
from .models.llama import LoadProgress
from .report import describe, describe_memory
from .request import GenerationResult, Prompt, Request
from .sampling import SamplingParams
from .settings import Settings
from .sizing import check_windows, longest_sequence, pool_geometry
from .state import DeviceState, SlotState

MAX_RESEEDS = 3


class Engine:
    """Decodes requests of one model on one backend.

    Arguments that are None come from ``settings`` (resolved from file and environment when that is None too).

    Args:
        model: from ``load_model``.
        backend: from ``open_backend``; stays open when the engine closes.
        capture: ``off`` (hostfree), ``auto`` or ``required``.
        arm: ``eager``, ``hostfree`` or ``captured``; overrides ``capture``.
        attention: ``direct`` or ``gather``.
        slots: sequences decoded at once.
        block_size: tokens a KV block.
        num_blocks: blocks of the pool, the sink included.
        max_len: longest sequence, prompt and tokens made together.
        kv_dtype: element type of the pool.
        progress: called with (tensors done, tensors in all) while the weights are loaded.

    Raises:
        InvalidInput, InvalidSetting, InvalidLayout, Unsupported: before anything is put on the device.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        *,
        capture: str | None = None,
        arm: str | None = None,
        attention: str | None = None,
        slots: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        max_len: int | None = None,
        kv_dtype: str | None = None,
        settings: Settings | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        given = {
            "capture": capture,
            "arm": arm,
            "attention": attention,
            "slots": slots,
            "block_size": block_size,
            "num_blocks": num_blocks,
            "max_len": max_len,
            "kv_dtype": kv_dtype,
        }
        base = Settings.resolve() if settings is None else settings
        self.settings = base.override(**{key: value for key, value in given.items() if value is not None})
        self.model = model
        self.backend = backend
        self.arm = self.settings.arm or ("hostfree" if self.settings.capture == "off" else "captured")
        self._max_len = longest_sequence(self.settings, model)
        check_windows(backend, model, self._max_len)
        geometry = pool_geometry(self.settings, model, self._max_len)
        self._allocator = BlockAllocator(geometry.num_blocks)
        self._table_len = -(-self._max_len // geometry.block_size)
        with ExitStack() as made:
            self._pool = backend.create_pool(geometry)
            made.callback(backend.release, self._pool)
            self._llama = model.bind(backend, max_len=self._max_len, progress=progress)
            self._device = DeviceState(backend, self.settings.slots, self._table_len, MAX_STOP_TOKENS)
            for buffer in (*self._llama.buffers, *self._device.buffers):
                made.callback(backend.release, buffer)
            self._made = made.pop_all()
        self._ledger = Ledger(self._device)
        path = self.settings.attention
        self._forward = HostForward(backend, self._llama, self._pool, self._table_len, path)
        self._lanes = Lanes(
            backend,
            lambda bucket: decode_segment(self._llama, self._pool, self._device, bucket, path),
            self.settings.slots,
            capture_mode(self.arm, self.settings.capture),
            self.settings.max_rewarm,
        )
        self._made.callback(self._lanes.close)
        self._closed = False
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._epoch = 0
        self._arrivals = 0
        self._last_ticket: Ticket | None = None
        self._counts = {"steps": 0, "eager_steps": 0, "tokens": 0, "prefills": 0, "reseeds": 0, "finished": 0}

    # -- life ------------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Free the traces, the pool, the state and the weights; the backend stays open."""
        self._closed = True
        self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- requests --------------------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[Request, int], None] | None = None,
    ) -> list[GenerationResult]:
        """Finish every prompt; results come in the order of the prompts.

        ``params`` is one for all, or one a prompt. ``on_token`` is called with each released token. Every prompt is checked before
        any device work.

        Raises:
            InvalidInput: a bad prompt or parameter, or a request larger than the pool; nothing was started.
        """
        pairs = pair_with_params(prompts, params)
        requests = [self._checked(prompt, p, f"prompt {i}") for i, (prompt, p) in enumerate(pairs, start=1)]
        self._waiting.extend(requests)
        try:
            while any(r.finish_reason is None for r in requests):
                for request, token in self.step():
                    if on_token is not None:
                        on_token(request, token)
        finally:
            self._abandon([r for r in requests if r.finish_reason is None])
        return [r.result(self.model.tokenizer) for r in requests]

    def _abandon(self, requests: Sequence[Request]) -> None:
        """The call that made these requests is leaving by an error: give back what they hold, so that the engine stays usable."""
        for request in requests:
            error = Cancelled(f"request {request.index}: the call that made it ended before it did")
            if request in self._waiting:
                self._waiting.remove(request)
                request.error, request.finish_reason = error, "error"
            elif request.slot is not None:
                # The error that is on its way out says what is wrong with the device; a second one must not hide it.
                with suppress(Exception):
                    self._fail(request, error)

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Queue one request; ``step`` works on it.

        Raises: as :meth:`generate`.
        """
        request = self._checked(prompt, SamplingParams() if params is None else params, "prompt")
        self._waiting.append(request)
        return request

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._waiting or self._running)

    def _checked(self, prompt: Prompt, params: SamplingParams, what: str) -> Request:
        if self._closed:
            raise InvalidInput("the engine is closed; make a new one")
        request = checked_request(
            prompt,
            params,
            what,
            index=self._arrivals,
            model=self.model,
            max_len=self._max_len,
            geometry=self._pool.geometry,
        )
        self._arrivals += 1
        return request

    # -- one step --------------------------------------------------------------------------------------------------------
    def step(self) -> list[tuple[Request, int]]:
        """Admit what fits, do one decode step, and return the tokens that may be released now.

        Raises:
            StaleTrace: the device ran a row that holds no request; every running request ends with this error.
            CaptureDeclined: ``capture = "required"`` and the device declined.
        """
        released = self._admit()
        if self.arm == "eager":
            return released + self._eager_step()
        active = self._ledger.active
        if active:
            self._grow_tables(active)
            bucket = self._lanes.bucket_for(max(active))
            self._last_ticket = self._lanes.step(bucket)
            self._ledger.dispatched(self._last_ticket, bucket)
            self._counts["steps"] += 1
        behind = 0 if self._ledger.must_read_now or not self._ledger.active else self.settings.read_behind
        try:
            for ticket, results in self._ledger.read(behind):
                self._allocator.retire(ticket)
                for result in results:
                    released += self._settle(result)
        except StaleTrace as error:
            self._fail_all(error)
            raise
        return released

    def _settle(self, result: Release | Mismatch) -> list[tuple[Request, int]]:
        request = self._running[result.slot]
        if isinstance(result, Mismatch):
            self._reseed(request, result)
            return []
        request.reseeds = 0
        request.take(result.token)
        self._counts["tokens"] += 1
        if request.finish_reason is not None:
            self._finish(request)
        return [(request, result.token)]

    def _admit(self) -> list[tuple[Request, int]]:
        """Start waiting requests in order of arrival while a slot and all their blocks are there."""
        released: list[tuple[Request, int]] = []
        while self._waiting:
            request, free_slots = self._waiting[0], self._free_slots()
            if not free_slots or not self._has_blocks_for(request):
                break
            self._waiting.popleft()
            request.slot = free_slots[0]
            self._running[request.slot] = request
            try:
                released += self._start(request)
            except BaseException:
                self._put_back(request)
                raise
        return released

    def _put_back(self, request: Request) -> None:
        """A start that was cut off, by an error or an interrupt: the request waits again, as if it had never been taken."""
        if request.slot is None or request.finish_reason is not None:
            return
        self._ledger.drop(request.slot)
        del self._running[request.slot]
        self._allocator.free(request.blocks)
        request.slot, request.blocks, request.token_ids = None, [], []
        self._waiting.appendleft(request)

    def _start(self, request: Request) -> list[tuple[Request, int]]:
        """Prefill through the doors, release the first token, seed the slot."""
        token = self._prefill(request, request.prompt)
        request.take(token)
        self._counts["tokens"] += 1
        if request.finish_reason is not None:
            self._finish(request)
        else:
            self._seed(request)
        return [(request, token)]

    def _prefill(self, request: Request, tokens: Sequence[int]) -> int:
        self._hold_blocks(request, len(tokens))
        self._counts["prefills"] += 1
        return self._forward.prefill(tokens, request.blocks, len(request.prompt))

    def _seed(self, request: Request) -> None:
        """A request boundary: every per-slot input is seeded, each by itself (clause C6)."""
        self._epoch += 1
        slot = self._slot_of(request)
        state = SlotState(
            token=request.token_ids[-1],
            position=len(request.prompt) + len(request.token_ids) - 1,
            epoch=self._epoch,
            limit=request.final_position,
            seed=request.params.seed,
            blocks=tuple(request.blocks),
            stop=request.stop,
        )
        if self.arm != "eager":
            self._device.seed(slot, state)
            self._lanes.boundary()
        self._ledger.seed(slot, state)

    def _reseed(self, request: Request, mismatch: Mismatch) -> None:
        """A receipt did not match: release nothing, recompute the KV from the known tokens, seed again (clause C5c)."""
        request.reseeds += mismatch.at_fault
        self._counts["reseeds"] += 1
        if request.reseeds > MAX_RESEEDS:
            error = DeviceLost(
                f"request {request.index}: receipts did not match {request.reseeds} times in a row ({mismatch.why})"
            )
            self._fail(request, error)
            return
        self._prefill(request, (*request.prompt, *request.token_ids[:-1]))
        self._seed(request)

    def _grow_tables(self, active: Sequence[int]) -> None:
        """Give each row the block its next position needs; a changed table row is the only upload of a steady step."""
        block_size = self._pool.geometry.block_size
        for slot in active:
            request = self._running[slot]
            if self._ledger.next_position(slot) >= len(request.blocks) * block_size:
                self._hold_blocks(request, self._ledger.next_position(slot) + 1)
                self._ledger.grow(slot, tuple(request.blocks))
                if self.arm != "eager":
                    self._device.write_table(slot, self._ledger.state(slot))

    def _eager_step(self) -> list[tuple[Request, int]]:
        """The arm in which the host supplies ids, position and slot each step."""
        active = self._ledger.active
        if not active:
            return []
        self._grow_tables(active)
        tokens = self._forward.decode([self._ledger.state(slot) for slot in active])
        self._counts["steps"] += 1
        self._counts["eager_steps"] += 1
        released = []
        for slot, token in zip(active, tokens, strict=True):
            self._ledger.advance(slot, token)
            released += self._settle(Release(slot, token, ended=False))
        return released

    # -- blocks and slots ------------------------------------------------------------------------------------------------
    def _free_slots(self) -> list[int]:
        return [s for s in range(self.settings.slots) if s not in self._running]

    def _has_blocks_for(self, request: Request) -> bool:
        """True if all blocks the request may ever need are free beyond what running requests may still take."""
        size = self._pool.geometry.block_size
        promised = sum(r.blocks_needed(size) - len(r.blocks) for r in self._running.values())
        return request.blocks_needed(size) <= self._allocator.num_free - promised

    def _hold_blocks(self, request: Request, tokens: int) -> None:
        missing = -(-tokens // self._pool.geometry.block_size) - len(request.blocks)
        if missing > 0:
            request.blocks += self._allocator.allocate(missing)

    def _slot_of(self, request: Request) -> int:
        if request.slot is None:
            raise InvalidInput(f"request {request.index} holds no slot")
        return request.slot

    def _finish(self, request: Request) -> None:
        """Give slot and blocks back; the row has retired itself on the device."""
        slot = self._slot_of(request)
        self._ledger.drop(slot)
        del self._running[slot]
        self._allocator.free(request.blocks, after=self._last_ticket)
        request.slot, request.blocks = None, []
        self._counts["finished"] += 1

    def _fail(self, request: Request, error: ForebayError) -> None:
        """End a request by an error. The host's side is settled first: a lost device must not keep slots and blocks."""
        slot = self._slot_of(request)
        request.error, request.finish_reason = error, "error"
        self._finish(request)
        if self.arm != "eager":
            self._device.idle(slot)

    def _fail_all(self, error: ForebayError) -> None:
        """What the device holds is not what the ledger says: give up every running request and make every row idle."""
        for ticket in self._ledger.abandon():
            self._allocator.retire(ticket)
        for request in tuple(self._running.values()):
            self._fail(request, error)
        for slot in range(self.settings.slots):
            self._device.idle(slot)

    # -- report ----------------------------------------------------------------------------------------------------------
    def report(self) -> dict[str, Any]:
        """Resolved configuration with sources, backend selection, counters, lanes and memory, as plain data."""
        return {
            **describe(self.settings, self.arm, self.backend, self.model, self._max_len),
            "counters": self.backend.counters.as_dict(),
            "engine": dict(self._counts),
            "lanes": self._lanes.report(),
            "memory": describe_memory(self._pool, self._allocator, self.model),
        }
