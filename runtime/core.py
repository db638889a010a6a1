"""One step of the engine: who gets a slot and blocks, who computes its prompt, which tokens are released (clauses C4 to C6, L4 to L6).

A request waits, computes its prompt in chunks, decodes, and ends. It may be preempted on the way: its blocks go to somebody else, and
it waits again at its old place, its KV recomputed later or kept in host memory meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from forebay.specs.dtypes import Array
from forebay.specs.errors import Cancelled, DeviceLost, ForebayError, StaleTrace

from .decoder import Decoder
from .kv_cache import KVCache
from .latency import Latencies
from .ledger import Mismatch, Release
from .offload import Offload
from .prefill import Prefill
from .request import FinishReason, Request
from .room import Room
from .sampler import Chosen
from .sampling_rows import Draw, Seen
from .stop_strings import StopStrings
from .waiting import WaitingQueue

MAX_RESEEDS: Final = 3

Token = tuple[Request, int]


class EngineCore:
    """Waiting and running requests over one decoder, one KV cache and one way to compute prompts.

    Args:
        slots: requests that run at once.
        budget: tokens a step may compute, decoding rows and prompt chunks together.
        offload: where preempted requests keep their KV; None recomputes it.
        clock: seconds, for deadlines and latencies.

    Attributes:
        counts: what happened, by name.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        prefill: Prefill,
        waiting: WaitingQueue,
        offload: Offload | None,
        stop_strings: StopStrings,
        latencies: Latencies,
        *,
        slots: int,
        budget: int,
        read_behind: int,
        eager: bool,
        clock: Callable[[], float],
    ) -> None:
        self.decoder: Final = decoder
        self.cache: Final = cache
        self.waiting: Final = waiting
        self.running: Final[dict[int, Request]] = {}
        self.counts: Final[Counter[str]] = Counter()
        self.steps = 0
        self._prefill = prefill
        self._offload = offload
        self._stop_strings = stop_strings
        self._latencies = latencies
        self._slots = slots
        self._budget = budget
        self._read_behind = read_behind
        self._eager = eager
        self._clock = clock
        self._released: list[Token] = []
        self._room = Room(
            waiting,
            self.running,
            cache,
            decoder,
            offload,
            keeps_chunks=prefill.keeps_chunks,
            drain=self._drain,
            gave_way=lambda request: latencies.waits_from(request, self.steps),
        )

    # -- one step --------------------------------------------------------------------------------------------------------
    def step(self) -> list[Token]:
        """End what is overdue, admit what fits, compute prompt chunks and one decode step; the tokens that may be released now.

        Tokens released before an error are returned by the next call.

        Raises:
            StaleTrace: the device ran a row that holds no request; every running request ends with this error.
            DeviceLost: the device answers no more; every request ends with this error, waiting ones too.
            Unsupported: the device's memory was used up; what was not done is tried again by the next call.
            CaptureDeclined: ``capture = "required"`` and the device declined.
        """
        self.steps += 1
        self._end_overdue()
        try:
            self._take_up()
            self._admit()
            self._compute_prompts()
            if self._eager:
                self._step_eagerly()
            else:
                self._step()
        except DeviceLost as error:
            self._lose_for_good(error)
            raise
        released, self._released = self._released, []
        return released

    def _take_up(self) -> None:
        """Set right what an error or an interrupt cut off in an earlier step: ends half done, rows whose token was never settled."""
        for slot, request in tuple(self.running.items()):
            if request.finish_reason is not None:
                self.end(request, request.finish_reason, request.error)
            elif self.decoder.in_flight or not self.decoder.ledger.holds(slot):
                continue
            elif not self.decoder.ledger.agrees(slot, request.to_compute):
                self._restart(request, Mismatch(slot, "its last step was never settled", at_fault=False))

    def _end_overdue(self) -> None:
        now = self._clock()
        for request in (*self.waiting, *self.running.values()):
            if request.deadline is not None and request.deadline <= now:
                self.end(request, "deadline")

    # -- admission -------------------------------------------------------------------------------------------------------
    def submit(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            QueueFull: too many wait.
        """
        self.waiting.push(request, self.steps)
        for member in (request, *request.siblings):
            self._latencies.arrived(member, self.steps)

    def _admit(self) -> None:
        """Give slots to waiting requests in order, as long as the first of them finds a slot and blocks."""
        while self.waiting:
            request = self.waiting.first
            if request.slot is not None:
                self.waiting.remove(request)  # an interrupt came between the two lines below
                continue
            slot = next((s for s in range(self._slots) if s not in self.running), None)
            if slot is None:
                if self._room.slot_for(request):
                    continue
                break
            if not self._take_in(request):
                break
            self.running[slot] = request
            request.slot = slot
            self.waiting.remove(request)
            self._latencies.admitted(request, self.steps)

    def _take_in(self, request: Request) -> bool:
        """Blocks for what the request has to compute and the token behind it, its saved KV brought back; False if there is no room."""
        reused = self.cache.attach(request) if request.saved is None and not request.blocks else 0
        if not self._room.for_newcomer(request, lambda: self.cache.extend(request, request.first_room)):
            if request.saved is None and request.computed < request.to_compute:
                self.cache.release(request, self.decoder.last_ticket)
            return False
        self.counts["reused_tokens"] += reused
        if request.saved is not None and self._offload is not None:
            self._offload.restore(request)
        return True

    # -- prompts ---------------------------------------------------------------------------------------------------------
    def _compute_prompts(self) -> None:
        """Prompt chunks of the requests that do not decode yet, in their order, within the step's budget.

        The row of a request that goes on decoding in this very step is part of the budget too; without room for it, it begins with
        the next step.
        """
        left = max(self._budget - len(self.decoder.active), 1)
        for request in sorted(self.running.values(), key=lambda r: r.place):
            if request.slot is None or self.decoder.ledger.holds(request.slot):
                continue
            if not request.token_ids and request.computed == request.to_compute:
                # Cut off between the last chunk and its token, whose logits are to be computed again: from the start, because its
                # blocks may be cached by now, and a host's pool somebody else's.
                self.cache.release(request, self.decoder.last_ticket)
            if not self._holds_room(request):
                continue
            missing = request.to_compute - request.computed
            if not left or (missing and not self._prefill.may_advance(request)):
                continue
            chunk = min(missing, left)
            left -= chunk
            left -= self._advance(request, request.computed + chunk, may_decode=left > 0)

    def _holds_room(self, request: Request) -> bool:
        """True once a running request holds blocks for what it computes: a restarted one has none."""
        self.counts["reused_tokens"] += self.cache.attach(request)
        return self._room.for_running(request, lambda: self.cache.extend(request, request.first_room))

    def _advance(self, request: Request, stop: int, *, may_decode: bool) -> bool:
        """Compute the known tokens up to position ``stop``; after the last one choose the first token.

        True if the request decodes from now on.
        """
        if stop > request.computed:
            logits = self._prefill.advance(request, stop)
            self.counts["prefill_tokens"] += stop - request.computed
            ends = stop == request.to_compute
            first = self._first_tokens(request, logits) if ends and logits is not None and not request.token_ids else {}
            request.computed = stop
            if ends:
                self.counts["prefills"] += 1
                self.cache.publish(request)
            for member, chosen in first.items():
                if member is not request:
                    self._fork(request, member)
                self._take(member, chosen)
        decodes = may_decode and not request.finished and request.computed == request.to_compute
        if decodes:
            self.decoder.seed(request)
        return decodes

    def _first_tokens(self, request: Request, logits: Array) -> dict[Request, Chosen]:
        """The first token of a request and of its siblings, all drawn from the one row of ``logits``."""
        family = [*(s for s in request.siblings if not s.finished and not s.token_ids), request]
        seen = Seen.of(request.params, request.prompt)
        draws = [Draw(member.params, member.seed, len(request.prompt) - 1, seen) for member in family]
        return dict(zip(family, self._prefill.forward.choose(logits, draws), strict=True))

    def _fork(self, request: Request, sibling: Request) -> None:
        """A further sample begins with the blocks of the first one, and waits for a slot; both may be done if a start was cut off."""
        if not sibling.blocks:
            self.counts["forks"] += 1
            self.cache.fork(request, sibling)
        sibling.order = request.order
        if sibling not in self.waiting:
            self.waiting.put_back(sibling)
            self._latencies.waits_from(sibling, self.steps)

    # -- decoding --------------------------------------------------------------------------------------------------------
    def _step(self) -> None:
        self._prepare_rows()
        if self.decoder.active:
            self.decoder.dispatch()
        self._collect(self._read_behind)

    def _step_eagerly(self) -> None:
        self._prepare_rows()
        if self.decoder.active:
            for release in self.decoder.step_eagerly():
                self._settle(release)

    def _prepare_rows(self) -> None:
        """Give each row a block of its own for its next position; the oldest request first, so that the youngest gives way."""
        for request in sorted(self.running.values(), key=lambda r: r.place):
            slot = request.slot
            if slot is None or not self.decoder.ledger.is_active(slot):
                continue
            position = self.decoder.ledger.next_position(slot)
            extend = partial(self.cache.extend, request, position + 1)
            separate = partial(self.cache.make_private, request, position, self.decoder.last_ticket)
            if self._room.for_running(request, extend) and self._room.for_running(request, separate):
                self.decoder.grow(request)

    def _drain(self) -> None:
        """Read every step in flight, so that what each request has computed is known and freed blocks are free."""
        self._collect(0)

    def _collect(self, read_behind: int) -> None:
        try:
            for ticket, results in self.decoder.collect(read_behind):
                self.cache.allocator.retire(ticket)
                if any(isinstance(r, Mismatch) and r.astray for r in results):
                    self._distrust_pool()
                for result in results:
                    self._settle(result)
        except StaleTrace as error:
            self._lose_device(error)
            raise

    def _settle(self, result: Release | Mismatch) -> None:
        request = self.running[result.slot]
        if isinstance(result, Mismatch):
            self._restart(request, result)
            return
        request.reseeds = 0
        request.computed = request.to_compute + 1
        self._take(request, result, retired=result.ended)

    def _restart(self, request: Request, mismatch: Mismatch) -> None:
        """A receipt did not match: release nothing, compute the KV of the known tokens anew, seed again (clause C5c)."""
        request.reseeds += mismatch.at_fault
        self.counts["reseeds"] += 1
        if request.reseeds > MAX_RESEEDS:
            why = f"receipts did not match {request.reseeds} times in a row ({mismatch.why})"
            self.end(request, "error", DeviceLost(f"request {request.index}: {why}"))
        else:
            self.cache.release(request, self.decoder.last_ticket)
            self.decoder.drop(mismatch.slot, retired=False)

    def _distrust_pool(self) -> None:
        """A row acted out of its place: what prompts have computed so far, and what is cached, may be written over."""
        computing = [r for s, r in self.running.items() if not self.decoder.ledger.holds(s)]
        parked = [r for r in self.waiting if r.blocks]
        self.cache.distrust([*computing, *parked], self.decoder.last_ticket)

    def _take(self, request: Request, made: Chosen | Release, *, retired: bool = True) -> None:
        """Release a token; end the request if it is the last."""
        request.take(made.token, made.logprobs)
        self._stop_strings.check(request)
        self._latencies.released(request)
        self.counts["tokens"] += 1
        self._released.append((request, made.token))
        if request.finish_reason is not None:
            self.end(request, request.finish_reason, retired=retired)

    # -- ends ------------------------------------------------------------------------------------------------------------
    def end(
        self, request: Request, reason: FinishReason, error: ForebayError | None = None, *, retired: bool = False
    ) -> None:
        """End a request wherever it stands and give back what it holds; siblings that have not begun end with it.

        ``retired``: its row has retired itself on the device.
        """
        request.finish_reason, request.error = reason, error
        request.saved = None
        if request in self.waiting:
            self.waiting.remove(request)
            self._latencies.left(request, self.steps)
        slot = request.slot
        if request.computed == request.to_compute and reason in ("stop", "length"):
            self.cache.publish(request)
        self.cache.release(request, self.decoder.last_ticket)
        if slot is not None:
            self.decoder.drop(slot, retired=retired)
            del self.running[slot]
            request.slot = None
        self.counts["finished" if reason in ("stop", "length") else reason] += 1
        if not request.token_ids:
            for sibling in request.siblings:
                if not sibling.finished:
                    self.end(sibling, reason, error)

    def cancel(self, request: Request, why: str) -> None:
        """End a request and the samples that come of it; nothing happens to what has ended."""
        for member in (*request.siblings, request):
            if not member.finished:
                self.end(member, "cancelled", Cancelled(f"request {member.index}: {why}"))
            elif member.slot is not None or member.blocks:  # its end was cut off
                self.end(member, member.finish_reason or "cancelled", member.error)

    def end_all(self, error: Cancelled) -> None:
        """End every request without asking the device, whose memory is about to be freed."""
        for request in (*self.waiting, *self.running.values()):
            for member in (request, *request.siblings):
                if not member.finished:
                    self.end(member, "cancelled", error, retired=True)

    def _lose_device(self, error: ForebayError) -> None:
        """The device cannot be trusted any more: give up every running request and what waiting ones hold."""
        for request in tuple(self.running.values()):
            self.end(request, "error", error, retired=True)
        self.cache.distrust([r for r in self.waiting if r.blocks], None)
        with suppress(ForebayError):
            for ticket in self.decoder.give_up():
                self.cache.allocator.retire(ticket)

    def _lose_for_good(self, error: DeviceLost) -> None:
        """No step in flight will ever end, and nothing the device holds can be read again."""
        for request in (*self.running.values(), *self.waiting):
            self.end(request, request.finish_reason or "error", request.error or error, retired=True)
        self.decoder.ledger.forget_steps()
        self.cache.allocator.retire_all()
        if self.cache.prefix is not None:
            self.cache.prefix.clear()

    def report(self) -> dict[str, int]:
        """Counts of what happened since the engine was made, by name."""
        offload = self._offload
        names = ("tokens", "prefills", "prefill_tokens", "reused_tokens", "forks", "reseeds")
        ends = ("finished", "cancelled", "deadline", "error")
        return {
            "steps": self.decoder.steps,
            "eager_steps": self.decoder.eager_steps,
            **{name: self.counts[name] for name in (*names, *ends)},
            "preemptions": self._room.preemptions,
            "block_copies": self.cache.copies,
            "offloaded": 0 if offload is None else offload.saves,
            "restored": 0 if offload is None else offload.restores,
            "offload_refused": 0 if offload is None else offload.refused,
        }
