"""Nobody has to do more than the core: a backend that does exactly that much conforms, and what it lacks is refused, not failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.specs.suite.core import CORE
from tests.suite.core_only import CORE as DECLARED
from tests.suite.small import make_whole


@pytest.mark.parametrize("profile", ["smoke", "full"])
def test_a_backend_of_the_core_conforms(tmp_path: Path, elsewhere: Path, profile: str) -> None:
    whole = make_whole(tmp_path / "whole")
    said, record = whole.record("--profile", profile, backend="core", path=elsewhere)
    assert record["verdict"] == ("conformant" if profile == "full" else "passed"), said.out[-3000:]
    assert record["summary"]["refused"] > (300 if profile == "full" else 0)
    assert record["summary"]["pass"] > (800 if profile == "full" else 40)
    assert whole.forebay("conform", "--verify", "record.json", path=elsewhere).out == "record.json: valid\n"


def test_its_limits_are_the_core() -> None:
    for name in ("head_dims", "block_sizes", "kv_dtypes"):
        assert getattr(DECLARED, name) == CORE[name]
    assert max(CORE["max_group"]) == DECLARED.max_group
    assert max(CORE["max_query_len"]) == DECLARED.max_query_len
