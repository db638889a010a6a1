"""Makes a plain checkout importable without installing it: ``python links.py CHECKOUT FOLDER``, standard library alone.

FOLDER gets ``forebay/`` with links to the packages, and beside it the metadata by which backends are found, made from pyproject.toml.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Final

PACKAGES: Final = ("specs", "runtime", "backends", "kernels", "hardware")


def link(checkout: Path, folder: Path) -> None:
    """Fill ``folder``, which is made; put it first on PYTHONPATH to import Forebay from ``checkout``.

    Raises:
        OSError: the checkout has no pyproject.toml, or the folder is there.
    """
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (folder / "forebay").mkdir(parents=True)
    for name in PACKAGES:
        (folder / "forebay" / name).symlink_to((checkout / name).resolve())
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(about, encoding="utf-8")
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    link(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
