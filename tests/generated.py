"""What the command line generates in a folder of its own, for tests that move a model between backends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPTS = ("hello world", "or else")
OPTIONS = ("--max-tokens", "6", "--ignore-eos", "--slots", "2", "--max-len", "32", "--block-size", "4", "--json")


def generated(model: Path, folder: Path, backend: str) -> dict[str, Any]:
    """What ``forebay generate`` prints in a new folder whose settings file has one line."""
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
