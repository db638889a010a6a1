"""Linter, formatter, type checker and import direction: each passes on this checkout, and each can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from .tree import PACKAGES, ROOT, link_namespace

CONFIG = ROOT / "pyproject.toml"
APART = {
    "contract": "the contract imports nothing of what judges by it",
    "suite": "the suite imports nothing of the seeded faults",
    "backends": "backends import nothing of what judges them",
}
CONTRACTS = [each["name"] for each in tomllib.loads(CONFIG.read_text())["tool"]["importlinter"]["contracts"]]
"""What pyproject.toml says about imports, by name."""


def python(*arguments: str, path: Path | None = None) -> tuple[int, str]:
    """Run this interpreter with ``path`` first among its import paths; status and output."""
    places = {} if path is None else {"MYPYPATH": str(path), "PYTHONPATH": str(path)}
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=path or ROOT,
        env={**os.environ, "COLUMNS": "200", **places},
        capture_output=True,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout + process.stderr


def run(module: str, *arguments: str, path: Path | None = None) -> tuple[int, str]:
    """``python -m module`` as :func:`python` runs it."""
    return python("-m", module, *arguments, path=path)


def mypy(namespace: Path, cache: Path) -> tuple[int, str]:
    """Check what is linked in ``namespace``, by path: by name, an installed copy of the package could come first."""
    folders = [str(folder.relative_to(namespace)) for folder in namespace.iterdir()]
    return run("mypy", "--config-file", str(CONFIG), "--cache-dir", str(cache), *folders, path=namespace)


def lint_imports(namespace: Path) -> tuple[int, str]:
    code = "import sys; from importlinter.cli import lint_imports_command as c; c(sys.argv[1:])"
    return python("-c", code, "--no-cache", "--no-logo", str(CONFIG), path=namespace)


def broken(output: str) -> set[str]:
    """The contracts that an output of :func:`lint_imports` reports as broken."""
    return {name for name in CONTRACTS if f"{name} BROKEN" in output}


def write_namespace(root: Path, files: dict[str, str]) -> Path:
    """A checkout with ``files`` and an ``__init__.py`` in each package folder, linked into a namespace folder."""
    for name, text in files.items():
        path = root / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text, encoding="utf-8")
    return link_namespace(root / "tree", root / "namespace")


def test_ruff_finds_nothing() -> None:
    status, output = run("ruff", "check", "--no-cache", ".")
    assert status == 0, output


def test_ruff_would_find_something(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\n\n\ndef f(x):\n    assert x\n", encoding="utf-8")
    status, output = run(
        "ruff", "check", "--no-cache", "--config", str(CONFIG), "--output-format", "concise", str(tmp_path)
    )
    assert status == 1
    assert {"D100", "D103", "F401", "S101"} <= set(re.findall(r"\b[A-Z]+[0-9]+\b", output))


def test_every_file_is_formatted() -> None:
    status, output = run("ruff", "format", "--no-cache", "--check", ".")
    assert status == 0, output


def test_the_formatter_would_change_something(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = { 'a':1 }\n", encoding="utf-8")
    status, output = run("ruff", "format", "--no-cache", "--check", "--config", str(CONFIG), str(tmp_path))
    assert (status, "would be reformatted" in output) == (1, True)


def test_the_package_and_its_tests_are_strictly_typed(tmp_path: Path) -> None:
    status, output = mypy(link_namespace(ROOT, tmp_path / "namespace"), ROOT / ".mypy_cache/house")
    assert status == 0, output
    exceptions = tomllib.loads(CONFIG.read_text())["tool"]["mypy"]["overrides"]
    assert [sorted(each) for each in exceptions] == [["ignore_missing_imports", "module"]], "no folder is checked less"


def test_mypy_is_strict_and_sees_the_package_under_its_import_name(tmp_path: Path) -> None:
    files = {
        "specs/a.py": "def f(x):\n    return x\n",
        "runtime/b.py": "from forebay.specs.c import g\n\nX: int = g()\n",
        "specs/c.py": "def g() -> str:\n    return ''\n",
    }
    status, output = mypy(write_namespace(tmp_path, files), tmp_path / "cache")
    assert status == 1
    assert re.search(r"specs/a\.py:1: error: .*\[no-untyped-def\]", output)
    assert re.search(r"runtime/b\.py:3: error: .*\[assignment\]", output)


def test_imports_keep_their_direction(tmp_path: Path) -> None:
    status, output = lint_imports(link_namespace(ROOT, tmp_path / "namespace"))
    assert status == 0, output
    found = re.search(r"Analyzed (\d+) files", output)
    present = sum(1 for folder in PACKAGES for _ in (ROOT / folder).rglob("*.py"))
    assert found is not None
    assert int(found[1]) >= present


def test_every_import_in_a_wrong_direction_is_caught(tmp_path: Path) -> None:
    files = {
        "specs/a.py": "import forebay.runtime.a\n",
        "runtime/a.py": "def f() -> None:\n    from forebay.backends.cpu import a\n",
        "kernels/numba/a.py": "from forebay.specs import b\n",
        "kernels/other/a.py": "from forebay.kernels.numba import a\n",
        "backends/cpu/a.py": "from forebay.hardware import a\n",
        "backends/other/a.py": "from ..cpu import a\n",
        "hardware/a.py": "import typing\nif typing.TYPE_CHECKING:\n    from forebay.kernels.numba import a\n",
        "specs/b.py": "",
        "specs/c.py": "from .suite import a\n",
        "backends/cpu/b.py": "from forebay.specs.suite.a import b\n",
        "specs/suite/a.py": "from forebay.specs.faults.a import b\n",
        "specs/faults/a.py": "b = 1\n",
    }
    status, output = lint_imports(write_namespace(tmp_path, files))
    assert status == 1
    assert broken(output) == set(CONTRACTS)


@pytest.mark.parametrize(
    ("name", "text", "who"),
    [
        ("specs/__init__.py", "from .suite.a import x\n", "contract"),
        ("specs/a.py", "def f() -> None:\n    import forebay.specs.suite\n", "contract"),
        ("specs/a.py", "from forebay.specs.suite.reports import page\n", "contract"),
        ("specs/a.py", "from . import faults\n", "contract"),
        ("specs/a.py", "from .faults.a import x\n", "contract"),
        ("specs/b.py", "from .suite import a\n", "contract backends"),  # a backend of this tree imports that one
        ("specs/suite/b.py", "from ..faults import a\n", "suite"),
        ("specs/suite/reports/b.py", "from forebay.specs import faults\n", "suite"),
        ("backends/cpu/a.py", "from forebay.specs.suite.a import x\n", "backends"),
        ("backends/cpu/a.py", "from forebay.specs.faults import a\n", "backends"),
    ],
)
def test_what_is_judged_and_what_judges_are_apart(name: str, text: str, who: str, tmp_path: Path) -> None:
    """Faults use the suite, both use the contract, and no import goes the other way, through others neither."""
    files = {
        "specs/a.py": "",
        "specs/b.py": "",
        "specs/suite/a.py": "from forebay.specs import b\n\nx = b\n",
        "specs/suite/reports/page.py": "from ... import b\n",
        "specs/faults/a.py": "from forebay.specs.suite.a import x\n",
        "runtime/a.py": "from forebay.specs.suite import a\n",
        "backends/cpu/a.py": "import forebay.specs.b\n",
        "kernels/numba/a.py": "",
        "hardware/a.py": "",
    }
    good = write_namespace(tmp_path / "good", files)
    assert lint_imports(good)[0] == 0, lint_imports(good)[1]
    status, output = lint_imports(write_namespace(tmp_path / "bad", {**files, name: text}))
    assert status == 1
    assert broken(output) == {APART[each] for each in who.split()}


@pytest.mark.parametrize("folder", PACKAGES)
def test_every_folder_of_the_package_is_linked(folder: str, tmp_path: Path) -> None:
    namespace = link_namespace(ROOT, tmp_path / "namespace")
    assert (namespace / "forebay" / folder).resolve() == ROOT / folder
