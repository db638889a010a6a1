"""One line of configuration moves a model from the host's kernels to JAX; its tokens stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generated import generated
from tests.models.tiny import write_folder


@pytest.mark.clause("C11", "B2")
def test_one_line_of_configuration_moves_the_model_and_no_token(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model")
    ran = {
        name: generated(model, tmp_path / str(i), name) for i, name in enumerate(("cpu", "tpu:xla", "tpu:interpret"))
    }
    tokens = {name: [result["token_ids"] for result in data["results"]] for name, data in ran.items()}
    assert tokens["cpu"] == tokens["tpu:xla"] == tokens["tpu:interpret"]
    assert [len(row) for row in tokens["cpu"]] == [6, 6]
    assert [data["report"]["backend"]["name"] for data in ran.values()] == ["cpu", "tpu", "tpu"]
