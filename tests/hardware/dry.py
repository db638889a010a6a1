"""A dry run of a prepared check, as a machine would run it that has nothing of Forebay but this checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .bare import bare_site

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ran:
    """One run of the script."""

    status: int
    said: str
    out: Path
    seconds: float

    @property
    def report(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads((self.out / "report.json").read_text(encoding="utf-8"))
        return made

    @property
    def parts(self) -> dict[str, Any]:
        made: dict[str, Any] = self.report["parts"]
        return made


def dry_run(machine: str, absent: Collection[str], folder: Path, *arguments: str) -> Ran:
    """A dry run of the script of ``hardware/MACHINE``, with no package of ``absent``."""
    dropped = ("FOREBAY_", "PYTEST_", "TRITON_", "JAX_")
    plain = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    site = str(bare_site(folder / "bare", absent))
    environment = plain | {"PYTHON": sys.executable, "PYTHONPATH": site, "CHECK_DRY": "1"}
    start = time.monotonic()
    command = [str(ROOT / "hardware" / machine / "check.sh"), str(folder / "out"), *arguments]
    ended = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=400
    )
    return Ran(ended.returncode, ended.stdout + ended.stderr, folder / "out", time.monotonic() - start)
