"""No byte of keys and values is loaded twice, in the tiles of devices; the table in the records says so."""

from __future__ import annotations

import pytest

from tests.kernels_triton.traffic import CONFIGURATIONS, MOST, TABLE, Configuration, page, traffic


@pytest.mark.clause("D12")
@pytest.mark.parametrize("made", CONFIGURATIONS, ids=str)
def test_keys_and_values_are_loaded_once(made: Configuration) -> None:
    found = traffic(made)
    assert 1.0 <= found.ratio <= MOST
    assert found.partials + found.tables < found.least, "more beside keys and values than of them"


def test_the_table_is_what_is_counted() -> None:
    assert TABLE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.kernels_triton.traffic"
