"""What the host believes each slot holds, checked against the receipts of the device (clause C5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from forebay.specs.dtypes import HostArray
from forebay.specs.errors import StaleTrace
from forebay.specs.segment import Ticket

from .sampler import TokenLogprobs, token_logprobs
from .sampling_rows import SAMPLING_FIELDS, expected_sampling
from .state import ACCEPTED, CONSUMED, NEXT_TOKEN, RECEIPT_FIELDS, DeviceState, SlotState
from .variants import Variant

PLACE: Final = ("position", "table")
"""What decides where a row writes its KV."""


@dataclass(frozen=True)
class Release:
    """A token whose receipt checked: ``slot`` consumed what it should have and emitted ``token``; ``ended``: the row retired.

    ``logprobs`` come with it where the request asked for them.
    """

    slot: int
    token: int
    ended: bool
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Mismatch:
    """Nothing of this slot is released until it has been re-seeded. ``why`` names the fields.

    ``astray``: the row acted, and at a place that may be another slot's. ``at_fault`` is False for those other slots: their own
    receipts match, but what they computed from may have been written over.
    """

    slot: int
    why: str
    astray: bool = False
    at_fault: bool = True


@dataclass(frozen=True)
class _Dispatched:
    """One step in flight: its ticket, and epoch and blocks of each slot when it was dispatched."""

    ticket: Ticket
    slots: dict[int, tuple[int, tuple[int, ...]]]


@dataclass
class _Entry:
    """The ledger of one slot: the state its next *unread* step must consume, and how far steps were dispatched."""

    state: SlotState
    dispatched: int
    first_step_unread: bool = True
    ended: bool = False


class Ledger:
    """One entry a slot; it belongs to the slot, so buckets can change in the middle of a request."""

    def __init__(self, device: DeviceState) -> None:
        self._device = device
        self._entries: dict[int, _Entry] = {}
        self._pending: deque[_Dispatched] = deque()

    @property
    def in_flight(self) -> int:
        """Steps dispatched and not yet read."""
        return len(self._pending)

    @property
    def active(self) -> list[int]:
        """Slots whose next step may still act, in order."""
        return sorted(slot for slot in self._entries if self.is_active(slot))

    def is_active(self, slot: int) -> bool:
        """True if the slot's next step may still act."""
        entry = self._entries.get(slot)
        return entry is not None and not entry.ended and entry.dispatched < entry.state.limit

    @property
    def must_read_now(self) -> bool:
        """True while a seed's first step is unread: it is checked at once, later ones may be read behind (clause C5d)."""
        return any(e.first_step_unread and e.dispatched > e.state.position for e in self._entries.values())

    def holds(self, slot: int) -> bool:
        """True from the slot's seed until it is dropped."""
        return slot in self._entries

    def agrees(self, slot: int, position: int) -> bool:
        """True if, with no step in flight, the slot stands at ``position`` and no step of it is missing."""
        entry = self._entries[slot]
        return entry.state.position == entry.dispatched == position

    def next_position(self, slot: int) -> int:
        """Position the slot's next dispatched step will consume, for growing its table in time."""
        return self._entries[slot].dispatched

    def state(self, slot: int) -> SlotState:
        """State the slot's next unread step must consume."""
        return self._entries[slot].state

    def seed(self, slot: int, state: SlotState) -> None:
        """Take a slot into the ledger at a request boundary; receipts of older epochs no longer concern it."""
        self._entries[slot] = _Entry(state, dispatched=state.position)

    def grow(self, slot: int, blocks: tuple[int, ...]) -> None:
        """The slot's table row has new blocks, from the next dispatched step on."""
        entry = self._entries[slot]
        entry.state = replace(entry.state, blocks=blocks)

    def advance(self, slot: int, token: int) -> None:
        """The eager arm's step: the host itself supplied what the row consumed, so there is no receipt to check."""
        entry = self._entries[slot]
        entry.ended = entry.state.ends_with(token)
        entry.state = entry.state.advanced(token)
        entry.dispatched += 1
        entry.first_step_unread = False

    def drop(self, slot: int) -> None:
        """The slot has no request any more."""
        self._entries.pop(slot, None)

    def dispatched(self, ticket: Ticket, bucket: int) -> None:
        """A step over the first ``bucket`` slots is on its way."""
        slots = {s: (e.state.epoch, e.state.blocks) for s, e in self._entries.items() if s < bucket}
        for slot in slots:
            self._entries[slot].dispatched += 1
        self._pending.append(_Dispatched(ticket, slots))

    def read(self, lag: int) -> Iterator[tuple[Ticket, list[Release | Mismatch]]]:
        """Read steps until at most ``lag`` are in flight; for each, what may be released and what does not match.

        Rows advance once the caller has come back for more: what it did not settle, because it was cut off, does not match at the
        next step, and is computed anew. A step that could not be read stays in flight.

        Raises:
            StaleTrace: the device ran a row that the ledger holds idle.
        """
        while len(self._pending) > lag:
            step = self._pending[0]
            emits = step.ticket.get()
            self._pending.popleft()
            rows = len(emits["receipt"])
            results = [
                r for slot in range(rows) if (r := self._check(slot, step, {k: x[slot] for k, x in emits.items()}))
            ]
            results = self._contain(results)
            yield step.ticket, results
            for result in results:
                if isinstance(result, Release) and result.slot in self._entries:
                    self._advance(result)

    def forget_steps(self) -> None:
        """The device is lost: steps in flight are never read."""
        self._pending.clear()

    def abandon(self) -> Iterator[Ticket]:
        """Wait for every step in flight without looking at what it says."""
        while self._pending:
            ticket = self._pending.popleft().ticket
            ticket.get()
            yield ticket

    def _check(self, slot: int, step: _Dispatched, emits: Mapping[str, HostArray]) -> Release | Mismatch | None:
        """Hold one row's emits against the ledger; changes nothing."""
        entry, sent, receipt = self._entries.get(slot), step.slots.get(slot), emits["receipt"]
        if sent is None or entry is None or entry.ended or sent[0] != entry.state.epoch:
            self._check_idle(slot, sent, entry, receipt)
            return None
        wrong = self._wrong_fields(replace(entry.state, blocks=sent[1]), emits)
        if wrong or not receipt[ACCEPTED]:
            refused = [] if receipt[ACCEPTED] else ["the device did not accept the row"]
            why = f"slot {slot}: " + ", ".join([*wrong.values(), *refused])
            return Mismatch(slot, why, astray=not refused and not wrong.keys().isdisjoint(PLACE))
        token, asked = int(receipt[NEXT_TOKEN]), entry.state.params.logprobs
        logprobs = None if asked is None else token_logprobs(emits["top_ids"], emits["logprobs"], asked)
        return Release(slot, token, entry.state.ends_with(token), logprobs)

    def _wrong_fields(self, state: SlotState, emits: Mapping[str, HostArray]) -> dict[str, str]:
        """What the row consumed otherwise than ``state`` has it, in words by field."""
        expected = self._device.expected_receipt(state)
        got = dict(zip(RECEIPT_FIELDS, (int(x) for x in emits["receipt"]), strict=True))
        compared: tuple[str, ...] = CONSUMED
        if "sampling" in emits:
            expected |= expected_sampling(state.params, state.seen)
            got |= dict(zip(SAMPLING_FIELDS, (int(x) for x in emits["sampling"]), strict=True))
            compared += SAMPLING_FIELDS
        wrong = {n: f"{n} {got[n]} instead of {expected[n]}" for n in compared if got[n] != expected[n]}
        made = Variant("sampling" in emits, len(emits.get("top_ids", ())))
        if not made.serves(state.params):
            wrong["variant"] = f"the step was {made}, which is not enough for its parameters"
        return wrong

    def _contain(self, results: list[Release | Mismatch]) -> list[Release | Mismatch]:
        """If a row went astray, no slot's KV is known to be whole: every slot is to be re-seeded, whatever its own receipt says."""
        faults = {r.slot: r for r in results if isinstance(r, Mismatch)}
        astray = [slot for slot, fault in faults.items() if fault.astray]
        if not astray:
            return results
        why = f"slot {astray[0]} wrote out of its place"
        live = sorted(slot for slot, entry in self._entries.items() if not entry.ended)
        return [faults.get(slot) or Mismatch(slot, f"slot {slot}: {why}", at_fault=False) for slot in live]

    def _advance(self, release: Release) -> None:
        entry = self._entries[release.slot]
        entry.ended = release.ended
        entry.state = entry.state.advanced(release.token)
        entry.first_step_unread = False

    def _check_idle(
        self, slot: int, sent: tuple[int, tuple[int, ...]] | None, entry: _Entry | None, receipt: HostArray
    ) -> None:
        """A row the ledger holds idle must not have acted: it would have written KV somewhere."""
        replaced = sent is not None and (entry is None or entry.state.epoch != sent[0])
        if receipt[ACCEPTED] and not replaced:
            raise StaleTrace(
                f"slot {slot} is idle and the device ran it at position {int(receipt[RECEIPT_FIELDS.index('position')])}; "
                "its memory can no longer be trusted"
            )
