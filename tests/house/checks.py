"""Rules of the house that no ready-made tool checks: each takes a checkout and returns, as text, what breaks it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from .tree import PACKAGES, python_files, text_files

Check = Callable[[Path], list[str]]

MAX_LINES: Final = 400
"""Lines of a module at most, of the package and of its tests."""
SETTINGS: Final = "runtime/settings.py"

THIRD_PARTY: Final[dict[str, frozenset[str]]] = {
    "specs": frozenset({"numpy"}),
    "runtime/suite_entry.py": frozenset({"pytest"}),
    "runtime/suite_plugin.py": frozenset({"pytest"}),
    "specs/suite": frozenset({"pytest", "hypothesis", "pluggy", "jinja2", "matplotlib"}),
    "specs/faults": frozenset({"pytest", "hypothesis", "filelock"}),
    "runtime": frozenset({"numpy", "pluggy"}),
    SETTINGS: frozenset({"pydantic"}),
    "runtime/metrics.py": frozenset({"prometheus_client"}),
    "runtime/models": frozenset({"safetensors", "tokenizers", "gguf", "filelock", "requests", "jinja2"}),
    "runtime/models/hub.py": frozenset({"huggingface_hub"}),  # of the extra "hf", imported when an id is asked for
    "runtime/cli": frozenset({"typer", "rich"}),
    "kernels/numba": frozenset({"numpy", "numba", "llvmlite"}),
    "kernels/pallas": frozenset({"jax"}),
    "kernels/triton": frozenset({"numpy", "torch", "triton"}),
    "backends": frozenset({"numpy", "pluggy"}),
    "backends/cpu": frozenset({"torch", "numba"}),
    "backends/cuda": frozenset({"torch", "triton"}),
    "backends/torch_shared": frozenset({"torch"}),
    "backends/tpu": frozenset({"jax"}),
    "hardware": frozenset({"numpy"}),
    # Peers that a benchmark measures in the same run; they are imported inside functions, once a backend is open.
    "hardware/cpu/bench_attention.py": frozenset({"torch", "numba"}),
    "hardware/cpu/bench_decode.py": frozenset({"torch", "transformers"}),
    "hardware/checking/shaped_model.py": frozenset({"safetensors"}),
    "hardware/checking/transformers_tokens.py": frozenset({"torch", "transformers"}),
    "hardware/h200/bandwidth.py": frozenset({"torch"}),
    "hardware/h200/peers.py": frozenset({"torch", "flash_attn"}),
    "hardware/tpu/bandwidth.py": frozenset({"jax"}),
    "hardware/tpu/facts.py": frozenset({"jax"}),
    "hardware/tpu/overhead.py": frozenset({"jax"}),
    "hardware/tpu/peers.py": frozenset({"jax"}),
}
"""Third-party modules a file may import, also for type checking only: the union over the folders it lies in."""

SHIPPED_SUITE: Final = ("specs/suite/", "specs/faults/")
"""Tests that ship in the wheel; they assert as tests do."""

_ENVIRONMENT: Final = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})
_ANNOUNCED: Final = ("backends/cuda/opening.py", "backends/tpu/compile_targets.py")
"""Modules that may set a variable, which a vendor's library takes at its import and nowhere else, and may read none."""
_MACHINE_PATH: Final = re.compile(
    r"(?:^|[^A-Za-z0-9_.])(/(?:tmp|work|farm|root|opt|home|Users)/[A-Za-z0-9_.-]+)", re.MULTILINE
)
_REGISTRY_HOST: Final = re.compile(
    r"\b(pypi\.org|pythonhosted\.org|download\.pytorch\.org|npmjs\.(?:org|com)|debian\.org|anaconda\.org|crates\.io|"
    r"proxy\.golang\.org|huggingface\.co)\b"
)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of every import in a module, wherever it stands; relative imports are left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def third_party(root: Path) -> list[str]:
    """Imports of a third-party module where THIRD_PARTY does not allow it, and of a package by its folder's name."""
    found = []
    for name, tree in _modules(root):
        allowed: set[str] = set()
        for folder, modules in THIRD_PARTY.items():
            if name == folder or name.startswith(f"{folder}/"):
                allowed |= modules
        for line, module in imports(tree):
            top = module.partition(".")[0]
            if top in PACKAGES:
                found.append(f"{name}:{line}: imports {module}; the package is forebay.{module}")
            elif top != "forebay" and top not in sys.stdlib_module_names and top not in allowed:
                found.append(f"{name}:{line}: imports {top}; may import {', '.join(sorted(allowed)) or 'nothing'}")
    return found


def unused_allowances(root: Path) -> list[str]:
    """Third-party modules that THIRD_PARTY allows in a folder or file of the checkout, and no module there imports."""
    used: dict[str, set[str]] = {place: set() for place in THIRD_PARTY if (root / place).exists()}
    for name, tree in _modules(root):
        for place in used:
            if name == place or name.startswith(f"{place}/"):
                used[place] |= {module.partition(".")[0] for _, module in imports(tree)}
    return [
        f"{place}: may import {module}, and does not; take it from THIRD_PARTY"
        for place, found in used.items()
        for module in sorted(THIRD_PARTY[place] - found)
    ]


def backends_by_name(root: Path) -> list[str]:
    """Import paths of a backend in strings outside backends/; only entry points name one."""
    return [
        f"{name}:{node.lineno}: names {node.value!r}"
        for name, tree in _modules(root)
        if not name.startswith("backends/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "forebay.backends." in node.value
    ]


def environment(root: Path) -> list[str]:
    """Uses of the process environment outside the settings module."""
    return [
        f"{name}:{line}: os.{attribute}; only {SETTINGS} reads the environment"
        for name, tree in _modules(root)
        if name != SETTINGS
        for line, attribute in _used_of_os(tree)
        if attribute in _ENVIRONMENT and not (name in _ANNOUNCED and line in _items_set(tree))
    ]


def asserts(root: Path) -> list[str]:
    """Assert statements in shipped code: inputs are checked with errors that say what to do."""
    return [
        f"{name}:{node.lineno}: assert; raise an error of specs/errors.py"
        for name, tree in _modules(root)
        if not name.startswith(SHIPPED_SUITE)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]


def module_length(root: Path) -> list[str]:
    """Python files longer than MAX_LINES."""
    found = []
    for path in python_files(root, *PACKAGES, "tests"):
        name = str(path.relative_to(root))
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > MAX_LINES:
            found.append(f"{name}: {count} lines; split it by noun, {MAX_LINES} at most")
    return found


def machine_paths(root: Path) -> list[str]:
    """Absolute paths that exist on one machine only."""
    return _matches(root, _MACHINE_PATH, "a path of a machine")


def registry_hosts(root: Path) -> list[str]:
    """Host names of package registries and model hubs."""
    return _matches(root, _REGISTRY_HOST, "a registry host")


def _modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in python_files(root, *PACKAGES):
        yield path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _used_of_os(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from ((node.lineno, alias.name) for alias in node.names)


def _items_set(tree: ast.AST) -> set[int]:
    """Lines on which an item is assigned (``x[key] = value``)."""
    return {
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }


def _matches(root: Path, pattern: re.Pattern[str], what: str) -> list[str]:
    return [
        f"{path.relative_to(root)}:{text.count(chr(10), 0, match.start(1)) + 1}: {match[1]} is {what}"
        for path, text in text_files(root)
        for match in pattern.finditer(text)
    ]


CHECKS: Final[tuple[Check, ...]] = (
    third_party,
    backends_by_name,
    environment,
    asserts,
    module_length,
    machine_paths,
    registry_hosts,
)
