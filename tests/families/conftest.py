"""Fixtures of the family tests: a backend, and each model with its reference and its divergences, made once."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from forebay.runtime import Model, load_model
from forebay.specs import Backend
from tests.families.comparison import Divergence, divergences, plans_in_turn
from tests.families.zoo import Case, Reference, build, covering_cases, prompts, references
from tests.runtime.conftest import backend, surroundings

__all__ = ["backend", "surroundings"]


class Outcomes:
    """What was found of each case; asked again, it is not made again."""

    def __init__(self, folder: Path, backend: Backend) -> None:
        self._folder = folder
        self._backend = backend
        self._references: dict[Case, list[Reference]] = {}
        self._divergences: dict[Case, list[Divergence]] = {}

    def model(self, case: Case) -> Model:
        """The model of ``case`` in float32."""
        folder = self._folder / str(case)
        return load_model(folder if folder.exists() else build(case, folder), dtype="float32")

    def references(self, case: Case) -> list[Reference]:
        """What transformers decodes from each prompt."""
        if case not in self._references:
            self.model(case)
            self._references[case] = references(self._folder / str(case), prompts())
        return self._references[case]

    def divergences(self, case: Case) -> list[Divergence]:
        """Sequences of the case's plans that are not transformers'; each is listed among the warnings of the run."""
        if case not in self._divergences:
            plans = plans_in_turn(covering_cases().index(case))
            found = list(divergences(case, self.model(case), self.references(case), plans, self._backend))
            for divergence in found:
                warnings.warn(str(divergence), stacklevel=2)
            self._divergences[case] = found
        return self._divergences[case]


@pytest.fixture(scope="package")
def outcomes(tmp_path_factory: pytest.TempPathFactory, backend: Backend) -> Outcomes:
    """The models of the zoo."""
    return Outcomes(tmp_path_factory.mktemp("zoo"), backend)
