"""The decode steps of the running slots in one of the three arms, and the ledger that decides which tokens may be released."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from forebay.specs.segment import Ticket

from .forward import HostForward
from .lanes import Lanes
from .ledger import Ledger, Mismatch, Release
from .request import Request
from .sampling_rows import Seen
from .state import DeviceState, SlotState
from .variants import variant_for


class Decoder:
    """Slots that hold a seeded request.

    Attributes:
        last_ticket: the newest step dispatched; memory a step may touch is free once it has retired.
        steps, eager_steps: dispatched so far.
        epoch: grows with every seed.
    """

    def __init__(self, device: DeviceState, lanes: Lanes, forward: HostForward, *, eager: bool) -> None:
        self.device: Final = device
        self.lanes: Final = lanes
        self.ledger: Final = Ledger(device)
        self._forward = forward
        self._eager = eager
        self.last_ticket: Ticket | None = None
        # Slots whose row on the device may be live though the ledger holds no request there.
        self._dirty: set[int] = set()
        self.steps = 0
        self.epoch = 0

    @property
    def eager_steps(self) -> int:
        """Steps in which the host supplied every id."""
        return self.steps if self._eager else 0

    @property
    def in_flight(self) -> int:
        """Steps dispatched and not yet read."""
        return self.ledger.in_flight

    @property
    def active(self) -> list[int]:
        """Slots whose next step may still act."""
        return self.ledger.active

    def holds(self, request: Request) -> bool:
        """True from the request's seed until its slot is dropped."""
        return request.slot is not None and self.ledger.holds(request.slot)

    def seed(self, request: Request) -> None:
        """A request boundary: every per-slot input is seeded, each by itself (clause C6)."""
        slot = held_slot(request)
        self.epoch += 1
        state = SlotState(
            token=request.token_ids[-1],
            position=request.to_compute,
            epoch=self.epoch,
            limit=request.final_position,
            seed=request.seed,
            blocks=tuple(request.blocks),
            stop=request.stop,
            params=request.params,
            seen=Seen.of(request.params, request.known),
        )
        if not self._eager:
            self._dirty.add(slot)
            self.device.seed(slot, state)
            self.lanes.boundary()
        self.ledger.seed(slot, state)
        self._dirty.discard(slot)

    def grow(self, request: Request) -> None:
        """Let the next step read the blocks a request has now: where they have changed, its table row is uploaded, the only upload of
        a steady step."""
        slot, blocks = held_slot(request), tuple(request.blocks)
        state = self.ledger.state(slot)
        if state.blocks == blocks:
            return
        if not self._eager:
            self.device.write_table(slot, replace(state, blocks=blocks))
        self.ledger.grow(slot, blocks)

    def drop(self, slot: int, *, retired: bool) -> None:
        """The slot's request has left. Unless the row has ``retired`` itself, it is made idle before the next step.

        Asks nothing of the device: a lost one must not keep slots.
        """
        if self.ledger.holds(slot) and not retired and not self._eager:
            self._dirty.add(slot)
        self.ledger.drop(slot)

    def _clean(self) -> None:
        """Make the rows idle whose requests have left, or whose seed was cut off."""
        for slot in sorted(self._dirty):
            if not self.ledger.holds(slot):
                self.device.idle(slot)
            self._dirty.discard(slot)

    def dispatch(self) -> None:
        """Send one step over the active slots on its way."""
        self._clean()
        active = self.ledger.active
        bucket = self.lanes.bucket_for(max(active))
        variant = variant_for(self.ledger.state(slot).params for slot in active)
        self.last_ticket = self.lanes.step(bucket, variant)
        self.ledger.dispatched(self.last_ticket, bucket)
        self.steps += 1

    def collect(self, read_behind: int) -> Iterator[tuple[Ticket, list[Release | Mismatch]]]:
        """Read steps until ``read_behind`` are in flight; a seed's first step is read at once (clause C5d).

        Raises:
            StaleTrace: the device ran a row that the ledger holds idle.
        """
        keep = read_behind if self.ledger.active and not self.ledger.must_read_now else 0
        yield from self.ledger.read(keep)

    def step_eagerly(self) -> Iterator[Release]:
        """One step in which the host supplies ids, position and slot; its tokens. A row advances once its token was settled."""
        active = self.ledger.active
        states = [self.ledger.state(slot) for slot in active]
        tokens = self._forward.choose(self._forward.decode(states), [s.draw for s in states])
        self.steps += 1
        for slot, state, chosen in zip(active, states, tokens, strict=True):
            yield Release(slot, chosen.token, state.ends_with(chosen.token), chosen.logprobs)
            if self.ledger.holds(slot):
                self.ledger.advance(slot, chosen.token)

    def give_up(self) -> Iterator[Ticket]:
        """What the device holds is not what the ledger says: wait for every step in flight, forget them, and make every row idle."""
        yield from self.ledger.abandon()
        for slot in range(self.device.slots):
            self.ledger.drop(slot)
            if not self._eager:
                self.device.idle(slot)
        self._dirty.clear()


def held_slot(request: Request) -> int:
    """The slot of a running request.

    Raises:
        RuntimeError: it has none; a caller's mistake.
    """
    if request.slot is None:
        raise RuntimeError(f"request {request.index} holds no slot")
    return request.slot
