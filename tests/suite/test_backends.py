"""The shared suite over the backends of this checkout that can run here, as anyone would run it: by name, from a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 900


def judge(name: str, folder: Path, *arguments: str, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the suite over the backend ``name`` where no configuration of this checkout is seen; modules of ``path`` come first."""
    command = [sys.executable, "-m", "pytest", "--pyargs", "forebay.specs.suite", "-q", "-p", "no:cacheprovider"]
    if name:
        command += ["--backend", name]
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith(("FOREBAY_", "PYTEST_"))}
    places = [str(place) for place in path] + surroundings.get("PYTHONPATH", "").split(os.pathsep)
    surroundings["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_a_backend_passes_every_test_and_skips_none(name: str, tmp_path: Path) -> None:
    result = judge(name, tmp_path)
    summary = result.stdout.strip().splitlines()[-1]
    assert result.returncode == 0, result.stdout[-5000:]
    assert "passed" in summary
    bad = {"failed", "skipped", "xfailed", "error"} | ({"deselected"} if name == "sim" else set())
    assert not bad & set(summary.replace(",", " ").split()), summary
    assert f"{name} (full): conformant: " in result.stdout


@pytest.mark.parametrize(("name", "refused"), [("cuda:interpret", 0), ("tpu:interpret", 2), ("tpu:xla", 2)])
def test_a_backend_that_is_interpreted_or_compiles_passes_every_clause_once(
    name: str, refused: int, tmp_path: Path
) -> None:
    """There the whole suite takes too long for every day: ``forebay conform`` runs it. Who takes no foreign memory refuses two."""
    result = judge(name, tmp_path, "--suite-profile", "smoke")
    assert result.returncode == 0, result.stdout[-5000:]
    assert f"{name} (smoke): passed: " in result.stdout
    assert f" 0 fail, {refused} refused, 0 waived, 0 not-run" in result.stdout


def test_a_backend_that_nobody_has_is_named(tmp_path: Path) -> None:
    result = judge("nosuch", tmp_path, "-x", "-k", "test_layers_are_apart")
    assert result.returncode != 0
    assert "no backend 'nosuch' is installed; known backends: " in result.stderr


def test_the_suite_asks_for_the_name_of_a_backend(tmp_path: Path) -> None:
    result = judge("", tmp_path, "-x", "-k", "test_layers_are_apart")
    assert result.returncode != 0
    assert "--backend NAME[:MODE]" in result.stdout + result.stderr
