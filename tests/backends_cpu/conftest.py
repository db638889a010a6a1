"""The backend of these tests, opened once a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.runtime import open_backend
from forebay.specs import Backend


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with open_backend("cpu") as opened:
        yield opened
