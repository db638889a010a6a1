"""One line of configuration moves a model from the host to Triton's interpreter; its tokens stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import write_folder

PROMPTS = ("hello world", "or else")
OPTIONS = ("--max-tokens", "6", "--ignore-eos", "--slots", "2", "--max-len", "32", "--block-size", "4", "--json")


def generated(model: Path, folder: Path, backend: str) -> dict[str, Any]:
    """What ``forebay generate`` prints in a folder whose settings file has one line."""
    folder.mkdir()
    (folder / "forebay.toml").write_text(f'backend = "{backend}"\n')
    plain = {
        key: value for key, value in os.environ.items() if not key.startswith("FOREBAY_") and key != "TRITON_INTERPRET"
    }
    command = [sys.executable, "-m", "forebay.runtime.cli", "generate", *PROMPTS, "--model", str(model), *OPTIONS]
    ended = subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    data: dict[str, Any] = json.loads(ended.stdout)
    return data


@pytest.mark.clause("C11", "B2")
def test_one_line_of_configuration_moves_the_model_and_no_token(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model")
    ran = {name: generated(model, tmp_path / str(i), name) for i, name in enumerate(("cpu", "cuda:interpret"))}
    tokens = {name: [result["token_ids"] for result in data["results"]] for name, data in ran.items()}
    assert tokens["cpu"] == tokens["cuda:interpret"]
    assert [len(row) for row in tokens["cpu"]] == [6, 6]
    assert [data["report"]["backend"]["name"] for data in ran.values()] == ["cpu", "cuda"]
