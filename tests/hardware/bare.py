"""An interpreter without the packages that an H200 host does not have, though this machine does."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ABSENT: Final = ("pydantic", "pydantic_core", "gguf", "requests", "prometheus_client", "importlinter")

_SITE: Final = """
import sys
from importlib.machinery import PathFinder


class Without(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {absent}:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


def bare_site(folder: Path) -> Path:
    """Fill ``folder``, which is made; with it on PYTHONPATH none of ABSENT is found."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE.replace("{absent}", repr(set(ABSENT))), encoding="utf-8")
    return folder
