"""What is known of any machine: system, versions, and the state of the tree."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
TREE: Final = ("specs", "runtime", "backends", "kernels", "hardware")
COMMON: Final = (
    *("numpy", "pluggy", "pytest", "hypothesis", "transformers", "torch", "typer", "rich", "safetensors", "tokenizers"),
    *("jinja2", "matplotlib", "filelock", "pydantic"),
)


def machine(backend: str, libraries: Sequence[str]) -> dict[str, Any]:
    """Facts as JSON; versions are those of COMMON and ``libraries``."""
    return {
        "backend": backend,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": {name: _version(name) for name in (*libraries, *COMMON)},
        "git_tree": output_of(["git", "-c", "safe.directory=*", "-C", str(ROOT), "rev-parse", "HEAD^{tree}"]),
        "source_sha256": source_hash(ROOT),
    }


def source_hash(root: Path) -> str:
    """SHA-256 over path and bytes of every source file of the packages: the checkout may come without git."""
    found = hashlib.sha256()
    for folder in TREE:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {".py", ".toml", ".sh"}:
                found.update(f"{path.relative_to(root).as_posix()}\0".encode())
                found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def load_average() -> list[float]:
    """Of the machine, over 1, 5 and 15 minutes."""
    return [round(load, 2) for load in os.getloadavg()]


def output_of(command: Sequence[str]) -> str:
    """What a command prints, or why that is not known."""
    try:
        ended = subprocess.run(list(command), capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: {error}"
    return ended.stdout.strip() if ended.returncode == 0 else f"not known: {ended.stderr.strip()[:200]}"
