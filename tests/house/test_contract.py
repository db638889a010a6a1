"""The clause catalogue is whole, typed and cannot change silently."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.specs.clauses import Catalogue, Clause, Tolerance, catalogue, parse, version_key
from forebay.specs.errors import InvalidInput

from .contract_lock import CHANGELOG, LOCK, Change, Line, append, findings, read_changelog, read_lock, rewritten
from .tree import ROOT

GROUPS = {"L": 9, "W": 9, "D": 12, "S": 6, "C": 13, "B": 6, "G": 3}

SMALL = """
version = "0.1"
[nouns]
Buffer = "A cell."
[symbols]
B = "Rows."
[tolerance]
reference = "oracle"
scale = "max |V|"
max_visible = 16
accumulate = "float32"
[tolerance.limit]
float32 = 5e-6
[clause.L1]
title = "One"
subject = "backend"
level = "MUST"
since = "0.1"
refusal = true
text = "It MUST
   hold."
"""
SMALL = SMALL.replace('"It MUST\n   hold."', '"""It MUST\n   hold."""')


def test_the_contract_has_every_clause_in_order() -> None:
    assert list(catalogue().clauses) == [f"{group}{n}" for group, count in GROUPS.items() for n in range(1, count + 1)]


def test_clauses_of_pools_to_come_are_not_in_force_yet() -> None:
    everything, now = catalogue().clauses.values(), catalogue().in_force()
    assert {c.id for c in everything} - {c.id for c in now} == {"L8", "L9", "W7"}
    assert len(catalogue().in_force("0.2")) == len(catalogue().clauses)
    assert catalogue().in_force("0.0") == ()


def test_the_tolerances_are_those_of_d6_and_never_looser() -> None:
    never_above = {"float32": 5e-6, "bfloat16": 8e-3, "float16": 1e-3, "tf32": 1e-3}
    limits = catalogue().tolerances.limit
    assert {name: limits[name] <= bound for name, bound in never_above.items()} == dict.fromkeys(never_above, True)
    text = catalogue().clause("D6").text
    assert f"{catalogue().tolerances.max_visible:,} visible tokens" in text
    for dtype in limits:
        digits, exponent = f"{catalogue().tolerance(dtype):e}".split("e")
        assert re.search(rf"\b{dtype}:? {float(digits):g}e{int(exponent)}\b", text), dtype


@pytest.mark.parametrize("dtype", ["float64", "Float32", ""])
def test_an_unknown_dtype_has_no_tolerance(dtype: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(f"no tolerance for {dtype!r}; it has one for float32, ")):
        catalogue().tolerance(dtype)


def test_an_unknown_clause_names_the_nearest() -> None:
    with pytest.raises(InvalidInput, match=r"no clause 'D66' in contract .*; nearest: D6"):
        catalogue().clause("D66")
    assert catalogue().clause("D3").subject == "backend"


def test_the_catalogue_cannot_be_changed_in_memory() -> None:
    with pytest.raises(TypeError):
        catalogue().clauses["L1"] = catalogue().clauses["L2"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        catalogue().clause("L1").text = "It MAY."  # type: ignore[misc]


def test_versions_are_ordered_as_numbers() -> None:
    assert version_key("0.10") > version_key("0.9") > version_key("0.1.1") > version_key("0.1") == version_key("0.1.0")
    with pytest.raises(InvalidInput, match="expected dotted numbers"):
        version_key("0.1-draft")


def test_a_small_catalogue_is_read_whole() -> None:
    small = parse(SMALL)
    assert small.clauses == {"L1": Clause("L1", "One", "It MUST hold.", "MUST", "backend", "0.1", refusal=True)}
    assert (small.nouns, small.symbols) == ({"Buffer": "A cell."}, {"B": "Rows."})
    assert small.tolerances == Tolerance({"float32": 5e-6}, "oracle", "max |V|", 16, "float32")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[nouns]", "[nouns", "not TOML"),
        ('version = "0.1"', "version = 1", "version is 1; expected a non-empty string"),
        ('version = "0.1"', 'version = "one"', "expected dotted numbers"),
        ("[symbols]", "[symbol]", "unknown key symbol"),
        ("[clause.L1]", "[clause.Z1]", "clause Z1: an id is a group letter"),
        ("[clause.L1]", "[clause.L01]", "clause L01: an id is a group letter"),
        ("[clause.L1]", "[clause]\n[other]", "unknown key other"),
        ('title = "One"\n', "", "clause L1: title is missing"),
        ('title = "One"', 'title = " "', "clause L1: title is ' '"),
        ('title = "One"', 'title = "One"\nnote = "x"', "clause L1: unknown key note"),
        ('"backend"', '"device"', "expected one of backend, runtime, both"),
        ('level = "MUST"', 'level = "MAY"', "expected one of MUST, SHOULD"),
        ('level = "MUST"', 'level = "SHOULD"', "its level is SHOULD, but the text has no SHOULD"),
        ('since = "0.1"', 'since = "x"', "expected dotted numbers"),
        ("refusal = true", 'refusal = "yes"', "refusal = 'yes'; expected true or false"),
        ("float32 = 5e-6", 'float32 = "5e-6"', "expected a positive finite float"),
        ("float32 = 5e-6", "float32 = nan", "expected a positive finite float"),
        ("float32 = 5e-6", "float32 = -1.0", "expected a positive finite float"),
        ("float32 = 5e-6", "", "has no float32; it has nothing"),
        ("max_visible = 16", "max_visible = true", "expected a positive integer"),
        ("[tolerance.limit]\nfloat32", "limit", "limit is 5e-06; expected a table"),
    ],
)
def test_a_malformed_catalogue_is_refused_by_name(old: str, new: str, says: str) -> None:
    assert SMALL.count(old) >= 1
    with pytest.raises(InvalidInput, match=re.escape(says)):
        parse(SMALL.replace(old, new))


def test_a_catalogue_without_clauses_is_refused() -> None:
    with pytest.raises(InvalidInput, match="it has no clause"):
        parse(SMALL.partition("[clause.L1]")[0] + "[clause]\n")


def recorded() -> tuple[Catalogue, list[Line], list[Change]]:
    lock = read_lock((ROOT / LOCK).read_text(encoding="utf-8"))
    return catalogue(), lock, read_changelog((ROOT / CHANGELOG).read_text(encoding="utf-8"))


def changed(contract: Catalogue, clause_id: str, **fields: object) -> Catalogue:
    clause = dataclasses.replace(contract.clause(clause_id), **fields)  # type: ignore[arg-type]
    return dataclasses.replace(contract, clauses={**contract.clauses, clause_id: clause})


def test_every_change_of_the_contract_is_announced_and_locked() -> None:
    assert findings(*recorded()) == []


@pytest.mark.parametrize("fields", [{"text": "It MUST."}, {"level": "SHOULD"}, {"refusal": False}, {"since": "9"}])
def test_a_silent_change_of_a_clause_is_caught(fields: dict[str, object]) -> None:
    contract, lock, announced = recorded()
    found = findings(changed(contract, "C5", **fields), lock, announced)
    assert [line.startswith("C5: changed without a record") for line in found] == [True]


def test_a_silent_change_of_a_tolerance_is_caught() -> None:
    contract, lock, announced = recorded()
    looser = dataclasses.replace(contract.tolerances, limit={**contract.tolerances.limit, "float32": 5e-5})
    found = findings(dataclasses.replace(contract, tolerances=looser), lock, announced)
    assert [line.startswith("tolerance: changed without a record") for line in found] == [True]


def test_a_dropped_or_new_clause_is_caught() -> None:
    contract, lock, announced = recorded()
    clauses = {**contract.clauses, "G4": contract.clause("G3")}
    del clauses["D6"]
    found = findings(dataclasses.replace(contract, clauses=clauses), lock, announced)
    assert [line.partition(":")[0] for line in found] == ["D6", "G4"]


def test_an_announced_change_is_appended_and_then_holds() -> None:
    contract, lock, announced = recorded()
    contract = changed(contract, "C8", text="Re-warming MUST be bounded by three attempts.")
    announced = [*announced, *read_changelog("## 0.1\n- sharpened C8: three attempts were enough everywhere\n")]
    assert len(findings(contract, lock, announced)) == 2
    new = append(contract, lock, announced)
    assert new[: len(lock)] == lock
    assert findings(contract, new, announced) == []


def test_a_locked_change_that_nobody_announced_is_caught() -> None:
    contract, lock, announced = recorded()
    loosened = changed(contract, "D8", text="It MUST.")
    line = Line(Change("D8", "0.1", "loosened"), loosened.clause("D8").digest)
    assert [f"{line.change}: locked, but not announced" in f for f in findings(loosened, [*lock, line], announced)] == [
        True
    ]


def test_an_id_is_not_used_again_after_it_was_dropped() -> None:
    contract, lock, announced = recorded()
    dropped, added = Change("D8", "0.1", "dropped"), Change("D8", "0.1", "added")
    again = [Line(dropped, "-"), Line(added, contract.clause("D8").digest)]
    found = findings(contract, [*lock, *again], [*announced, dropped, added])
    assert [line.startswith("D8 0.1 added") for line in found] == [True]


@pytest.mark.parametrize("row", ["- loosened D6 because", "- changed D6: a long reason", "- dropped D6: short"])
def test_a_changelog_line_that_announces_nothing_is_refused(row: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{CHANGELOG}:2: {row!r}")):
        read_changelog(f"## 0.1\n{row}\n")


def test_a_malformed_lock_line_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape(f"{LOCK}:1: 'D6 0.1 0123'")):
        read_lock("D6 0.1 0123\n")


def test_the_lock_was_only_appended_to() -> None:
    assert rewritten(ROOT) == []


def test_a_rewritten_lock_is_caught(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    lock = tmp_path / LOCK
    lock.parent.mkdir(parents=True)
    git("init")
    for text in ("L1 0.1 added 01\n", "L1 0.1 added 01\nL2 0.1 added 02\n"):
        lock.write_text(text, encoding="utf-8")
        git("add", "-A")
        git("commit", "-m", "Record")
    assert rewritten(tmp_path) == []
    lock.write_text("L1 0.1 added 01\nL2 0.1 added 03\n", encoding="utf-8")
    assert len(rewritten(tmp_path)) == 1


@pytest.mark.parametrize(
    ("marker", "passes"),
    [("clause('D3', 'L1')", True), ("clause('D99')", False), ("clause()", False), ("clause(id='D3')", False)],
)
def test_a_test_can_only_claim_clauses_that_exist(marker: str, passes: bool, tmp_path: Path) -> None:
    (tmp_path / "test_claim.py").write_text(f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c"]
    command += [str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode == 0) == passes
    assert ("expected clause ids, all of them known" in run.stdout + run.stderr) != passes
