"""The backends over torch that can run here, each opened once a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.runtime import open_backend
from forebay.specs import Backend


@pytest.fixture(scope="module", params=["cpu", "cuda:interpret"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with open_backend(request.param) as opened:
        yield opened
