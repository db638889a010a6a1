"""A step that is cut off leaves the engine good: the request goes on where it was, nothing is lost (clause L5)."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.runtime import Engine, Model, SamplingParams, open_backend
from forebay.runtime.decoder import Decoder
from forebay.runtime.forward import HostForward
from forebay.runtime.kv_cache import KVCache
from forebay.runtime.prefill import DevicePrefill
from forebay.runtime.waiting import WaitingQueue
from forebay.specs import Backend, InvalidInput
from tests.runtime.books import check_blocks, check_empty
from tests.runtime.harness import make_engine, prompt
from tests.runtime.plain import Plain


@pytest.mark.clause("L5")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", [(DevicePrefill, "advance"), (HostForward, "choose"), (Decoder, "seed")], ids=str)
@pytest.mark.parametrize("then", ["go on", "cancel"])
def test_a_request_whose_start_is_cut_off_goes_on_where_it_was(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], error: type[BaseException], then: str
) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    expected = engine.generate([prompt(6)], params)[0].token_ids
    owner, name = where
    honest = getattr(owner, name)

    def cut_off(*arguments: Any) -> Any:
        honest(*arguments)
        monkeypatch.setattr(owner, name, honest)
        raise error

    monkeypatch.setattr(owner, name, cut_off)
    request = engine.add(prompt(6), params)
    with pytest.raises(error):
        engine.step()
    if then == "cancel":
        engine.cancel(request)
        assert (request.finish_reason, engine.has_work) == ("cancelled", False)
        assert engine.generate([prompt(6)], params)[0].token_ids == expected
    else:
        released = []
        for _ in range(20):
            released += [token for _, token in engine.step()]
        assert not engine.has_work
        assert tuple(request.token_ids) == tuple(released) == expected
    assert engine.report()["memory"]["blocks_free"] == 5


@pytest.mark.clause("L5", "S4")
@pytest.mark.parametrize(
    "where",
    [(HostForward, "choose"), (KVCache, "publish"), (KVCache, "fork"), (WaitingQueue, "put_back"), (Decoder, "seed")],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prefill_on", ["device", "cpu"])
def test_a_family_whose_start_is_cut_off_goes_on_though_somebody_more_urgent_comes_between(
    tiny_model: Model,
    backend: Backend,
    plain: Plain,
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[type, str],
    n: int,
    prefill_on: str,
) -> None:
    """The other one's prompt is computed before the first one's is taken up again."""
    owner, name = where
    honest = getattr(owner, name)
    calls = 0

    def cut_off(*arguments: Any) -> Any:
        nonlocal calls
        honest(*arguments)
        calls += 1
        if calls == (3 if where == (WaitingQueue, "put_back") else 1):  # the first two let the requests in
            monkeypatch.setattr(owner, name, honest)
            raise KeyboardInterrupt

    options: dict[str, Any] = {"slots": 3, "block_size": 4, "max_len": 32, "prefill_on": prefill_on}
    with make_engine(tiny_model, backend, **options) as engine:
        monkeypatch.setattr(owner, name, cut_off)
        root = engine.add(prompt(7), SamplingParams(max_tokens=5, ignore_eos=True, n=n))
        requests = [root, *root.siblings, engine.add(prompt(3, seed=3), SamplingParams(max_tokens=5, ignore_eos=True))]
        interrupted = 0
        for _ in range(60):
            try:
                engine.step()
            except KeyboardInterrupt:
                interrupted += 1
                urgent = SamplingParams(max_tokens=4, ignore_eos=True)
                requests.append(engine.add(prompt(9, seed=2), urgent, priority=1))
            check_blocks(engine, requests)
        assert interrupted == (n > 1 or name not in ("fork", "put_back"))
        assert not engine.has_work
        for r in requests:
            assert tuple(r.token_ids) == plain.tokens(r)
        check_empty(engine)


@pytest.mark.clause("B5")
def test_a_closed_engine_says_so(engine: Engine) -> None:
    engine.close()
    for act in (lambda: engine.add([5]), lambda: engine.generate([[5]])):
        with pytest.raises(InvalidInput, match="the engine is closed"):
            act()


@pytest.mark.clause("B6")
@pytest.mark.parametrize("params", [0, {}, "x"])
def test_what_is_no_sampling_params_is_not_taken_for_the_default(engine: Engine, params: Any) -> None:
    with pytest.raises(InvalidInput, match=r"expected SamplingParams|SamplingParams; give one"):
        engine.generate([[5, 6]], params)
    with pytest.raises(InvalidInput, match="expected SamplingParams"):
        engine.add([5, 6], params)


@pytest.mark.clause("B5")
def test_threads_are_bounded_and_given_back(backend: Backend) -> None:
    import torch

    before = torch.get_num_threads()
    for bad in (0, 257, 99999, 1.5, True):
        with pytest.raises(InvalidInput, match="from 1 to 256"):
            open_backend("cpu", threads=bad)
    with open_backend("cpu", threads=2) as opened:
        assert opened.info["threads"] == torch.get_num_threads() == 2
    assert torch.get_num_threads() == before
