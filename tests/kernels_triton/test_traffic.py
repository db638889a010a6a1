"""No byte of keys and values is loaded twice by a query block, in the tiles of devices; the table in the records says so."""

from __future__ import annotations

import pytest

from tests.kernels_triton.traffic import ABOVE, CONFIGURATIONS, MOST, TABLE, Configuration, page, query_blocks, traffic


@pytest.mark.clause("D12")
@pytest.mark.parametrize("made", CONFIGURATIONS, ids=str)
def test_keys_and_values_are_loaded_once(made: Configuration) -> None:
    found = traffic(made)
    times = query_blocks(made)
    assert (times > 1) == (made in ABOVE)
    assert 1.0 <= found.ratio <= MOST * times
    assert found.partials + found.tables < found.least, "more beside keys and values than of them"


def test_the_table_is_what_is_counted() -> None:
    assert TABLE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.kernels_triton.traffic"
