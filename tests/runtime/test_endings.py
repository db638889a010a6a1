"""How requests end before their time: cancelled, too late, or stopped by a string; wherever they stand, they give everything back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forebay.runtime import Engine, Model, Request, SamplingParams
from forebay.specs import Backend
from forebay.specs.errors import Cancelled
from tests.runtime.books import check_books, check_empty
from tests.runtime.harness import ARMS, make_engine, prompt
from tests.runtime.plain import Plain
from tests.runtime.state_machine import Clock

LONG = SamplingParams(max_tokens=12, ignore_eos=True)
EVERY_ARM = pytest.mark.parametrize("arm", ARMS)


def waits(engine: Engine, clock: Clock) -> list[Request]:
    """The last of three requests, for two slots."""
    family = [engine.add(prompt(9, seed=i), LONG, deadline=None if i else 50.0) for i in range(2)]
    late = engine.add(prompt(9, seed=2), LONG, deadline=5.0)
    engine.step()
    assert late in engine._core.waiting
    return [late, *family]


def computes_its_prompt(engine: Engine, clock: Clock) -> list[Request]:
    """Four of nine prompt tokens are computed."""
    late = engine.add(prompt(9), LONG, deadline=5.0)
    engine.step()
    assert (late.computed, late.token_ids) == (4, [])
    return [late]


def decodes(engine: Engine, clock: Clock) -> list[Request]:
    """Some tokens are made; with read_behind steps are in flight."""
    late = engine.add(prompt(9), LONG, deadline=5.0)
    while len(late.token_ids) < 4:
        engine.step()
    assert engine._core.decoder.in_flight == (0 if engine._parts.arm == "eager" else engine.settings.read_behind)
    return [late]


def is_offloaded(engine: Engine, clock: Clock) -> list[Request]:
    """Its KV is in host memory."""
    (late,) = decodes(engine, clock)
    engine._core._drain()
    engine._core._room._preempt(late)
    assert late.saved is not None
    return [late]


def has_forks_to_come(engine: Engine, clock: Clock) -> list[Request]:
    """Two siblings wait for its prompt to be computed."""
    late = engine.add(prompt(9), SamplingParams(max_tokens=12, ignore_eos=True, n=3), deadline=5.0)
    engine.step()
    return [late, *late.siblings]


def has_a_fork_that_waits(engine: Engine, clock: Clock) -> list[Request]:
    """Two of three samples decode, the third holds its blocks in the queue."""
    late = engine.add(prompt(9), SamplingParams(max_tokens=12, ignore_eos=True, n=3), deadline=5.0)
    while not all(s.token_ids for s in late.siblings):
        engine.step()
    assert any(s.slot is None and s.blocks for s in late.siblings)
    return [late, *late.siblings]


STATES: list[Callable[[Engine, Clock], list[Request]]] = [
    *(waits, computes_its_prompt, decodes, is_offloaded, has_forks_to_come, has_a_fork_that_waits)
]


@pytest.mark.clause("L5", "C5", "C11")
@EVERY_ARM
@pytest.mark.parametrize("read_behind", [0, 2])
@pytest.mark.parametrize("reach", STATES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("by", ["cancelled", "deadline"])
def test_a_request_that_is_ended_gives_everything_back_and_disturbs_nobody(
    tiny_model: Model,
    backend: Backend,
    plain: Plain,
    arm: str,
    read_behind: int,
    reach: Callable[[Engine, Clock], list[Request]],
    by: str,
) -> None:
    clock = Clock()
    options: dict[str, Any] = {"slots": 2, "block_size": 4, "max_len": 24, "max_step_tokens": 4, "preempt": "offload"}
    options |= {"prefix_reuse": True, "clock": clock}
    with make_engine(tiny_model, backend, arm=arm, read_behind=read_behind, **options) as engine:
        requests = reach(engine, clock)
        late, family = requests[0], [requests[0], *requests[0].siblings]
        made = [list(r.token_ids) for r in family]
        clock.now = 4.9
        engine._core._end_overdue()
        assert not late.finished, "not yet"
        if by == "deadline":
            clock.now = 5.0
            engine.step()
        else:
            engine.cancel(late, "nobody listens")
            engine.cancel(late)
        check_books(engine, requests, plain)
        for r, tokens in zip(family, made, strict=True):
            assert (r.finish_reason, r.token_ids) == (by, tokens)
            if by == "cancelled":
                assert isinstance(r.error, Cancelled)
                assert str(r.error) == f"request {r.index}: nobody listens"
        assert engine.report()["engine"][by] >= 1
        requests.append(engine.add(prompt(9), LONG))
        while engine.has_work:
            engine.step()
            check_books(engine, requests, plain)
        for r in requests:
            if r not in family:
                assert tuple(r.token_ids) == plain.tokens(r)
        check_empty(engine)


@EVERY_ARM
def test_every_sample_of_a_family_that_is_ended_is_counted(tiny_model: Model, backend: Backend, arm: str) -> None:
    """Those that had not begun too: what ended adds up to what came."""
    for steps in range(4):
        with make_engine(tiny_model, backend, arm=arm, slots=2, block_size=4, max_len=24, max_step_tokens=4) as engine:
            root = engine.add(prompt(9), SamplingParams(max_tokens=12, ignore_eos=True, n=3))
            for _ in range(steps):
                engine.step()
            engine.cancel(root)
            assert all(isinstance(r.error, Cancelled) for r in (root, *root.siblings))
            assert engine.report()["engine"]["cancelled"] == 3
            check_empty(engine)


@pytest.mark.parametrize("index", [1, 2])
def test_a_sample_that_is_cancelled_before_it_began_is_not_begun(
    tiny_model: Model, backend: Backend, index: int
) -> None:
    with make_engine(tiny_model, backend, slots=3, block_size=4, max_len=24) as engine:
        root = engine.add(prompt(9), SamplingParams(max_tokens=6, ignore_eos=True, n=3))
        family = [root, *root.siblings]
        engine.cancel(family[index])
        while engine.has_work:
            engine.step()
            check_books(engine, family)
        ended = [r.finish_reason for r in family]
        assert ended == ["cancelled" if i == index else "length" for i in range(3)]
        assert family[index].token_ids == []
        check_empty(engine)


# -- stop strings ------------------------------------------------------------------------------------------------------
def text_that_comes_up(model: Model, plain: Plain) -> tuple[list[int], tuple[int, ...], int, str]:
    """A prompt, its tokens alone, and where a string of plain letters first comes up among them, after some others."""
    decode = model.tokenizer.decode
    for seed in range(100):
        ids = prompt(5, seed=seed)
        made = plain.continuation(ids, 20)
        for at in range(4, 12):
            new = decode(made[at : at + 1])
            if (
                new.isascii()
                and new.isprintable()
                and new not in decode(made[:at])
                and decode(made[: at + 1]).endswith(new)
            ):
                return ids, made, at, new
    raise AssertionError("no such text")


@pytest.mark.clause("C4", "L5")
@EVERY_ARM
@pytest.mark.parametrize("read_behind", [0, 3])
@pytest.mark.parametrize("as_string", ["alone", "among others", "over two tokens"])
def test_a_stop_string_ends_a_request_and_frees_its_row_though_the_device_goes_on(
    tiny_model: Model, backend: Backend, plain: Plain, arm: str, read_behind: int, as_string: str
) -> None:
    """The device knows nothing of strings: with read_behind it has run the row further, and nothing of that is released."""
    ids, made, at, string = text_that_comes_up(tiny_model, plain)
    decode = tiny_model.tokenizer.decode
    text = decode(made[: at + 1])
    if as_string == "over two tokens":
        string = text[-2:]
        assert string not in text[:-1]
    stop = ("never comes", string, string + "x") if as_string == "among others" else (string,)
    options: dict[str, Any] = {"slots": 1, "block_size": 4, "max_len": 32, "read_behind": read_behind}
    with make_engine(tiny_model, backend, arm=arm, **options) as engine:
        r = engine.add(ids, SamplingParams(max_tokens=20, ignore_eos=True, stop=stop))
        after = engine.add(prompt(6, seed=1), LONG)
        told: list[int] = []
        while engine.has_work:
            told += [token for request, token in engine.step() if request is r]
            check_books(engine, [r, after], plain)
        assert (r.finish_reason, r.text_end) == ("stop", text.index(string))
        assert tuple(r.token_ids) == tuple(told) == made[: at + 1]
        result = r.result(tiny_model.tokenizer)
        assert (result.text, result.finish_reason) == (text[: text.index(string)], "stop")
        assert tuple(after.token_ids) == plain.tokens(after)
        assert engine.report()["engine"]["reseeds"] == 0
        check_empty(engine)


@EVERY_ARM
def test_a_stop_string_of_the_first_token_ends_a_request_before_any_step(
    tiny_model: Model, backend: Backend, plain: Plain, arm: str
) -> None:
    ids, _, at, string = text_that_comes_up(tiny_model, plain)
    ids = [*ids, *plain.continuation(ids, 20)[:at]]
    with make_engine(tiny_model, backend, arm=arm, slots=1, block_size=4, max_len=40) as engine:
        (result,) = engine.generate([ids], SamplingParams(max_tokens=9, ignore_eos=True, stop=(string,)))
        assert (len(result.token_ids), result.text, result.finish_reason) == (1, "", "stop")
        assert engine.report()["engine"]["steps"] == 0
        check_empty(engine)
