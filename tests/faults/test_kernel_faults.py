"""Faults in the Triton kernels, seeded into their text: some of them here, all by ``forebay faults --backend cuda:interpret``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from forebay.specs.faults.catalogue import faults

BACKEND = "cuda:interpret"
SOME = (
    "triton.block-offset-in-32-bits",
    "triton.contiguous-tokens",
    "triton.invalid-block-skipped",
    "triton.lse-base-two",
    "triton.missing-columns-left-out",
    "triton.table-length-ignored",
    "triton.staging-tail",
)
"""Of clauses whose tests take little: addresses, a stride, zero rows, the LSE, a table's end, a prefix that ends within a block."""


def test_the_suite_catches_faults_in_the_text_of_kernels(tmp_path: Path) -> None:
    assert faults(BACKEND).keys() >= set(SOME)
    command = [sys.executable, "-m", "forebay.runtime.cli", "faults", "--backend", BACKEND, *SOME]
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False, timeout=900)
    bad = [line for line in result.stdout.splitlines() if not line.startswith("killed    ")]
    assert bad == [f"{len(SOME)} faults, {len(SOME)} killed by a test of their clause, 0 not"], result.stderr
    assert result.returncode == 0
