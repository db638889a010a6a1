"""The program itself: its version, its help, how fast it starts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.running import ROOT, Run


def test_version_and_help(run: Run) -> None:
    assert run("--version").out == f"forebay {version('forebay')}\n"
    for arguments in ((), ("--help",)):
        shown = run(*arguments)
        assert shown.code == 0
        for command in ("generate", "backends", "doctor", "model"):
            assert f"\n  {command} " in shown.out
    for path in ("generate", "backends", "doctor", "model", "model fetch", "model list"):
        assert run(*path.split(), "--help").out.startswith(f"Usage: forebay {path} ")


def test_the_installed_script_runs() -> None:
    script = Path(sys.executable).with_name("forebay")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"forebay {version('forebay')}\n"


LIGHT = """
import json, sys
from forebay.runtime.cli.app import main
code = main(sys.argv[1:])
vendor = {"torch", "triton", "jax", "jaxlib", "numba", "llvmlite", "ttnn", "ttl", "transformers", "gguf"}
print(json.dumps([code, sorted(vendor & set(sys.modules))]), file=sys.stderr)
"""


@pytest.mark.clause("B1")
@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("backends",), ("model", "list"), ("generate", "--help")]
)
def test_light_commands_import_no_vendor_library_and_start_fast(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", LIGHT, *arguments]
    environ = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, check=True)
        seconds.append(time.perf_counter() - start)
        assert json.loads(done.stderr) == [0, []]
    assert min(seconds) < 2.0, "0.2 to 0.4 s on a quiet machine; a vendor library would add seconds"
