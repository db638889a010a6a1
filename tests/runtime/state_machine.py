"""Any order of what an engine may be asked to do, with its books checked after every act.

``python -m tests.runtime.state_machine --steps 1000000`` runs it for that many acts; the tests run a few thousand.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forebay.runtime import Engine, Model, Request, SamplingParams, load_model, open_backend
from forebay.runtime.host_kv import block_slots
from forebay.runtime.ledger import Mismatch
from forebay.runtime.sampler import Chosen
from forebay.specs import Backend
from forebay.specs.dtypes import Array
from forebay.specs.errors import QueueFull
from tests.models import tiny
from tests.runtime.books import check_books, check_empty, read_rows
from tests.runtime.harness import ARMS, make_engine, prompt, write_tiny_folder
from tests.runtime.plain import Plain

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 9, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
)
"""How tokens are chosen."""

STEMS = [prompt(14, seed=s) for s in range(3)]
PREEMPTED = ("recompute", "offload")
LONGEST, MOST_TOKENS, MAX_WAITING = 15, 9, 6
ACTS_AN_EXAMPLE = 60

done: Counter[str] = Counter()
"""What the machines of this process have done, to show that nothing was left out."""


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def diverging(engine: Engine) -> None:
    """From now on the siblings of a greedy request begin with tokens of their own, so that forks write unlike KV."""
    first_tokens = engine._core._first_tokens

    def diverged(request: Request, logits: Array) -> dict[Request, Chosen]:
        family = first_tokens(request, logits)
        if not request.params.plain:
            return family  # they draw, each by its own seed
        return {r: Chosen(first_token_of(r, request, chosen.token)) for r, chosen in family.items()}

    engine._core._first_tokens = diverged  # type: ignore[method-assign]


def first_token_of(member: Request, root: Request, token: int) -> int:
    """The first token of a member of a family of which ``root`` begins with ``token``."""
    special = len(tiny.SPECIAL)
    return (
        token if member is root else special + (token + 7 * (member.index - root.index)) % (len(tiny.TOKENS) - special)
    )


class EngineMachine(RuleBasedStateMachine):
    """One engine of any shape, and requests that come, share, fork, give way, come back and end in any order.

    Subclasses name the ``arm`` and what becomes of the KV of a ``preempted`` request, and set
    ``model``, ``backend`` and ``plain``.
    """

    arm: str
    preempted: str
    model: Model
    backend: Backend
    plain: Plain

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.opened = False
        self.requests: list[Request] = []
        self.roots: dict[int, Request] = {}
        self.cached: dict[int, bytes] = {}

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        read_behind=st.sampled_from([0, 2]),
        budget=st.sampled_from([3, 512]),
        slots=st.sampled_from([2, 3]),
        spare=st.integers(0, 12),
        offload_blocks=st.sampled_from([3, 8, 30, 0]),
        prefill_on=st.sampled_from(["device", "device", "device", "cpu"]),
    )
    def open(self, block_size: int, spare: int, budget: int, **options: Any) -> None:
        """A pool that holds the largest request, and little more."""
        largest = -(-(LONGEST + MOST_TOKENS - 1) // block_size)
        self.engine = make_engine(
            self.model,
            self.backend,
            arm=self.arm,
            preempt=self.preempted,
            block_size=block_size,
            num_blocks=1 + largest + spare,
            max_len=LONGEST + MOST_TOKENS,
            max_step_tokens=budget,
            prefix_reuse=True,
            max_waiting=MAX_WAITING,
            priority_steps=4,
            clock=self.clock,
            **options,
        )
        diverging(self.engine)
        self.opened = True

    @property
    def running(self) -> list[Request]:
        """Requests in slots, by slot."""
        return [r for _, r in sorted(self.engine._core.running.items())]

    # -- acts ------------------------------------------------------------------------------------------------------------
    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(1, LONGEST - 1),
        tail=st.sampled_from([None, None, 100, 200]),
        max_tokens=st.integers(1, MOST_TOKENS),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.integers(-1, 2),
        salt=st.sampled_from(["", "", "", "other"]),
        seconds=st.sampled_from([None, None, None, 2.0, 6.0]),
        stops_at=st.integers(0, 20),
        way=st.sampled_from(WAYS),
        seed=st.integers(0, 3),
    )
    def add(
        self,
        stem: list[int],
        length: int,
        tail: int | None,
        max_tokens: int,
        n: int,
        priority: int,
        salt: str,
        seconds: float | None,
        stops_at: int,
        way: dict[str, Any],
        seed: int,
    ) -> None:
        """A request whose prompt may begin as others do, end at a token of its own, and be cut off by a deadline."""
        ids = stem[:length] + ([] if tail is None else [tail])
        coming = self.plain.continuation(ids, MOST_TOKENS)
        stop = tuple(coming[stops_at : stops_at + 1])
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stop, n=n, seed=seed, **way)
        options = {"priority": priority, "cache_salt": salt, "deadline": seconds}
        if len(self.engine._core.waiting) >= MAX_WAITING:
            try:
                self.engine.add(ids, params, **options)
            except QueueFull:
                return
            raise AssertionError("a full queue took a request")
        root = self.engine.add(ids, params, **options)
        self.requests += [root, *root.siblings]
        if params.plain:
            self.roots.update({s.index: root for s in root.siblings})

    @rule(n=st.integers(1, 6))
    def step(self, n: int) -> None:
        """Some steps; each releases exactly the tokens that requests have more than before."""
        for _ in range(n):
            before = {r.index: len(r.token_ids) for r in self.requests}
            released = Counter(request.index for request, _ in self.engine.step())
            made = {r.index: len(r.token_ids) - before[r.index] for r in self.requests}
            # Acts between steps may have read tokens, which the next step releases.
            assert all(released[i] >= n for i, n in made.items())

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2))
    def preempt(self, which: int) -> None:
        """A running request gives way, once every step in flight was read."""
        self.engine._core._drain()
        if self.running:
            self.engine._core._room._preempt(self.running[which % len(self.running)])

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2))
    def distrust_receipt(self, which: int) -> None:
        """What a running request has computed is lost: its receipt did not match."""
        self.engine._core._drain()
        if self.running:
            request = self.running[which % len(self.running)]
            assert request.slot is not None
            self.engine._core._restart(request, Mismatch(request.slot, "for a test", at_fault=False))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        """Somebody is cancelled, wherever it stands; often it has ended before."""
        live = [r for r in self.requests if not r.finished] or self.requests
        self.engine.cancel(live[which % len(live)])

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def pass_time(self, seconds: float) -> None:
        """Deadlines come."""
        self.clock.now += seconds

    @rule(n=st.integers(1, 30))
    def evict(self, n: int) -> None:
        """Somebody needs room that only cached blocks have."""
        prefix = self.engine._core.cache.prefix
        if prefix is not None:
            before = self.engine._core.cache.allocator.num_free
            gone = prefix.evict(n)
            assert gone <= n
            assert (
                self.engine._core.cache.allocator.num_free + self.engine._core.cache.allocator.num_in_flight >= before
            )

    @rule()
    def finish(self) -> None:
        """Everybody goes on to the end."""
        for _ in range(600):
            if not self.engine.has_work:
                break
            self.engine.step()
            self.tokens_are_those_of_each_alone()
        assert not self.engine.has_work, "the engine does not come to an end"
        assert all(r.finished for r in self.requests)

    # -- what always holds -----------------------------------------------------------------------------------------------
    @invariant()
    def books_agree(self) -> None:
        done["acts"] += 1
        check_books(self.engine, self.requests, self.plain)

    @invariant()
    def cached_blocks_keep_their_bits(self) -> None:
        """Nobody writes into a block as long as it is cached, not even what is there already."""
        prefix = self.engine._core.cache.prefix
        size = self.engine._parts.pool.geometry.block_size
        entries = [] if prefix is None else list(prefix._blocks.values())
        rows = read_rows(self.engine, [int(s) for s in block_slots([e.block for e in entries], size)])
        parts = np.split(rows, len(entries), axis=2) if entries else []
        now = {e.serial: part.tobytes() for e, part in zip(entries, parts, strict=True)}
        assert all(now[serial] == bits for serial, bits in self.cached.items() if serial in now)
        self.cached = now

    @invariant()
    def tokens_are_those_of_each_alone(self) -> None:
        for r in self.requests:
            if r.token_ids:
                root = self.roots.get(r.index)
                first = None if root is None else first_token_of(r, root, self.plain.continuation(root.prompt)[0])
                right = self.plain.tokens(r, first)
                assert tuple(r.token_ids) == right[: len(r.token_ids)], f"request {r.index}: other tokens"
                if r.finish_reason in ("stop", "length"):
                    assert len(r.token_ids) == len(right), f"request {r.index}: it ended early"
            assert r.error is None or r.finish_reason == "cancelled"

    def teardown(self) -> None:
        if not self.opened:
            return
        try:
            self.finish()
            self.books_agree()
            report = self.engine.report()
            done.update({k: v for k, v in report["engine"].items() if v})
            done[f"{self.arm} engines"] += 1
            check_empty(self.engine)
        finally:
            self.engine.close()


def run(
    machine: type[EngineMachine],
    examples: int,
    *,
    acts: int = ACTS_AN_EXAMPLE,
    shorten: bool = True,
) -> None:
    """So many engines, each with up to so many acts; a failing run is shortened, which takes minutes, unless told not to."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=acts,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink) if shorten else (Phase.generate,),
            suppress_health_check=checks,
        ),
    )


def machine_of(arm: str, preempted: str, model: Model, backend: Backend, plain: Plain) -> type[EngineMachine]:
    """The machine whose engines run in ``arm`` and treat a ``preempted`` request so."""
    attributes = {"arm": arm, "preempted": preempted, "model": model, "backend": backend, "plain": plain}
    return type(f"{arm.title()}{preempted.title()}Machine", (EngineMachine,), attributes)


def main() -> int:
    """Run at least so many acts, the arms in turn; the exit status is 0 unless something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="acts, the default is a million")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--as-found", action="store_true", help="show a failing run as it was found, not shortened")
    wanted = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open_backend("cpu", threads=1) as backend:
        model = load_model(write_tiny_folder(Path(folder) / "model"), dtype="float32")
        plain = Plain(model, backend)
        kinds = itertools.cycle(itertools.product(PREEMPTED, ARMS))
        for batch, (preempted, arm) in zip(itertools.count(wanted.seed), kinds, strict=False):
            run(seed(batch)(machine_of(arm, preempted, model, backend, plain)), 40, shorten=not wanted.as_found)
            sys.stdout.write(
                f"batch {batch} ({arm}, {preempted}): {done['acts']} acts in {time.monotonic() - started:.0f} s\n"
            )
            sys.stdout.flush()
            if done["acts"] >= wanted.steps:
                break
        plain.close()
    sys.stdout.write(", ".join(f"{count} {name}" for name, count in sorted(done.items())) + "\n")
    return 0


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    sys.exit(main())
