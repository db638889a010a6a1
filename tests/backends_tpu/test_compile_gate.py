"""The ahead-of-time gate: its tables are whole and of the present sources, a sample compiles so, and it notices what it is for.

libtpu takes its settings from the environment of a process, so the gate runs in processes of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.backends.tpu.compile_cases import Case
from forebay.backends.tpu.compile_table import Row, digest, rule_faults
from forebay.backends.tpu.compile_targets import Refused, Usage, aliased, libtpu

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "backends" / "tpu" / "compiled.json"
TARGETS = {"v4", "v5e", "v5p", "v6e", "v7x"}
STEP = ("--cases", "tests.backends_tpu.step_cases", "--table", "tests/records/tpu_step.json")
PEERS = ("--cases", "tests.backends_tpu.peer_cases", "--table", "tests/records/tpu_peers.json")
SECONDS = 900
"""How long a sample may take on a machine that does much else; by itself it takes a twentieth."""


def gate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forebay.backends.tpu.compile_gate", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )


def rows(path: Path = TABLE) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return found


def compiler() -> None:
    """What compiles is libtpu, which runs without a TPU; where it is missing these tests fail rather than say nothing."""
    if libtpu() is None:
        pytest.fail("libtpu is not installed, so nothing was compiled for TPUs: pip install libtpu")


def changed(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """The path of a copy of the table that ``change`` has changed."""
    held = json.loads(TABLE.read_text(encoding="utf-8"))
    change(held)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(held), encoding="utf-8")
    return str(path)


def test_the_table_holds_every_operation_on_every_target_and_none_copies_a_pool() -> None:
    found = rows()
    by_case = Counter((row["kernel"], row["configuration"]) for row in found)
    assert {row["kernel"] for row in found} == {"attend", "write", "read", "copy", "stage", "merge", "set_rows"}
    assert {row["target"] for row in found} == TARGETS
    assert set(by_case.values()) == {len(TARGETS)}
    assert [row for row in found if row.get("error") or row["copies"] or row["aliased"] != row["donated"]] == []
    assert {row["kernels"] for row in found if row["kernel"] == "attend"} == {1}


@pytest.mark.parametrize("which", [(), STEP, PEERS], ids=["operations", "step", "peers"])
def test_every_case_is_in_the_table_and_the_table_is_of_these_sources(which: tuple[str, ...]) -> None:
    found = gate("--names", *which)
    assert found.returncode == 0, found.stdout + found.stderr
    count = len(rows(ROOT / which[3])) if which else len(rows())
    assert f"{count} rows on 5 targets, 0 compiled" in found.stdout
    assert found.stdout.rstrip().endswith("0 faults")


def test_the_whole_step_is_one_kernel_a_layer_and_copies_no_pool() -> None:
    found = rows(ROOT / STEP[3])
    assert {row["target"] for row in found} == TARGETS
    assert {row["kernels"] for row in found} == {30}
    assert {row["copies"] for row in found} == {0}
    assert [row for row in found if row["aliased"] != row["donated"] or row["donated"] < 30] == []


def test_one_configuration_of_every_operation_compiles_as_the_table_says() -> None:
    compiler()
    for target in ("v5e", "v7x"):
        found = gate("--sample", "--only", f" on {target}", "--workers", "2")
        assert found.returncode == 0, found.stdout + found.stderr
        assert "7 compiled: 0 refused" in found.stdout


def test_a_row_that_is_missing_one_too_many_and_another_source_are_faults(tmp_path: Path) -> None:
    def change(held: dict[str, Any]) -> None:
        gone = held["rows"].pop(0)
        held["rows"].append({**gone, "configuration": "of no case"})
        held["sources"]["pallas/rows.py"] = "0"

    found = gate("--names", "--table", changed(tmp_path, change))
    assert found.returncode == 1, found.stdout + found.stderr
    assert len(re.findall(r"the table has no such row", found.stdout)) == 1
    assert len(re.findall(r"\[of no case\] on \w+: a row of the table that no case makes", found.stdout)) == 1
    assert "pallas/rows.py: is not what the table was made from" in found.stdout
    assert found.stdout.rstrip().endswith("3 faults")


def test_numbers_that_differ_from_the_table_are_a_fault_but_for_other_versions(tmp_path: Path) -> None:
    compiler()
    only = ("--only", "set_rows", "--only", "[8]", "--only", " on v5e")

    def change(held: dict[str, Any]) -> None:
        for row in held["rows"]:
            if row["kernel"] == "set_rows":
                row["code"] += 1

    found = gate(*only, "--table", changed(tmp_path, change))
    assert found.returncode == 1, found.stdout + found.stderr
    assert re.search(r"on v5e: differs from the table: code \d+ -> \d+;", found.stdout), found.stdout

    def change_versions(held: dict[str, Any]) -> None:
        change(held)
        held["versions"]["libtpu"] = "0.1"

    found = gate(*only, "--table", changed(tmp_path, change_versions))
    assert found.returncode == 0, found.stdout + found.stderr
    assert "no numbers are compared with it" in found.stdout


def test_copies_lost_donations_and_refusals_are_faults(tmp_path: Path) -> None:
    compiler()
    seeded = ("--cases", "tests.backends_tpu.seeded_cases", "--table", str(tmp_path / "seeded.json"))
    found = gate(*seeded, "--write", "--only", " on v5e", "--workers", "1")
    assert found.returncode == 1, found.stdout + found.stderr
    faults = found.stdout
    assert re.search(r"copying \[seeded\] on v5e: holds \d+ bytes of temporaries", faults), faults
    assert re.search(r"copying \[seeded\] on v5e: copies a layer of a pool \d+ times", faults), faults
    assert "copying [seeded] on v5e: consists of 1 Pallas kernels, expected 2" in faults
    assert "kept [seeded] on v5e: takes over 0 of 1 donated arguments" in faults
    assert "refused [seeded] on v5e: does not compile: ValueError: no such thing" in faults


def test_a_row_that_is_not_ours_may_do_as_it_likes() -> None:
    row, ours = Row("a", "b", "v5e"), Case("a", "b", lambda chip: None)
    theirs = Case("a", "b", lambda chip: None, judged=False)
    greedy = Usage(1 << 30, 0, 0, 1, 0, 3, 2, 0, 0)
    assert rule_faults(row, theirs, greedy) == rule_faults(row, theirs, Refused("no")) == []
    assert len(rule_faults(row, ours, greedy)) == 4
    assert len(rule_faults(row, ours, Refused("no"))) == 1


def test_a_digest_is_of_what_a_module_does() -> None:
    text = 'def f(x):\n    """Doc."""\n    return g(x, 1)\n'
    same = "def f(\n    x,\n):\n    # why\n    return g(\n        x,\n        1,\n    )\n"
    assert digest(text) == digest(same)
    assert (
        len({digest(text), digest(text.replace("1", "2")), digest(text.replace("1", "None")), digest(text + "f(1)\n")})
        == 4
    )


def test_aliased_arguments_are_read_from_the_text_of_a_program() -> None:
    pairs = "{ {0}: (0, {}, may-alias), {1}: (7, {}, may-alias) }"
    text = f"HloModule jit_write, input_output_alias={pairs}, entry_computation_layout={{()}}\n"
    assert aliased(text) == [0, 7]
    assert aliased("HloModule jit_read, entry_computation_layout={()}\n") == []


def test_what_is_no_table_no_module_and_no_number_of_processes_is_refused(tmp_path: Path) -> None:
    for arguments, says in (
        (("--names", "--table", str(tmp_path / "none.json")), "got no table of compiled programs"),
        (("--names", "--cases", "tests.no_such_module"), "expected a module with a function cases()"),
        (("--sample", "--workers", "0"), "got 0, expected at least 1"),
        (("--names", "--only", "no such row"), "no row holds no such row"),
    ):
        found = gate(*arguments)
        assert (found.returncode, found.stdout) == (2, "")
        assert says in found.stderr
        assert "Traceback" not in found.stderr
