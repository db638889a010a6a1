"""Surroundings of the tests of settings and selection."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def surroundings(plain_surroundings: None) -> None:
    """Every test of this folder has them plain."""
