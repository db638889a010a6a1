"""A port that has no kernel at all, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.specs import Backend
from forebay.specs.suite.provided import pair, shadow
from tests.contract.numpy_port import NumpyPort, opened

__all__ = ["pair", "shadow"]


@pytest.fixture(scope="module")
def port() -> Iterator[Backend]:
    """A port that has no kernel at all."""
    with opened(NumpyPort()) as made:
        yield made
