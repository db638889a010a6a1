"""Faults are seeded as the command seeds them: nothing of the pytest that runs these tests reaches the processes that judge."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.runtime.settings import isolated


@pytest.fixture(autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with isolated(tmp_path_factory.mktemp("isolated")):
        yield
