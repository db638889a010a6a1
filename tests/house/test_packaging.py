"""The wheel holds the whole package, and works where nothing else of the checkout is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from .tree import PACKAGES, ROOT, files

VENDOR = ("torch", "numba", "llvmlite", "triton", "jax", "ttnn", "ttl")


DOCUMENTS = (
    "specs/suite/README.md",
    "specs/faults/MATRIX.md",
    "specs/faults/matrix.json",
    "backends/cuda/compiled.json",
    "backends/tpu/compiled.json",
)
"""What is in the wheel of what is read and not run: the guide to the suite, what its seeded faults came to, and what kernels take."""


def expected(root: Path) -> set[str]:
    """Names inside a wheel of every file that belongs there: modules, type markers and data."""
    found = set()
    for path in files(root):
        relative = path.relative_to(root)
        data = path.suffix in {".py", ".toml", ".jinja"} or path.name == "py.typed" or relative.as_posix() in DOCUMENTS
        if relative.parts[0] in PACKAGES and data:
            found.add(f"forebay/{relative.as_posix()}")
    return found


def untyped(names: set[str]) -> list[str]:
    """Packages without a ``py.typed`` in themselves or in a package above them."""
    packages = {name.rpartition("/")[0] for name in names if name.endswith("/__init__.py")}
    typed = {name.rpartition("/")[0] for name in names if name.endswith("/py.typed")}
    return sorted(p for p in packages if not any(p == t or p.startswith(f"{t}/") for t in typed))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout, so that no earlier build leaves anything in it."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in files(ROOT):
        copy = folder / "tree" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
    ]
    subprocess.run([*command, str(folder / "tree")], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    folder = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def python(unpacked: Path, code: str) -> str:
    """Run code in a fresh interpreter with the unpacked wheel first among its import paths; its output."""
    start = f"import sys; sys.path.insert(0, {str(unpacked)!r})\n"
    command = [sys.executable, "-I", "-c", start + code]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=unpacked).stdout.strip()


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected(ROOT)
    assert {"forebay/specs/clauses.toml", "forebay/specs/py.typed", "forebay/specs/suite/README.md"} <= names


def test_every_package_of_the_wheel_is_typed(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert untyped(names) == []
    assert untyped(names - {"forebay/backends/cpu/py.typed"}) == ["forebay/backends/cpu"]


def test_the_wheel_declares_its_command_backends_extras_and_licence(unpacked: Path) -> None:
    (found,) = metadata.distributions(name="forebay", path=[str(unpacked)])
    assert {(e.group, e.name) for e in found.entry_points} >= {
        ("console_scripts", "forebay"),
        ("forebay.backends", "cpu"),
        ("forebay.backends", "sim"),
    }
    assert set(found.metadata.get_all("Provides-Extra") or []) >= {"cpu", "hf", "test"}
    assert found.metadata["License-Expression"] == "Apache-2.0"


def test_the_contract_is_read_from_the_wheel(unpacked: Path) -> None:
    code = "import forebay.specs.clauses as c; print(c.__file__, len(c.catalogue().clauses))"
    file, count = python(unpacked, code).split()
    assert Path(file).is_relative_to(unpacked)
    assert int(count) > 50


def test_what_every_pytest_loads_is_small_and_leaves_other_peoples_runs_alone(unpacked: Path) -> None:
    """One entry point, which imports nothing of numpy, the contract or the suite; a pytest that names no suite has no option of it."""
    (found,) = metadata.distributions(name="forebay", path=[str(unpacked)])
    (entry,) = (entry for entry in found.entry_points if entry.group == "pytest11")
    code = f"""
import sys, os, pytest
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
before = set(sys.modules)
import {entry.module}
loaded = [name for name in set(sys.modules) - before if not name.startswith("forebay")]
options = ["-q", "-p", "no:cacheprovider", "-p", "{entry.module}", "--collect-only"]
print("said", int(pytest.main([*options, "--backend", "sim"])), loaded, "forebay.specs" in sys.modules)
"""
    assert "said 4 [] False" in python(unpacked, code)


@pytest.mark.clause("B1")
def test_entry_points_of_backends_import_no_vendor_library(unpacked: Path) -> None:
    (found,) = metadata.distributions(name="forebay", path=[str(unpacked)])
    modules = [entry.module for entry in found.entry_points if entry.group == "forebay.backends"]
    code = f"import importlib; [importlib.import_module(name) for name in {modules}]; print(*sys.modules)"
    loaded = set(python(unpacked, code).split())
    assert set(modules) <= loaded
    assert loaded & set(VENDOR) == set()
    assert "numba" in python(unpacked, "import numba; print(*sys.modules)").split()
