"""A scene of six requests on three slots in which each slot changes hands, and looks at what the device holds of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from forebay.runtime import Engine, Model, Request, SamplingParams
from forebay.runtime.lanes import Lanes
from forebay.runtime.state import DeviceState
from forebay.runtime.variants import Variant
from forebay.specs import Backend, Buffer, Ticket
from tests.runtime.harness import changed_blocks, contents, make_engine, poison, prompt

BLOCK = 4


def row_buffer(device: DeviceState, name: str) -> Buffer:
    return {"table": device.table, "stop": device.stop}.get(name) or device.scalars[name]


@contextmanager
def writes_checked(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, refused: Callable[[Request], bool] = lambda _: False
) -> Iterator[None]:
    """At each step only the block at a running row's position may change; nothing for rows the device must refuse."""
    whole = Lanes.step

    def step(lanes: Lanes, bucket: int, variant: Variant) -> Ticket:
        allowed = {
            r.blocks[engine._core.decoder.ledger.next_position(slot) // BLOCK]
            for slot, r in engine._core.running.items()
            if slot < bucket and not refused(r)
        }
        before = contents(engine.backend, engine._parts.pool)
        ticket = whole(lanes, bucket, variant)
        assert changed_blocks(before, contents(engine.backend, engine._parts.pool)) <= allowed
        return ticket

    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "step", step)
        yield


class Scene:
    """Three slots. A leaves slot 0 and Z slot 2, C goes on in slot 1; then B comes to slot 0 and E, with A's blocks, to slot 2.

    So B's slot still has A's token, table and the rest, and the block A's table has for B's first position is now E's.
    """

    A = prompt(5, seed=1), SamplingParams(max_tokens=8, ignore_eos=True, seed=11, stop_token_ids=(250, 251))
    C = prompt(2, seed=2), SamplingParams(max_tokens=26, ignore_eos=True, seed=22)
    Z = prompt(30, seed=3), SamplingParams(max_tokens=16, ignore_eos=True, seed=33, stop_token_ids=(252,))
    B = prompt(6, seed=4), SamplingParams(max_tokens=21, ignore_eos=True, seed=44, stop_token_ids=(253,))
    E = prompt(10, seed=6), SamplingParams(max_tokens=15, ignore_eos=True, seed=66)
    D = prompt(9, seed=5), SamplingParams(max_tokens=12, ignore_eos=True, seed=55)

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        poison(engine.backend, engine._parts.pool)
        self.requests: dict[str, Request] = {}

    def add(self, *names: str) -> None:
        for name in names:
            self.requests[name] = self.engine.add(*getattr(self, name))

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(200):
            if done():
                return
            self.engine.step()
        raise AssertionError("the scene does not get there")

    def before_b(self) -> None:
        """Play up to the moment in which B waits for slot 0 and E for slot 2."""
        self.add("A", "C", "Z")
        a, c, z = (self.requests[name] for name in "ACZ")
        self.engine.step()
        assert (a.slot, c.slot, z.slot) == (0, 1, 2)
        self.blocks_of_a = tuple(a.blocks)
        while a.finish_reason is None:
            self.blocks_of_a = tuple(a.blocks)
            self.engine.step()
        self.until(lambda: z.finish_reason is not None)
        assert c.finish_reason is None
        self.add("B", "E")

    @property
    def stale_block(self) -> int:
        """The block that B's first position has in A's table row."""
        return self.blocks_of_a[len(self.B[0]) // BLOCK]

    def end(self) -> None:
        self.until(lambda: not self.engine.has_work)

    def tokens(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(r.token_ids) for name, r in self.requests.items()}


def scene_engine(model: Model, backend: Backend, arm: str = "captured", **options: int) -> Engine:
    return make_engine(model, backend, arm=arm, slots=3, block_size=BLOCK, num_blocks=23, max_len=52, **options)


def assert_all_back(engine: Engine) -> None:
    memory = engine.report()["memory"]
    assert (memory["blocks_free"], memory["blocks_allocated"], memory["blocks_in_flight"]) == (22, 0, 0)
