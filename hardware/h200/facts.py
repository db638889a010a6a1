"""What the machine is: device, driver, versions, and the state of the tree."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from forebay.hardware.h200.part import Result, Task
from forebay.runtime import Settings, open_backend

LIBRARIES: Final = (
    *("torch", "triton", "transformers", "numpy", "pluggy", "pytest", "hypothesis", "numba", "typer", "rich"),
    *("safetensors", "tokenizers", "jinja2", "matplotlib", "filelock", "pydantic", "flash-attn"),
)
ROOT: Final = Path(__file__).resolve().parents[2]
TREE: Final = ("specs", "runtime", "backends", "kernels", "hardware")


def run(task: Task) -> Result:
    """Fails where the backend does not open."""
    data: dict[str, Any] = {
        "backend": task.backend,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "git_tree": _output(["git", "-c", "safe.directory=*", "-C", str(ROOT), "rev-parse", "HEAD^{tree}"]),
        "source_sha256": source_hash(ROOT),
        "nvidia_smi": "not asked: dry run" if task.dry else _output(["nvidia-smi"]),
    }
    task.save("crashed", data)
    with open_backend(task.backend, settings=Settings()) as backend:
        data["info"] = {key: str(value) for key, value in backend.info.items()}
    return "passed", data, []


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


def _output(command: list[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: {error}"
    return ended.stdout.strip() if ended.returncode == 0 else f"not known: {ended.stderr.strip()[:200]}"
