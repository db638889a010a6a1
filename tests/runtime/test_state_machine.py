"""Any order of acts leaves an engine's books in agreement and changes no request's tokens; a million acts by command."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import seed

from forebay.runtime import Model
from forebay.specs import Backend
from tests.runtime.harness import ARMS
from tests.runtime.plain import Plain
from tests.runtime.state_machine import PREEMPTED, done, machine_of, run

EXAMPLES = 25
"""Engines of each kind, of up to 60 acts each."""

EVERYTHING = (
    *("finished", "cancelled", "deadline", "forks", "block_copies", "preemptions", "reused_tokens", "reseeds"),
    *("offloaded", "restored", "offload_refused"),
)
"""Counts of an engine's report that would stay zero if a part were never reached."""


@pytest.mark.clause("L5", "L6", "C5", "C11", "S1", "S2")
@pytest.mark.case("C01", "C02", "C06", "C07")
def test_any_order_of_acts_keeps_the_books_and_the_tokens(tiny_model: Model, backend: Backend, plain: Plain) -> None:
    done.clear()
    for batch, (arm, preempted) in enumerate(itertools.product(ARMS, PREEMPTED)):
        run(seed(batch)(machine_of(arm, preempted, tiny_model, backend, plain)), EXAMPLES)
    assert done["acts"] > 5000
    missing = [name for name in EVERYTHING if not done[name]]
    assert not missing, f"never reached: {missing} of {done}"
