"""The ahead-of-time gate: its table is whole, a sample compiles as the table says, and it notices what it is there for.

Triton interprets in the process of the tests, so the gate runs in processes of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "backends" / "cuda" / "compiled.json"
TARGETS = {"sm_80", "sm_90", "sm_100", "gfx942", "gfx950"}
SAMPLE_SECONDS = 600
"""How long the sample may take on a machine that does much else; by itself it takes less than a tenth."""


def run(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**kept, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        timeout=SAMPLE_SECONDS,
    )


def gate(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(cache, "-m", "forebay.backends.cuda.compile_gate", *arguments)


def changed(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """The path of a copy of the table whose rows ``change`` has changed."""
    held = json.loads(TABLE.read_text(encoding="utf-8"))
    change(held)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(held), encoding="utf-8")
    return str(path)


def test_the_table_holds_every_kernel_on_every_target_without_a_spill() -> None:
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["rows"]
    kernels = {row["kernel"] for row in rows}
    assert {(row["kernel"], row["target"]) for row in rows} == {
        (name, target) for name in kernels for target in TARGETS
    }
    assert [row for row in rows if row["spilled"]] == []
    assert {row["registers"] > 0 for row in rows} == {True}


def test_every_case_is_in_the_table_and_every_kernel_in_a_case(tmp_path: Path) -> None:
    found = gate(tmp_path, "--names")
    rows = len(json.loads(TABLE.read_text(encoding="utf-8"))["rows"])
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{rows} rows on 5 targets, 0 compiled" in found.stdout
    assert found.stdout.rstrip().endswith("0 faults")


def test_one_configuration_of_every_kernel_compiles_for_every_target_as_the_table_says(tmp_path: Path) -> None:
    found = gate(tmp_path, "--sample", "--workers", "2")
    assert found.returncode == 0, found.stdout + found.stderr
    kernels = {row["kernel"] for row in json.loads(TABLE.read_text(encoding="utf-8"))["rows"]}
    assert f"{len(kernels) * len(TARGETS)} compiled: 0 spill" in found.stdout


def test_a_row_that_is_missing_and_one_too_many_are_faults(tmp_path: Path) -> None:
    def change(held: dict[str, Any]) -> None:
        gone = held["rows"].pop(0)
        held["rows"].append({**gone, "configuration": "of no case"})

    found = gate(tmp_path, "--names", "--table", changed(tmp_path, change))
    assert found.returncode == 1, found.stdout + found.stderr
    assert len(re.findall(r"the table has no such row", found.stdout)) == 1
    assert len(re.findall(r"\[of no case\] on \w+: a row of the table that no case makes", found.stdout)) == 1
    assert found.stdout.rstrip().endswith("2 faults")


def test_numbers_that_differ_from_the_table_are_a_fault(tmp_path: Path) -> None:
    only = ("--only", "largest_of_parts_kernel", "--only", "sm_90")

    def change(held: dict[str, Any]) -> None:
        row = next(x for x in held["rows"] if x["kernel"] == only[1] and x["target"] == only[3])
        for what in ("registers", "shared", "warps"):
            row[what] += 1

    found = gate(tmp_path, *only, "--table", changed(tmp_path, change))
    assert found.returncode == 1, found.stdout + found.stderr
    numbers = r"registers \d+ -> \d+, shared \d+ -> \d+, warps \d+ -> \d+;"
    assert re.search(rf"on sm_90: differs from the table: {numbers}", found.stdout), found.stdout
    assert found.stdout.rstrip().endswith("1 faults")


def test_numbers_of_another_version_of_triton_are_not_compared_and_that_is_said(tmp_path: Path) -> None:
    def change(held: dict[str, Any]) -> None:
        held["triton"] = "0.1"
        for row in held["rows"]:
            row["registers"] += 1

    only = ("--only", "largest_of_parts_kernel", "--only", "sm_90")
    found = gate(tmp_path, *only, "--table", changed(tmp_path, change))
    assert found.returncode == 0, found.stdout + found.stderr
    assert "the table is of triton 0.1" in found.stdout


SEEDED = """
import torch
from forebay.backends.cuda.compile_recording import Launch
from forebay.backends.cuda.compile_gate import coverage_faults, kernels_of, measured, result_faults
from forebay.backends.cuda.compile_table import Row
from tests.backends_cuda import seeded_kernels
x = torch.empty(1 << 22, dtype=torch.bfloat16, device="meta")
wide = torch.empty(1 << 22, device="meta")
spills = Launch("seeded", seeded_kernels.spilling_kernel, (1,), (wide, wide), {"steps": 8, "width": 32768, "num_warps": 1})
greedy = Launch("seeded", seeded_kernels.greedy_kernel, (1,), (x, wide), {"rows": 128, "inner": 512, "num_warps": 8})
broken = Launch("seeded", seeded_kernels.greedy_kernel, (1,), (x, wide), {"rows": 100, "inner": 512, "num_warps": 8})
work = {Row("spilling_kernel", "seeded", target): spills for target in ("sm_90", "gfx942")}
work[Row("greedy_kernel", "seeded", "sm_90")] = greedy
work[Row("greedy_kernel", "of 100 rows", "sm_90")] = broken
for fault in (*result_faults(measured(work, 1), None), *coverage_faults(kernels_of([seeded_kernels]), [spills])):
    print(fault)
"""


def test_spills_too_much_shared_memory_and_a_kernel_in_no_case_are_faults(tmp_path: Path) -> None:
    found = run(tmp_path, "-c", SEEDED)
    assert found.returncode == 0, found.stderr
    faults = found.stdout
    for target in ("sm_90", "gfx942"):
        assert re.search(rf"spilling_kernel \[seeded\] on {target}: \d+ bytes a thread are spilled", faults), faults
    assert re.search(
        r"greedy_kernel \[seeded\] on sm_90: takes \d+ bytes of shared memory, a program may have 232448", faults
    ), faults
    assert re.search(r"greedy_kernel \[of 100 rows\] on sm_90: does not compile: ", faults), faults
    assert "greedy_kernel: a kernel in no case" in faults
    assert "spilling_kernel: a kernel in no case" not in faults
    assert "helper: a kernel in no case" not in faults


BATCHES = """
from forebay.backends.cuda.compile_recording import Cases
from forebay.backends.cuda.compile_targets import TARGETS, specialisation
cases = Cases()
for batch in (1, 2, 3, 16, 17, 64):
    for columns in (33, 64, 100, 256):
        cases.decode("bfloat16", 128, 4, batch=batch, columns=columns)
for name in ("decode_kernel", "reduce_kernel"):
    print(name, len({specialisation(x, TARGETS["sm_90"]) for x in cases.recorder.launches if x.name == name}))
"""


def test_batches_and_widths_of_tables_do_not_each_compile_a_decode(tmp_path: Path) -> None:
    found = run(tmp_path, "-c", BATCHES)
    assert found.returncode == 0, found.stderr
    # One for a table whose rows are a multiple of 16 apart, one for others.
    assert found.stdout.split() == ["decode_kernel", "2", "reduce_kernel", "2"]


def test_what_is_no_table_and_no_number_of_processes_is_refused(tmp_path: Path) -> None:
    for arguments, says in (
        (("--names", "--table", str(tmp_path / "none.json")), "got no table of compiled kernels"),
        (("--sample", "--workers", "0"), "got 0, expected at least 1"),
    ):
        found = gate(tmp_path, *arguments)
        assert (found.returncode, found.stdout) == (2, "")
        assert says in found.stderr
        assert "Traceback" not in found.stderr
