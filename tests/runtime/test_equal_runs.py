"""However a request is run, it gives the tokens of the plain run: in chunks, preempted, offloaded, forked, on a cached prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from forebay.runtime import Engine, Model, Request, SamplingParams
from forebay.specs import Backend
from forebay.specs.descriptor import Selection
from tests.runtime.books import check_books, check_empty
from tests.runtime.harness import ARMS, PARAMS, PROMPTS, TestDriver, make_engine, prompt, tokens_of
from tests.runtime.plain import Plain

pytestmark = [pytest.mark.clause("C11")]

EVERY_WAY = pytest.mark.parametrize("read_behind", [0, 2])
EVERY_ARM = pytest.mark.parametrize("arm", ARMS)


@pytest.fixture(scope="module")
def other_backend() -> Iterator[Backend]:
    """The CPU's driver under another name, so that prompts computed on the host come from another pool with weights of its own."""
    with Backend(TestDriver(), Selection(name="other", mode="")) as opened:
        yield opened


def finish(engine: Engine, requests: list[Request], plain: Plain) -> list[tuple[int, ...]]:
    """Step to the end, the books and the KV in every block checked at every step; the tokens of each request."""
    for _ in range(2000):
        if not engine.has_work:
            return tokens_of(requests)
        engine.step()
        check_books(engine, requests, plain)
    raise AssertionError("the engine does not come to an end")


def added(engine: Engine, **options: Any) -> list[Request]:
    return [engine.add(p, s, **options) for p, s in zip(PROMPTS, PARAMS, strict=True)]


# -- chunks ------------------------------------------------------------------------------------------------------------
@EVERY_ARM
@EVERY_WAY
@pytest.mark.parametrize("budget", [1, 3, 7, 16])
def test_chunked(
    tiny_model: Model,
    backend: Backend,
    plain: Plain,
    expected: list[tuple[int, ...]],
    arm: str,
    read_behind: int,
    budget: int,
) -> None:
    options: dict[str, Any] = {"slots": 3, "block_size": 4, "max_len": 64, "max_step_tokens": budget}
    with make_engine(tiny_model, backend, arm=arm, read_behind=read_behind, **options) as engine:
        chunks = count_chunks(engine)
        assert finish(engine, added(engine), plain) == expected
        assert engine.report()["engine"]["prefill_tokens"] == sum(map(len, PROMPTS))
        assert max(chunks) <= budget
        assert len(chunks) > len(PROMPTS), "some prompt came in pieces"
        check_empty(engine)


def count_chunks(engine: Engine) -> list[int]:
    """Tokens of each chunk, from now on."""
    chunks: list[int] = []
    chunk_any = engine._core._prefill.forward.chunk

    def chunk(tokens: Any, start: int, blocks: Any, *, prompt_len: int, last: bool) -> Any:
        chunks.append(len(tokens))
        return chunk_any(tokens, start, blocks, prompt_len=prompt_len, last=last)

    engine._core._prefill.forward.chunk = chunk  # type: ignore[method-assign]
    return chunks


# -- given up and taken up again ---------------------------------------------------------------------------------------
@pytest.mark.clause("L5", "S1", "S2", "C6")
@EVERY_ARM
@EVERY_WAY
@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ({"preempt": "recompute"}, "preemptions"),
        ({"preempt": "recompute", "prefix_reuse": True}, "reused_tokens"),
        ({"preempt": "recompute", "max_step_tokens": 3}, "preemptions"),
        ({"preempt": "offload"}, "restored"),
        ({"preempt": "offload", "max_step_tokens": 3, "prefix_reuse": True}, "restored"),
        ({"preempt": "offload", "offload_blocks": 4}, "offload_refused"),
        ({"preempt": "offload", "prefill_on": "cpu"}, "restored"),
    ],
    ids=str,
)
def test_preempted_by_a_small_pool(
    tiny_model: Model,
    backend: Backend,
    plain: Plain,
    expected: list[tuple[int, ...]],
    arm: str,
    read_behind: int,
    options: dict[str, Any],
    counted: str,
) -> None:
    with make_engine(
        tiny_model,
        backend,
        arm=arm,
        read_behind=read_behind,
        slots=3,
        block_size=2,
        num_blocks=19,
        max_len=37,
        **options,
    ) as engine:
        assert finish(engine, added(engine), plain) == expected
        report = engine.report()["engine"]
        assert report["preemptions"] > 0
        assert report[counted] > 0
        assert report["offloaded"] == report["restored"]
        check_empty(engine)


@pytest.mark.clause("L5", "S1", "C6")
@EVERY_ARM
@EVERY_WAY
@pytest.mark.parametrize("preempt", ["recompute", "offload"])
def test_preempted_at_every_step(
    tiny_model: Model, backend: Backend, expected: list[tuple[int, ...]], arm: str, read_behind: int, preempt: str
) -> None:
    """After every fifth step somebody else gives way, in the middle of prompts too."""
    options: dict[str, Any] = {"slots": 3, "block_size": 4, "max_len": 64, "max_step_tokens": 5, "preempt": preempt}
    with make_engine(tiny_model, backend, arm=arm, read_behind=read_behind, **options) as engine:
        requests, in_prompt = added(engine), 0
        for turn in range(100):
            for _ in range(5):
                engine.step()
            engine._core._drain()
            running = sorted(engine._core.running.values(), key=lambda r: r.index)
            for r in running[turn % 3 : turn % 3 + 1]:
                in_prompt += 0 < r.computed < len(r.prompt)
                engine._core._room._preempt(r)
                check_books(engine, requests)
        assert not engine.has_work
        assert tokens_of(requests) == expected
        assert in_prompt
        check_empty(engine)


# -- forks -------------------------------------------------------------------------------------------------------------
@pytest.mark.clause("L5")
@EVERY_ARM
@EVERY_WAY
@pytest.mark.parametrize("num_blocks", [None, 10])
def test_forked(
    tiny_model: Model,
    backend: Backend,
    plain: Plain,
    expected: list[tuple[int, ...]],
    arm: str,
    read_behind: int,
    num_blocks: int | None,
) -> None:
    """Greedy samples are equal, those that find no slot at first too; in a small pool forks lose their blocks and compute anew."""
    params = [SamplingParams(max_tokens=s.max_tokens, ignore_eos=True, n=3 if s.max_tokens < 20 else 1) for s in PARAMS]
    options: dict[str, Any] = {"slots": 2, "block_size": 4, "max_len": 44, "num_blocks": num_blocks}
    with make_engine(tiny_model, backend, arm=arm, read_behind=read_behind, **options) as engine:
        roots = [engine.add(p, s) for p, s in zip(PROMPTS, params, strict=True)]
        family = [m for r in roots for m in (r, *r.siblings)]
        finish(engine, family, plain)
        assert [[tuple(m.token_ids) for m in (r, *r.siblings)] for r in roots] == [
            [tokens] * s.n for tokens, s in zip(expected, params, strict=True)
        ]
        report = engine.report()["engine"]
        assert report["forks"] == 2 * sum(s.n > 1 for s in params)
        computed = report["prefill_tokens"]
        assert (computed == sum(map(len, PROMPTS))) if num_blocks is None else (computed > sum(map(len, PROMPTS)))
        check_empty(engine)


def test_samples_of_generate_come_with_their_prompt(
    tiny_model: Model, backend: Backend, expected: list[tuple[int, ...]]
) -> None:
    with make_engine(tiny_model, backend, slots=2, block_size=4, max_len=64) as engine:
        results = engine.generate(PROMPTS[:3], [SamplingParams(max_tokens=9, ignore_eos=True, n=n) for n in (1, 3, 2)])
        assert [len(r.samples) for r in results] == [1, 3, 2]
        assert results[2].samples[1].token_ids == results[2].token_ids == expected[2]
        assert [{s.token_ids for s in r.samples} for r in results] == [{r.token_ids} for r in results]
        assert all(s.finish_reason == "length" for r in results for s in r.samples)
        assert len({s.seed for r in results for s in r.samples}) == 6


# -- prefixes ----------------------------------------------------------------------------------------------------------
@pytest.mark.clause("L6")
@EVERY_ARM
@EVERY_WAY
@pytest.mark.parametrize("budget", [3, 512])
def test_on_a_cached_prefix(
    tiny_model: Model,
    backend: Backend,
    plain: Plain,
    expected: list[tuple[int, ...]],
    arm: str,
    read_behind: int,
    budget: int,
) -> None:
    """Everything a second time: all but the last token of each prompt, in full blocks, is there."""
    options: dict[str, Any] = {"slots": 3, "block_size": 2, "max_len": 64, "max_step_tokens": budget}
    options |= {"prefix_reuse": True, "num_blocks": 200}
    with make_engine(tiny_model, backend, arm=arm, read_behind=read_behind, **options) as engine:
        assert finish(engine, added(engine), plain) == expected
        assert engine.report()["engine"]["reused_tokens"] == 0
        assert finish(engine, added(engine), plain) == expected
        assert engine.report()["engine"]["reused_tokens"] == sum((len(p) - 1) // 2 * 2 for p in PROMPTS)
        assert finish(engine, added(engine, cache_salt="mine"), plain) == expected
        assert engine.report()["engine"]["reused_tokens"] == sum((len(p) - 1) // 2 * 2 for p in PROMPTS)
        check_empty(engine)


# -- prompts on the host -----------------------------------------------------------------------------------------------
@pytest.mark.clause("S1", "S2")
@EVERY_ARM
@EVERY_WAY
@pytest.mark.parametrize("budget", [3, 512])
@pytest.mark.parametrize("named", ["cpu", "other"])
def test_with_prompts_computed_on_the_host(
    tiny_model: Model,
    backend: Backend,
    plain: Plain,
    other_backend: Backend,
    expected: list[tuple[int, ...]],
    arm: str,
    read_behind: int,
    budget: int,
    named: str,
) -> None:
    """On the engine's own backend, which is the host's, and from a host to a device of another name."""
    device = backend if named == "cpu" else other_backend
    options: dict[str, Any] = {"slots": 3, "block_size": 4, "max_len": 64, "max_step_tokens": budget, "threads": 1}
    with make_engine(tiny_model, device, arm=arm, read_behind=read_behind, prefill_on="cpu", **options) as engine:
        assert (engine._core._prefill.forward._backend is device) == (named == "cpu")
        staged = device.counters.uploads
        assert finish(engine, added(engine), plain) == expected
        assert device.counters.uploads - staged >= 2 * len(PROMPTS), "each prompt's KV was staged, layer by layer"
        check_empty(engine)


@pytest.mark.clause("S1")
@EVERY_ARM
def test_host_prompts_that_alternate_do_not_mix(tiny_model: Model, backend: Backend, plain: Plain, arm: str) -> None:
    """The host pool holds one sequence: a second prompt waits, also when the first is cut off in the middle."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [prompt(11, seed=s) for s in range(4)]
    with make_engine(tiny_model, backend, arm="eager", slots=1, max_len=64) as alone:
        right = tokens_of(alone.generate(prompts, params))
    options: dict[str, Any] = {"slots": 3, "block_size": 4, "max_len": 64, "max_step_tokens": 4, "prefill_on": "cpu"}
    for cut in range(1, 7):
        with make_engine(tiny_model, backend, arm=arm, **options) as engine:
            requests = [engine.add(p, params) for p in prompts]
            for _ in range(cut):
                engine.step()
            engine._core._drain()
            first = min(engine._core.running.values(), key=lambda r: r.place)
            engine._core._room._preempt(first)
            engine.step()
            engine.cancel(requests[1])
            finish(engine, requests, plain)
            assert [tuple(r.token_ids) for r in requests if r is not requests[1]] == [right[0], *right[2:]]
            check_empty(engine)


@pytest.mark.clause("S1")
@pytest.mark.parametrize("urgent", range(1, 5))
def test_an_urgent_prompt_does_not_take_the_host_from_one_half_computed(
    tiny_model: Model, backend: Backend, plain: Plain, urgent: int
) -> None:
    options: dict[str, Any] = {"slots": 2, "block_size": 4, "max_len": 64, "max_step_tokens": 4, "prefill_on": "cpu"}
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with make_engine(tiny_model, backend, **options) as engine:
        requests = [engine.add(prompt(19, seed=1), params)]
        for _ in range(urgent):
            engine.step()
        requests.append(engine.add(prompt(18, seed=2), params, priority=9))
        finish(engine, requests, plain)
        check_empty(engine)
