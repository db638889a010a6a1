"""The rules of the house hold in this checkout, and each of them can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from .checks import CHECKS, MAX_LINES, Check, unused_allowances
from .tree import ROOT

SLASH, DOT = "/", "."  # keep the bad examples out of this file's own text

GOOD = {
    "specs/good.py": "import json\nimport numpy as np\nfrom .errors import ForebayError\n",
    "runtime/settings.py": "import os\nimport pydantic\nPORT = os.environ.get('PORT')\n",
    "runtime/cli/app.py": "import typer\nfrom forebay.specs.good import np\nGROUP = 'forebay.backends'\n",
    "kernels/numba/rows.py": "import numba\nimport numpy\n",
    "backends/cpu/driver.py": "def load():\n    import torch\n    from forebay.kernels.numba import rows\n",
    "specs/suite/test_rows.py": "import pytest\ndef test_rows():\n    assert 1 + 1 == 2\n",
    "tests/test_rows.py": "import torch\nassert torch\n",
    ".venv/pyvenv.cfg": f"home = {SLASH}opt/python\n",
    "README.md": "See src/tmp/file and https://example.org/work/page.\n",
}

BAD = [
    ("third_party", "specs/a.py", "import torch\n", "imports torch"),
    ("third_party", "specs/a.py", "def f():\n    import torch.nn as nn\n", "specs/a.py:2"),
    ("third_party", "runtime/a.py", "if TYPE_CHECKING:\n    from jax import Array\n", "imports jax"),
    ("third_party", "runtime/a.py", "import pydantic\n", "imports pydantic"),
    ("third_party", "hardware/cpu/a.py", "import numba\n", "imports numba"),
    ("third_party", "kernels/numba/a.py", "import torch\n", "imports torch"),
    ("third_party", "kernels/new/a.py", "import numpy\n", "imports numpy"),
    ("third_party", "runtime/a.py", "from specs.errors import ForebayError\n", "the package is forebay.specs"),
    ("backends_by_name", "runtime/a.py", "load('forebay.backends.cpu.plugin')\n", "runtime/a.py:1"),
    ("environment", "runtime/a.py", "import os\nX = os.environ['X']\n", "os.environ"),
    ("environment", "backends/cpu/a.py", "import os\nX = os.getenv('X')\n", "os.getenv"),
    ("environment", "backends/cuda/opening.py", "import os\nX = os.environ['X']\n", "os.environ"),
    ("environment", "backends/cpu/a.py", "import os\nos.environ['X'] = '1'\n", "os.environ"),
    ("environment", "specs/a.py", "from os import environ, path\n", "os.environ"),
    ("asserts", "runtime/a.py", "def f(x: int) -> None:\n    assert x > 0\n", "runtime/a.py:2"),
    ("module_length", "kernels/numba/a.py", "X = 1\n" * (MAX_LINES + 1), f"{MAX_LINES + 1} lines"),
    ("module_length", "tests/test_a.py", "X = 1\n" * (MAX_LINES + 1), f"{MAX_LINES + 1} lines"),
    ("machine_paths", "README.md", f"\nRun it in {SLASH}home/someone.\n", "README.md:2"),
    ("machine_paths", "tests/a.py", f"P = '{SLASH}tmp/a'\n", "a path of a machine"),
    ("registry_hosts", "constraints.txt", f"-i https://pypi{DOT}org/simple\n", "a registry host"),
]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_this_checkout_keeps_the_rule(check: Check) -> None:
    assert check(ROOT) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_good_tree_passes(check: Check, tmp_path: Path) -> None:
    assert check(write(tmp_path, GOOD)) == []


@pytest.mark.parametrize(("rule", "name", "text", "says"), BAD)
def test_a_bad_tree_is_caught_by_its_rule_alone(rule: str, name: str, text: str, says: str, tmp_path: Path) -> None:
    write(tmp_path, {**GOOD, name: text})
    found = {check.__name__: check(tmp_path) for check in CHECKS}
    assert [says in line for line in found.pop(rule)] == [True]
    assert not any(found.values()), found


def test_no_more_may_be_imported_than_is(tmp_path: Path) -> None:
    assert unused_allowances(ROOT) == []
    write(tmp_path, {"specs/a.py": "import json\n", "kernels/numba/a.py": "import numpy, numba, llvmlite.ir\n"})
    assert [line.partition(",")[0] for line in unused_allowances(tmp_path)] == ["specs: may import numpy"]
    write(tmp_path, {"specs/suite/b.py": "def f() -> None:\n    from numpy import exp\n"})
    assert not [line for line in unused_allowances(tmp_path) if line.startswith("specs:")]


def test_every_rule_has_a_bad_tree() -> None:
    assert {rule for rule, *_ in BAD} == {check.__name__ for check in CHECKS}
