"""What CI has no time for, and its records: ``python -m tests.full`` runs all of it, ``python -m tests.full NAME...`` some.

Each run is a command of its own. Its record, ``tests/records/NAME.json``, says the command, whether it passed, how long it took, the
last lines it printed, and which code and versions it ran.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
RECORDS: Final = ROOT / "tests" / "records"
PACKAGES: Final = (
    "forebay",
    "gguf",
    "hypothesis",
    "jax",
    "numba",
    "numpy",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
)
CODE: Final = ("specs", "runtime", "backends", "kernels", "tests")
KEPT_LINES: Final = 100

CONFORM: Final = "tests/records/conform"
"""Folder of the conformance records and statements, by name of a backend."""


def _kept(backend: str) -> tuple[str, ...]:
    return "--record", f"{CONFORM}/{backend}.json", "--statement", f"{CONFORM}/{backend}.md"


RUNS: Final = {
    "conform_cpu": ("forebay.runtime.cli", "conform", "cpu", *_kept("cpu")),
    "conform_cuda_interpret": ("forebay.runtime.cli", "conform", "cuda:interpret", *_kept("cuda_interpret")),
    "conform_sim": ("forebay.runtime.cli", "conform", "sim", *_kept("sim")),
    "families": ("tests.families.full",),
    "faults": ("forebay.runtime.cli", "faults", "--full", "--matrix", "specs/faults"),
    "model_files": ("tests.models.fuzz_model_files", "--count", "10010"),
    "pallas_mutants": ("tests.kernels_pallas.full",),
    "state_machine": ("tests.runtime.state_machine", "--steps", "1000000"),
}
"""Name of a record: the module and its arguments."""


def code_digest() -> str:
    """SHA-256 over names and contents of every Python and TOML file of the code and its tests."""
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".toml"):
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def record(name: str) -> dict[str, Any]:
    """Run one of :data:`RUNS`, show what it prints, and return its record."""
    module, *arguments = RUNS[name]
    code, started, lines = code_digest(), time.monotonic(), deque[str](maxlen=KEPT_LINES)
    (ROOT / CONFORM).mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as cold,  # kernels are compiled anew, as on a machine that never ran them
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, "NUMBA_CACHE_DIR": cold},
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    return {
        "command": " ".join(["python", "-m", module, *arguments]),
        "passed": process.returncode == 0,
        "seconds": round(time.monotonic() - started),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "code_sha256": code,
        "versions": {"python": sys.version.split()[0]} | {package: version(package) for package in PACKAGES},
        "output": list(lines),
    }


def main() -> int:
    """Run what is asked for; the exit status is 0 if all of it passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}; none for all")
    names = parser.parse_args().names or list(RUNS)
    for name in names:
        if name not in RUNS:
            parser.error(f"{name!r} is none of {', '.join(RUNS)}")
    failed = 0
    for name in names:
        made = record(name)
        RECORDS.mkdir(exist_ok=True)
        (RECORDS / f"{name}.json").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        failed += not made["passed"]
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
