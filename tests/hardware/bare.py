"""An interpreter without the packages that a prepared machine does not have, though this one does."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

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


def bare_site(folder: Path, absent: Collection[str]) -> Path:
    """Fill ``folder``, which is made; with it on PYTHONPATH none of ``absent`` is found."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE.replace("{absent}", repr(set(absent))), encoding="utf-8")
    return folder
