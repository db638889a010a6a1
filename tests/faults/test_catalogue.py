"""The seeded faults as data: each applies to the code as it is, and each MUST clause has one."""

from __future__ import annotations

import hashlib
import re

import pytest

from forebay.specs.errors import InvalidInput
from forebay.specs.faults.catalogue import Fault, Patch, every_fault, faults, parse, select, without_fault
from forebay.specs.faults.seeding import check_applies

GOOD = """
[one]
clause = "D3"
title = "A mistake."
[[one.patch]]
module = "forebay.specs.slots"
old = "a"
new = "b"
"""

CONSTANT = re.compile(r"""[bfr]*(?:"[^"\n]*"|'[^'\n]*')|\b\d[\w.]*|\b(?:True|False|None)\b|\b[A-Z][A-Z0-9_]+\b""")
"""A text, a number, or the name of a constant."""
GUARD = """
[[one.guard]]
module = "forebay.specs.pool"
old = "c"
new = "d"
"""


@pytest.mark.parametrize("name", every_fault())
def test_every_fault_applies_and_compiles(name: str) -> None:
    check_applies(every_fault()[name])


def kind(fault: Fault) -> frozenset[tuple[str, str, str]]:
    """What its patches do, whatever texts, numbers and named constants are in them."""
    return frozenset((p.module, CONSTANT.sub("0", p.old), CONSTANT.sub("0", p.new)) for p in fault.patches)


def test_there_are_enough_unlike_faults() -> None:
    """Variants that differ in a constant count once, and so does a pair."""
    patches = [fault.patches for fault in faults().values()]
    assert len(patches) == len(set(patches))
    kinds = {kind(fault) for fault in faults().values() if not fault.pair_of}
    assert len(kinds) >= 80
    stale = [kind(faults()[f"boundary.stale-{name}"]) for name in ("token", "position", "visible", "limit", "seed")]
    assert len(set(stale)) == 1


@pytest.mark.parametrize(
    ("old", "new", "like"),
    [
        ('for name in ("a", f"{x}"):', "for name in ('b', \"\"):", True),
        ("x[1:] + 0x1F * 2.5e3", "x[2:] + 16 * 7", True),
        ("if IDLE is None:", "if ROOT is True:", True),
        ("x1 + 1", "x2 + 1", False),
        ("x + 1", "x - 1", False),
        ("len(x)", "len(y)", False),
        ("WriteLoc(0)", "BlockTable(0)", False),
    ],
)
def test_kinds_of_faults_leave_constants_out_and_nothing_else(old: str, new: str, like: bool) -> None:
    one, other = (Fault("x.y", "D3", "t", (Patch("forebay.specs.slots", "pass", text),)) for text in (old, new))
    assert (kind(one) == kind(other)) is like
    elsewhere = Fault("x.y", "D3", "t", (Patch("forebay.specs.pool", "pass", old),))
    assert kind(elsewhere) != kind(one)


def test_every_clause_in_force_has_a_fault() -> None:
    assert without_fault() == ()


def test_a_patch_that_no_longer_applies_says_so() -> None:
    for source in ("nothing of it", "a a"):
        with pytest.raises(InvalidInput, match="no longer applies"):
            Patch("forebay.specs.slots", "a", "b").apply(source)
    assert Patch("forebay.specs.slots", "a", "b").apply("xay") == "xby"
    missing = Fault("x.y", "D3", "t", (Patch("forebay.specs.nosuch", "a", "b"),))
    with pytest.raises(InvalidInput, match="no such module"):
        check_applies(missing)
    broken = Fault("x.y", "D3", "t", (Patch("forebay.specs.slots", "def lower_paged(", "def lower_paged(("),))
    with pytest.raises(InvalidInput, match="does not compile"):
        check_applies(broken)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[one]", "[one", "not TOML"),
        ('clause = "D3"\n', "", "expected clause, title"),
        ('clause = "D3"', 'clause = "D99"', "no clause 'D99'"),
        ('title = "A mistake."', 'title = " "', "title is ' '"),
        ('title = "A mistake."', 'title = "A mistake."\nlevel = 1', "nothing else"),
        ('new = "b"', 'new = "a"', "by another"),
        ('old = "a"', 'old = ""', "by another"),
        ('new = "b"', "", "module, old and new"),
        ("[[one.patch]]", "[one.patch]", "no \\[\\[patch\\]\\]"),
        ('clause = "D3"', 'clause = "D3"\ncounter = "two words"', "counter is 'two words'"),
        ('clause = "D3"', 'clause = "D3"\ncounter = ""', "counter is ''"),
        ('clause = "D3"', 'clause = "D3"\nraises = "two words"', "raises is 'two words'"),
        ('clause = "D3"', 'clause = "D3"\ncounter = "run"\nraises = "KeyError"', "a fault without a counter"),
        ("[[one.patch]]", GUARD + "[[one.patch]]", "no counter that shows"),
        ("[one]", "backend = 3\n[one]", "backend is 3"),
        ("[one]", 'backend = "two words"\n[one]', "backend is 'two words'"),
    ],
)
def test_malformed_faults_are_refused(old: str, new: str, says: str) -> None:
    assert [fault.id for fault in parse("area", GOOD)] == ["area.one"]
    with pytest.raises(InvalidInput, match=says):
        parse("area", GOOD.replace(old, new, 1))


def test_faults_are_of_the_backend_their_file_names() -> None:
    """Of sim where it names none; the backend is part of a fault's digest, which is what it was for those of sim."""
    (plain,), (other,) = parse("area", GOOD), parse("area", 'backend = "cuda:interpret"\n' + GOOD)
    assert (plain.backend, other.backend) == ("sim", "cuda:interpret")
    assert plain.digest == hashlib.sha256(repr(plain).encode()).hexdigest() != other.digest
    (named,) = parse("area", GOOD.replace("[one", "[backend").replace("[[one", "[[backend"))
    assert (named.id, named.backend) == ("area.backend", "sim")
    assert {fault.backend for fault in every_fault().values()} == {"sim", "cuda:interpret"}
    kernels = select([], "cuda:interpret")
    assert [fault.id for fault in kernels] == list(faults("cuda:interpret"))
    assert len({kind(fault) for fault in kernels}) >= 50
    with pytest.raises(InvalidInput, match=r"no fault layout of cuda:interpret; .* an area: triton"):
        select(["layout"], "cuda:interpret")
    with pytest.raises(InvalidInput, match="no fault is judged on cpu; expected one of sim, cuda:interpret"):
        select([], "cpu")


def test_faults_are_selected_by_id() -> None:
    names = list(faults())[:2]
    assert [fault.id for fault in select(names)] == names
    assert [fault.id for fault in select([*names, names[0]])] == names, "one that is named twice is seeded once"
    assert len(select([])) == len(faults())
    area = [fault.id for fault in select([]) if fault.id.startswith("layout.")]
    assert [fault.id for fault in select(["layout"])] == area
    assert len(area) > 1
    assert {fault.id for fault in select([names[0], "layout"])} == {names[0], *area}
    with pytest.raises(InvalidInput, match=r"no fault nosuch of sim; expected AREA\.NAME .*, or an area: .*layout"):
        select([names[0], "nosuch"])


def test_a_fault_that_a_guard_absorbs_makes_a_pair() -> None:
    """The one is caught by its counter alone, the other by anything else."""
    one, pair = parse("area", GOOD.replace('"D3"', '"D3"\ncounter = "launches[gather]"') + GUARD)
    assert (one.id, one.pair_of, pair.id, pair.pair_of) == ("area.one", "", "area.one-unguarded", "area.one")
    assert one.patches == pair.patches[:1]
    assert pair.patches[1:] == (Patch("forebay.specs.pool", "c", "d"),)
    by_counter, by_part, by_values = ["b", "gather", "launches"], ["gather"], ["got"]
    for about, ones, pairs in (
        (by_counter, True, False),
        (by_part, False, True),
        (by_values, False, True),
        ([], False, False),
    ):
        fell = ["AssertionError", *about]
        assert one.is_killed_by(["D3", "C1"], fell) is ones
        assert pair.is_killed_by(["D3", "C1"], fell) is pairs
        assert not one.is_killed_by(["C1"], fell)
        assert not pair.is_killed_by(["C1"], fell)


def test_a_crash_catches_a_fault_only_where_the_fault_says_so() -> None:
    """A fault that merely crashes is not the mistake of its title."""
    (fault,) = parse("area", GOOD)
    (crashing,) = parse("area", GOOD.replace('"D3"', '"D3"\nraises = "IndexError"'))
    for by, caught in (("AssertionError", True), ("Failed", True), ("IndexError", False), ("ColdCapture", False)):
        assert fault.is_killed_by(["D3"], [by]) is caught
        assert crashing.is_killed_by(["D3"], [by]) is (caught or by == "IndexError")


def test_every_fault_with_a_guard_has_its_pair() -> None:
    pairs = [fault for fault in faults().values() if fault.pair_of]
    assert len(pairs) >= 10
    for pair in pairs:
        guarded = faults()[pair.pair_of]
        assert (guarded.clause, guarded.counter, guarded.pair_of) == (pair.clause, pair.counter, "")
        assert set(guarded.patches) < set(pair.patches)
