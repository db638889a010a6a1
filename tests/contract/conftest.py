"""The backend every contract test is written over, opened once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from forebay.runtime import open_backend
from forebay.specs import Backend

settings.register_profile("contract", deadline=None, derandomize=True, max_examples=40, print_blob=True)
settings.load_profile("contract")


@pytest.fixture(scope="session")
def backend() -> Iterator[Backend]:
    with open_backend("cpu") as opened:
        yield opened
