"""What a failed assertion is about: the part of a comparison that does not hold, by the names in it."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.specs.faults.evidence import Compared, about, names_in


@pytest.mark.parametrize(
    ("statement", "left", "right", "names"),
    [
        ('assert report()["reseeds"] == 0', 1, 0, {"report", "reseeds"}),
        ("assert (c.uploads, c.run, 8) == before", (2, 1, 8), (1, 1, 8), {"c", "uploads", "before"}),
        ("assert before == (c.uploads, c.run)", (1, 1), (1, 2), {"c", "run", "before"}),
        ("assert counts() == want", {"run": 1, "uploads": 2}, {"run": 1}, {"uploads"}),
        ("assert work() == {}", {"launches": {"a": 1, "b": 1}}, {"launches": {"a": 1, "b": 2}}, {"launches", "b"}),
        ("assert delta() == (one, {})", ({"run": 1}, {}), ({"run": 2}, {}), {"run"}),
        ("assert changes(held, after) == {}", {"pool.dropped": "1 of 8 bytes, the first at 0"}, {}, {"pool", "dropped"}),
        ("assert c.replay > before", 1, 1, {"c", "replay", "before"}),
        ("np.testing.assert_array_equal(got, b.fetch(want))", None, None, {"got", "b", "fetch", "want"}),
        ("with unchanged(pool):", None, None, set()),
        ("pool.write(0, loc)", None, None, {"loc"}),
    ],
)  # fmt: skip
def test_names_are_those_of_the_part_that_differs(statement: str, left: Any, right: Any, names: set[str]) -> None:
    assert set(names_in(statement, Compared(left, right))) == names


def test_an_error_that_is_no_assertion_of_the_suite_is_about_nothing() -> None:
    with pytest.raises(AssertionError) as caught:
        assert caught_elsewhere == 2
    assert about(caught.value, Compared(1, 2)) == []
    assert about(ValueError("reseeds"), None) == []


caught_elsewhere = 1
