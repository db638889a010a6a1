"""The files of the checkout, and the temporary folder that gives them their import names."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("specs", "runtime", "backends", "kernels", "hardware")
"""The folders that are installed under the namespace ``forebay``."""


def files(root: Path) -> list[Path]:
    """Files of a checkout that are tracked or could be added; without git, all that are not made by tools; sorted."""
    git = [
        "git",
        "-c",
        "safe.directory=*",
        "-C",
        str(root),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    listed = subprocess.run(git, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and (root / ".git").exists():
        found = [root / name for name in listed.stdout.split("\0") if name]
    else:
        found = [path for path in root.rglob("*") if not any(map(_made_here, path.relative_to(root).parts))]
    return sorted(path for path in found if path.is_file())


def python_files(root: Path, *folders: str) -> list[Path]:
    """Python files of a checkout in the given folders."""
    return [path for path in files(root) if path.suffix == ".py" and path.relative_to(root).parts[0] in folders]


def text_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Files of a checkout that are UTF-8 text, with their text."""
    for path in files(root):
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def link_namespace(root: Path, into: Path) -> Path:
    """Make ``into/forebay`` out of links to the packages of ``root``, link ``tests`` beside it, and return ``into``.

    Tools that do without the installer's import hooks (mypy, import-linter) see the installed layout there.
    """
    (into / "forebay").mkdir(parents=True)
    for name in PACKAGES:
        if (root / name).is_dir():
            (into / "forebay" / name).symlink_to(root / name)
    if (root / "tests").is_dir():
        (into / "tests").symlink_to(root / "tests")
    return into


def _made_here(name: str) -> bool:
    """Whether tools make files and folders of this name: environments, caches, builds."""
    hidden = name.startswith(".") and name not in {".ci", ".gitignore"}
    return hidden or name in {"build", "dist", "__pycache__"} or name.endswith(".egg-info")
