"""How the tpu backend is found, probed and opened where there is no TPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from forebay.runtime import open_backend
from forebay.specs import BackendUnavailable, InvalidInput


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


def test_a_machine_without_a_tpu_is_told_what_is_missing() -> None:
    with pytest.raises(BackendUnavailable, match=r"needs a TPU|the TPU's runtime"):
        open_backend("tpu")


def test_auto_never_takes_the_host_for_a_tpu() -> None:
    with open_backend("auto") as backend:
        assert backend.name != "tpu"
        passed = {candidate.name: candidate.passed_over for candidate in backend.selection.considered}
    assert "its kind is interpreted" in passed["tpu:interpret"]
    assert "its kind is host" in passed["tpu:xla"]


def test_looking_for_a_tpu_does_not_import_jax() -> None:
    found = python(
        "import sys\nfrom forebay.runtime.plugins import *\nfrom forebay.backends.tpu import plugin\n"
        "plugin.probe(), plugin.probe_host()\nprint('jax' in sys.modules)"
    )
    assert found.stdout.strip() == "False", found.stderr


def test_a_process_that_keeps_jax_from_the_host_is_told_so() -> None:
    found = python(
        "import jax\njax.config.update('jax_platforms', 'cuda')\nfrom forebay.runtime import open_backend\ntry:\n"
        "    open_backend('tpu:xla')\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    assert "BackendUnavailable" in found.stdout, found.stderr
    assert "jax_platforms is 'cuda'" in found.stdout


@pytest.mark.parametrize("index", [-1, True, "0"])
def test_an_index_that_is_none_is_refused_before_jax_looks(index: object) -> None:
    from forebay.backends.tpu.opening import open_device

    with pytest.raises(InvalidInput, match="tpu option device: got"):
        open_device(index)  # type: ignore[arg-type]


def test_opening_a_tpu_where_jax_sees_none_says_so() -> None:
    from forebay.backends.tpu.opening import open_device

    with pytest.raises(BackendUnavailable, match="JAX sees no TPU"):
        open_device(0)
