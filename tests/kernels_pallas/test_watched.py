"""The decode kernel under the interpreters that find races and unwaited copies, and wrong versions of it, which they must find."""

from __future__ import annotations

import pytest

from tests.kernels_pallas.mutants import CASES, MODES, MUTANTS
from tests.kernels_pallas.watched import SOURCES, Found, mutated, watch_together

WATCHED = [mode for mode in MODES if mode != "plain"]
SOME = [name for name, mutant in MUTANTS.items() if mutant.mode in WATCHED]
"""The plain interpreter is what the other tests use; ``python -m tests.full pallas_mutants`` runs it as well."""


@pytest.fixture(scope="module")
def sound() -> Found:
    """Findings in the kernel as it is."""
    return watch_together([("", case, mode) for case in CASES for mode in WATCHED])


@pytest.fixture(scope="module")
def wrong() -> Found:
    """Findings in the mutants, where they say that they are found."""
    return watch_together([(name, MUTANTS[name].case, MUTANTS[name].mode) for name in SOME])


@pytest.mark.parametrize("mode", WATCHED)
@pytest.mark.parametrize("case", CASES)
def test_values_are_right_without_races_and_only_seen_pages_are_read(sound: Found, case: str, mode: str) -> None:
    """Nothing is found: no race, no wrong value, no copy left, and every page that is seen was read exactly once by each block."""
    assert sound["", case, mode] == {}


@pytest.mark.parametrize("name", SOME)
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
