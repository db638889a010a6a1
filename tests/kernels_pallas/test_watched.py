"""The decode kernel under the interpreters that find races and unwaited copies, and wrong versions of it, which they must find."""

from __future__ import annotations

import pytest

from tests.kernels_pallas.mutants import CASES, MODES, MUTANTS
from tests.kernels_pallas.watched import SOURCES, Found, mutated, watch_together


@pytest.fixture(scope="module")
def sound() -> Found:
    """Findings in the kernel as it is."""
    return watch_together([("", case, mode) for case in CASES for mode in MODES])


@pytest.fixture(scope="module")
def wrong() -> Found:
    """Findings in every mutant, where it says that it is found."""
    return watch_together([(name, mutant.case, mutant.mode) for name, mutant in MUTANTS.items()])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_values_are_right_without_races_and_only_seen_pages_are_read(sound: Found, case: str, mode: str) -> None:
    """Nothing is found: no race, no wrong value, no copy left, and every page that is seen was read exactly once by each block."""
    assert sound["", case, mode] == {}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_found(wrong: Found, name: str) -> None:
    mutant = MUTANTS[name]
    assert mutant.shown in wrong[name, mutant.case, mutant.mode]


def test_a_mutant_whose_text_is_not_there_once_is_refused() -> None:
    text = (SOURCES / "softmax.py").read_text(encoding="utf-8")
    mutant = MUTANTS["the soft-cap is left out"]
    with pytest.raises(ValueError, match=r"softmax.py has 0 times .* mend the mutant"):
        mutated(mutant, text.replace(mutant.old, ""))
    with pytest.raises(ValueError, match=r"softmax.py has 2 times"):
        mutated(mutant, text + text)
