"""Streams of pieces: they join to the result, whatever runs beside, and give back what they hold."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.runtime import Engine, Model, SamplingParams
from forebay.runtime.decoder import Decoder
from forebay.runtime.models.tokenizer import Tokenizer
from forebay.runtime.request import Request
from forebay.runtime.stop_strings import StopStrings, held_back
from forebay.runtime.streaming import Piece, Reader, Stream
from forebay.specs import Backend, InvalidInput
from forebay.specs.errors import Cancelled, QueueFull, StaleTrace
from tests.models import tiny
from tests.models.byte_fallback import BYTES, byte_fallback_tokenizer
from tests.models.test_tokenizer import in_memory
from tests.runtime.harness import PARAMS, PROMPTS, make_engine, prompt

LONG = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture
def wide(tiny_model: Model, backend: Backend) -> Iterator[Engine]:
    """Room for three requests of 64 tokens at once."""
    with make_engine(tiny_model, backend, slots=3, block_size=4, max_len=64) as made:
        yield made


def tokens_of(pieces: list[Piece]) -> tuple[int, ...]:
    return tuple(t for piece in pieces for t in piece.token_ids)


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def free_blocks(engine: Engine) -> int:
    free: int = engine.report()["memory"]["blocks_free"]
    return free


# -- the pieces join to the result -------------------------------------------------------------------------------------
def test_interleaved_streams_and_calls_give_each_the_tokens_it_has_alone(
    wide: Engine, expected: list[tuple[int, ...]]
) -> None:
    """Streams are pulled in turn, and a call of ``generate`` comes between."""
    streams = [wide.stream(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
    pieces: list[list[Piece]] = [[] for _ in streams]
    told: list[int] = []
    for turn in range(40):
        for stream, got in zip(streams, pieces, strict=True):
            got += [piece for piece in (next(stream, None),) if piece is not None]
        if turn == 3:
            (result,) = wide.generate([PROMPTS[0]], PARAMS[0], on_token=lambda _request, token: told.append(token))
            assert result.token_ids == tuple(told) == expected[0]
    assert [tokens_of(got) for got in pieces] == expected
    assert [stream.result.token_ids for stream in streams] == expected
    assert [text_of(got) for got in pieces] == [stream.result.text for stream in streams]
    assert not wide.has_work


def test_a_stream_gives_its_first_token_before_its_last_is_made(wide: Engine) -> None:
    stream = wide.stream(prompt(5), LONG)
    first = next(stream)
    assert 1 <= len(first.token_ids) <= 2, "the prompt's own token, and that of the step behind it"
    assert wide.has_work
    with pytest.raises(InvalidInput, match="the stream has not ended"):
        _ = stream.result
    rest = list(stream)
    assert stream.result.token_ids == tokens_of([first, *rest])
    assert next(stream, None) is None


def test_pieces_say_which_sample_they_are_of(wide: Engine) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True, n=3, seed=1, temperature=2.0, logprobs=2)
    stream = wide.stream(prompt(6), params)
    pieces = list(stream)
    samples = stream.result.samples
    assert len(samples) == 3
    for i, sample in enumerate(samples):
        own = [piece for piece in pieces if piece.sample == i]
        assert (tokens_of(own), text_of(own)) == (sample.token_ids, sample.text)
        assert tuple(entry for piece in own for entry in piece.logprobs or ()) == sample.logprobs
    assert len({sample.token_ids for sample in samples}) == 3
    assert samples == wide.generate([prompt(6)], params)[0].samples


def test_a_stop_token_is_among_the_tokens_and_not_in_the_text(wide: Engine) -> None:
    whole = wide.generate([prompt(8)], LONG)[0].token_ids
    stream = wide.stream(prompt(8), SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(whole[7],)))
    pieces = list(stream)
    assert tokens_of(pieces) == whole[:8]
    assert text_of(pieces) == stream.result.text == wide.model.tokenizer.decode(whole[:7])


# -- text, token by token ----------------------------------------------------------------------------------------------
def read_along(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> tuple[list[Piece], Request]:
    """What a reader sees of a request that is given ``ids`` one by one."""
    request = Request(0, (5,), params, ())
    reader, stops, pieces = Reader(tokenizer, request), StopStrings(tokenizer), []
    for token in ids:
        request.take(token)
        stops.check(request)
        pieces += reader.read()
        if request.finished:
            break
    assert reader.read() == []
    return pieces, request


IDS = st.lists(st.integers(0, len(tiny.TOKENS) - 1), min_size=1, max_size=24)
STOP = st.lists(st.text(alphabet="abhelo €w\N{REPLACEMENT CHARACTER}", min_size=1, max_size=4), max_size=3)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(IDS | st.text("abhelo €w", min_size=1).map(lambda t: in_memory().encode(t)), STOP)
def test_pieces_join_to_the_text_whatever_the_stop_strings(ids: list[int], stop: list[str]) -> None:
    tokenizer = in_memory()
    pieces, request = read_along(tokenizer, ids, SamplingParams(max_tokens=len(ids), stop=tuple(stop)))
    result = request.result(tokenizer)
    assert tokens_of(pieces) == result.token_ids == tuple(ids[: len(result.token_ids)])
    assert text_of(pieces) == result.text
    whole = tokenizer.decode(ids)
    assert whole.startswith(result.text.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert not any(s in result.text for s in stop if "\N{REPLACEMENT CHARACTER}" not in s)


@given(st.lists(st.sampled_from(BYTES), min_size=1, max_size=12), STOP)
def test_bytes_that_undo_a_character_are_waited_for(ids: list[int], stop: list[str]) -> None:
    """One bad byte turns the whole characters before it in its run into replacement characters."""
    tokenizer = byte_fallback_tokenizer()
    pieces, request = read_along(tokenizer, ids, SamplingParams(max_tokens=len(ids), stop=tuple(stop)))
    assert text_of(pieces) == request.result(tokenizer).text


def test_a_stop_string_of_fallen_back_bytes_ends_the_request_at_its_last_byte() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.encode("a\nb")
    newline = ids.index(tokenizer.encode("\n")[-1])
    pieces, request = read_along(tokenizer, ids, SamplingParams(max_tokens=9, stop=("\n",)))
    assert request.token_ids == ids[: newline + 1]
    assert (request.finish_reason, text_of(pieces)) == ("stop", "a")


def test_some_bytes_of_a_character_are_no_replacement_character() -> None:
    """A stop string of U+FFFD ends a request at bytes that are none, not at a character that is still coming."""
    tokenizer = in_memory()
    ids = tokenizer.encode("a€b")
    _, request = read_along(tokenizer, ids, SamplingParams(max_tokens=20, stop=("\N{REPLACEMENT CHARACTER}",)))
    assert (request.token_ids, request.text(tokenizer)) == (ids, "a€b")


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not() -> None:
    tokenizer = in_memory()
    ids = [tokenizer.encode(c)[0] for c in "a12x123b"]
    pieces, request = read_along(tokenizer, ids, SamplingParams(max_tokens=20, stop=("123",)))
    assert [piece.text for piece in pieces] == ["a", "", "", "12x", "", "", ""]
    assert (request.finish_reason, request.text(tokenizer)) == ("stop", "a12x")
    assert len(request.token_ids) == 7


@pytest.mark.parametrize(
    ("text", "stop", "held"),
    [
        ("ab", (), 0),
        ("ab", ("b",), 0),
        ("ab", ("bc",), 1),
        ("ab", ("abc", "bd"), 2),
        ("ab", ("xabab",), 0),
        ("", ("ab",), 0),
    ],
)
def test_no_more_is_held_back_than_may_begin_a_stop_string(text: str, stop: tuple[str, ...], held: int) -> None:
    assert held_back(text, stop) == held


# -- ends --------------------------------------------------------------------------------------------------------------
@pytest.mark.clause("L5")
@pytest.mark.parametrize("how", ["close", "with", "drop", "drop unpulled", "cycle"])
def test_a_stream_that_is_let_go_gives_its_blocks_back(wide: Engine, how: str) -> None:
    free = free_blocks(wide)
    stream = wide.stream(prompt(6), LONG)
    if how != "drop unpulled":
        next(stream)
        assert free_blocks(wide) < free
    if how == "close":
        stream.close()
        assert next(stream, None) is None
        assert stream.result.finish_reason == "cancelled"
    elif how == "with":
        with stream:
            next(stream)
    elif how == "cycle":
        cycle: list[object] = [stream]
        cycle.append(cycle)
        del cycle
    del stream
    gc.collect()
    assert not wide.has_work
    assert free_blocks(wide) == free
    assert wide.report()["engine"]["cancelled"] == 1


def test_a_deadline_ends_a_stream_with_what_was_made(tiny_model: Model, backend: Backend) -> None:
    now = [0.0]
    with make_engine(tiny_model, backend, slots=1, block_size=4, max_len=64, clock=lambda: now[0]) as engine:
        stream = engine.stream(prompt(5), LONG, deadline=5.0)
        pieces = [next(stream), next(stream)]
        now[0] = 5.0
        pieces += list(stream)
        assert stream.result.finish_reason == "deadline"
        assert tokens_of(pieces) == stream.result.token_ids
        assert text_of(pieces) == stream.result.text


def test_a_full_queue_is_waited_for_or_refused(tiny_model: Model, backend: Backend) -> None:
    with make_engine(tiny_model, backend, slots=1, block_size=4, max_len=64, max_waiting=1) as engine:
        first = engine.stream(prompt(5), LONG)
        with pytest.raises(QueueFull, match="max_waiting is 1"):
            engine.stream(prompt(4), LONG, wait=False)
        second = engine.stream(prompt(4), LONG)
        third = engine.stream(prompt(3), LONG)
        assert [len(tokens_of(list(s))) for s in (third, first, second)] == [20, 20, 20]
        with pytest.raises(InvalidInput, match="unknown option 'prioriti'"):
            engine.stream(prompt(5), LONG, prioriti=1)
        assert not engine.has_work


def test_a_checked_request_is_queued_once(wide: Engine) -> None:
    request = wide.check(prompt(5), SamplingParams(max_tokens=4, ignore_eos=True))
    assert not wide.has_work
    stream = wide.follow(request)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="was queued already"):
            wide.submit(request)
        next(stream)
    assert sum(len(piece.token_ids) for piece in stream) <= 3
    with pytest.raises(InvalidInput, match="was queued already"):
        wide.follow(request)
    unqueued = wide.check(prompt(5))
    wide.close()
    with pytest.raises(InvalidInput, match="the engine is closed"):
        wide.submit(unqueued)


def test_waiting_for_room_ends_at_the_deadline(tiny_model: Model, backend: Backend) -> None:
    now = iter(range(10**6))
    with make_engine(
        tiny_model, backend, slots=1, block_size=4, max_len=64, max_waiting=1, clock=lambda: float(next(now))
    ) as engine:
        running = engine.stream(prompt(5), LONG)
        next(running)
        waiting = engine.stream(prompt(5), LONG)
        with pytest.raises(QueueFull, match="max_waiting is 1"):
            engine.stream(prompt(4), LONG, deadline=3)
        assert len(tokens_of(list(waiting))) == 20


def test_an_engine_error_reaches_each_stream_behind_its_last_piece(
    wide: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = wide.stream(prompt(5), LONG), wide.stream(prompt(6), LONG)
    next(one)
    next(two)

    def stale(decoder: Decoder, read_behind: int) -> object:
        raise StaleTrace("a row acted that holds no request")

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "collect", stale)
        with pytest.raises(StaleTrace):
            list(one)
    with pytest.raises(StaleTrace):
        list(two)
    assert list(two) == []
    assert two.result.finish_reason == "error"
    assert not wide.has_work


def test_a_stream_of_a_closed_engine_says_so(tiny_model: Model, backend: Backend) -> None:
    engine = make_engine(tiny_model, backend, slots=1, block_size=4, max_len=64)
    running, waiting = engine.stream(prompt(5), LONG), engine.stream(prompt(5), LONG)
    next(running)
    engine.close()
    for stream in (running, waiting):
        with pytest.raises(Cancelled, match="the engine was closed"):
            list(stream)
    with pytest.raises(InvalidInput, match="the engine is closed"):
        engine.step()
    assert isinstance(running, Stream)
    engine.close()
