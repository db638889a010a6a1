"""What counts as a refusal: something that was refused, by the contract, for a limit that is declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.suite.small import Small
from tests.suite.test_backends import judge

CHECKOUT = Path(__file__).parents[2]
REFUSED = """
from forebay.specs import Segment


@pytest.mark.clause("D9")
@pytest.mark.parametrize("window", [3])
def test_window(backend: Backend, window: int) -> None:
    with scene(backend, (5, 3)) as s:
        s.check(window=window)


@pytest.mark.clause("D8")
def test_head_size(backend: Backend) -> None:
    with scene(backend, (5,), head_dim=96) as s:
        s.check()


@pytest.mark.clause("D9")
@given(st.integers(1, 3))
def test_within_a_step(backend: Backend, seed: int) -> None:
    with scene(backend, (5,), head_dim=96, seed=seed) as s:
        q, table, visible = (backend.to_device(x) for x in (s.q, s.table, s.visible))
        call = lambda b: ({}, {"out": b.paged_decode(q, s.pool, 0, table, visible, table_len=1)[0]})
        backend.run(Segment("step", call, pools=(s.pool,)))
"""
NOTHING = """
@pytest.mark.refuses("L2")
def test_of_nothing(backend: Backend) -> None:
    for dtype in [each for each in ("float32",) if each not in backend.capabilities.kv_dtypes]:
        with pytest.raises(Unsupported):
            backend.create_pool(geometry(dtype=dtype))
"""


@pytest.mark.refuses("G2")
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("by_itself", "Unsupported for head_dims=96 is no check of the contract's but raised behind them"),
        ("by_a_borrowed_check", "Unsupported for max_group=16 is no check of the contract's but raised behind them"),
        ("by_a_kept_error", "Unsupported for max_group=16 is no check of the contract's but raised behind them"),
        ("by_a_quirk", "Unsupported for recapture_at_boundary=True, and recapture_at_boundary is no limit"),
        ("by_a_text", "Unsupported for max_query_len='long', expected an int"),
    ],
)
def test_a_driver_cannot_refuse_what_it_does_not_declare(small: Small, elsewhere: Path, how: str, says: str) -> None:
    """Whatever way it takes, the test has failed; what the contract refuses for it is refused beside that."""
    small.add("test_refused.py", REFUSED)
    _, record = small.record("-k", "test_refused", backend=f"dodging:{how}", path=elsewhere)
    found: dict[str, Any] = {result["test"].partition("::")[2]: result for result in record["results"]}
    assert {name: result["outcome"] for name, result in found.items()} == {
        "test_window[3]": "fail",
        "test_head_size": "refused",
        "test_within_a_step": "refused",
    }
    assert found["test_window[3]"]["message"].startswith(says)
    assert found["test_window[3]"]["refusal"] is None
    assert record["verdict"] == "failed"
    for name in ("test_head_size", "test_within_a_step"):
        refusal = found[name]["refusal"]
        assert refusal["raised_in"] == "forebay.specs.attention"
        assert (refusal["capability"], refusal["value"]) == ("head_dims", "96")


@pytest.mark.refuses("G2")
@pytest.mark.parametrize("name", ["sim", "cpu"])
def test_every_refusal_test_has_something_refused(name: str, tmp_path: Path) -> None:
    """Over what the backend declares nothing may be left of a refusal test but its pass."""
    heard = ("-m", "refuses", "-p", "tests.suite.hearing_refusals")
    result = judge(name, tmp_path, *heard, path=(CHECKOUT,))
    assert result.returncode == 0, result.stdout[-3000:]
    assert "in which nothing was refused" not in result.stdout


@pytest.mark.refuses("G2")
def test_a_refusal_test_of_nothing_is_heard(small: Small) -> None:
    small.add("test_nothing.py", NOTHING)
    at = ("--pyargs", "forebay.specs.suite", "--backend", "sim", "-k", "test_of_nothing")
    assert small.pytest(*at).code == 0
    (small.folder / "tests").symlink_to(CHECKOUT / "tests")
    said = small.pytest(*at, "-p", "tests.suite.hearing_refusals")
    assert said.code == 1
    assert "a refusal test in which nothing was refused" in said.out
