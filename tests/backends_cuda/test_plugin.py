"""How the cuda backend is found, probed and opened where there is no device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from forebay.runtime import open_backend
from forebay.specs import BackendUnavailable


def python(code: str, **surroundings: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **surroundings},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_machine_without_a_device_is_told_what_is_missing() -> None:
    with pytest.raises(
        BackendUnavailable,
        match=r"a build of torch for CUDA or ROCm|the driver's library|a device that the driver sees",
    ):
        open_backend("cuda")


def test_auto_never_takes_the_interpreter() -> None:
    with open_backend("auto") as backend:
        assert backend.name != "cuda"
        passed = {candidate.name: candidate.passed_over for candidate in backend.selection.considered}
    assert "its kind is interpreted" in passed["cuda:interpret"]


def test_looking_for_a_device_imports_neither_torch_nor_triton() -> None:
    found = python(
        "import sys\nfrom forebay.runtime.plugins import *\nfrom forebay.backends.cuda import plugin\nplugin.probe()\n"
        "print([name for name in ('torch', 'triton') if name in sys.modules])"
    )
    assert found.stdout.strip() == "[]", found.stderr


def test_a_process_that_compiles_triton_does_not_interpret_it_as_well() -> None:
    found = python(
        "import triton\nfrom forebay.runtime import open_backend\ntry:\n    open_backend('cuda:interpret')\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
    )
    assert "BackendUnavailable" in found.stdout, found.stderr
    assert "before TRITON_INTERPRET=1 was set" in found.stdout


def test_a_process_that_interprets_triton_does_not_open_a_device() -> None:
    found = python(
        "from forebay.backends.cuda.opening import open_device\ntry:\n    open_device(0)\n"
        "except Exception as error:\n    print(type(error).__name__, error)",
        TRITON_INTERPRET="1",
    )
    assert "BackendUnavailable cuda: this process interprets Triton" in found.stdout, found.stderr
