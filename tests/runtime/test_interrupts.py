"""A step that is cut off leaves the engine good: the request waits again, nothing is lost (clause L5)."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.runtime import Engine, SamplingParams, open_backend
from forebay.specs import Backend, InvalidInput
from tests.runtime.harness import prompt


@pytest.mark.clause("L5")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["_prefill", "_seed"])
def test_a_request_whose_start_is_cut_off_waits_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    expected = engine.generate([prompt(6)], params)[0].token_ids
    honest = getattr(engine, where)

    def cut_off(*arguments: Any) -> Any:
        honest(*arguments)
        monkeypatch.setattr(engine, where, honest)
        raise error

    monkeypatch.setattr(engine, where, cut_off)
    request = engine.add(prompt(6), params)
    with pytest.raises(error):
        engine.step()
    assert engine.report()["memory"]["blocks_allocated"] == 0
    released = []
    for _ in range(20):
        released += [token for _, token in engine.step()]
    assert not engine.has_work
    assert tuple(request.token_ids) == tuple(released) == expected
    assert engine.report()["memory"]["blocks_free"] == 5


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
