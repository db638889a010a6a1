"""The verifier: records of every ending are valid, and whatever is edited in one is named, even where the digest was made anew."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.runtime.settings import isolated_environment
from forebay.specs.suite import verifier
from forebay.specs.suite.command import suite_arguments
from forebay.specs.suite.verifier import Asked, Installed, faults_of
from forebay.specs.suite.verifier.installed import collect
from tests.cli.running import Outcome, assert_one_line, run_process
from tests.suite.conftest import Records
from tests.suite.edits import Record, of
from tests.suite.mutations import MUTATIONS, Mutation

IMPORTS = [Path(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
"""Where this process finds what it tests, for the processes it starts."""
SIM = Installed("simulated", "forebay", version("forebay"))
FREE = ("info", "launches", "delegated", "errors", "tolerances")
"""Objects whose keys are whatever a backend or a test names."""
MANY = """
import functools, json, sys, tempfile, traceback
from pathlib import Path

from forebay.runtime.cli.conform import installed
from forebay.specs.suite.command import suite_arguments
from forebay.runtime.settings import isolated_environment
from forebay.specs.suite.verifier import faults_of
from forebay.specs.suite.verifier.installed import collect

folder = Path(tempfile.mkdtemp())


@functools.cache
def collected(requested, profile):
    try:
        command = [sys.executable, "-m", "pytest", *suite_arguments(folder)]
        return collect(requested, profile, command, isolated_environment(folder))
    except ValueError as error:
        return str(error)


def asked(requested, profile):
    found = collected(requested, profile)
    if isinstance(found, str):
        raise ValueError(found)
    return found


kind = functools.cache(installed)
said = {}
for path in Path(sys.argv[1]).iterdir():
    try:
        said[path.name] = faults_of(path, asked, kind)
    except BaseException:
        said[path.name] = [traceback.format_exc()]
print(json.dumps(said))
"""


def signed(record: Record) -> bytes:
    """A record with the digest of its content, as a forger makes it."""
    content = {key: value for key, value in record.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "digest": hashlib.sha256(text.encode()).hexdigest()}, indent=1).encode()


def edited(record: Record, edit: Callable[[Record], object]) -> Record:
    copy = deepcopy(record)
    edit(copy)
    return copy


# -- files that are no record ----------------------------------------------------------------------------------------------


def text_of(record: Record) -> str:
    return json.dumps(record)


FILES: dict[str, tuple[Callable[[Record], bytes], str]] = {
    "empty": (lambda r: b"", "not JSON: an empty file"),
    "blank": (lambda r: b" \n", "not JSON: an empty file"),
    "not JSON": (lambda r: b"conformant: yes\n", "not JSON: "),
    "truncated": (lambda r: text_of(r)[: len(text_of(r)) // 2].encode(), "not JSON: "),
    "more after its end": (lambda r: f"{text_of(r)}{text_of(r)}".encode(), "not JSON: Extra data"),
    "UTF-16": (lambda r: text_of(r).encode("utf-16"), "not UTF-8 text"),
    "Latin-1": (lambda r: text_of(r).replace("limited", "limité", 1).encode("latin-1"), "not UTF-8 text"),
    "a byte order mark": (lambda r: text_of(r).encode("utf-8-sig"), "not JSON: Unexpected UTF-8 BOM"),
    "a list": (lambda r: f"[{text_of(r)}]".encode(), "expected an object"),
    "null": (lambda r: b"null", "record: null, expected an object"),
    "a duplicate key": (
        lambda r: text_of(r).replace('"verdict":', '"verdict": "failed", "verdict":', 1).encode(),
        "duplicate key 'verdict'",
    ),
    "a duplicate key of a result": (
        lambda r: text_of(r).replace('"outcome":', '"outcome": "fail", "outcome":', 1).encode(),
        "duplicate key 'outcome'",
    ),
    "NaN": (
        lambda r: signed(edited(r, lambda c: of(c, "test_every.py::test_stage").update(seconds=float("nan")))),
        "NaN",
    ),
    "NaN as an error": (
        lambda r: signed(
            edited(r, lambda c: of(c, "test_every.py::test_stage")["errors"].update(float32=[float("nan"), 5e-6]))
        ),
        "NaN is no JSON number",
    ),
    "infinite by its exponent": (
        lambda r: text_of(r).replace('"total": ', '"total": 1e999, "x": ').encode(),
        "1e999 is no JSON number",
    ),
    "endless digits": (lambda r: b'{"format": ' + b"1" * 5000 + b"}", "an integer of 5000 digits"),
    "deep lists": (lambda r: b"[" * 100_000 + b"]" * 100_000, "nested more than 32 levels"),
    "deep free form": (
        lambda r: signed(edited(r, lambda c: c["backend"]["info"].update(more=json.loads("[" * 60 + "]" * 60)))),
        "nested more than 32 levels",
    ),
}


# -- every key -------------------------------------------------------------------------------------------------------------


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths to everything in a record that has a form, the record itself left out."""
    if path:
        yield path
    if isinstance(value, dict) and path[-1:] != ("info",):
        for key, child in value.items():
            yield from places(child, (*path, key))
    if isinstance(value, list):
        for number, child in enumerate(value):
            yield from places(child, (*path, number))


def distinct(record: Record) -> list[tuple[str | int, ...]]:
    """One place of each kind: the first of those that differ in list positions and test alone and hold a value of the same type."""
    found: dict[tuple[Any, ...], tuple[str | int, ...]] = {}
    for path in places(record):
        kind = (*("*" if isinstance(key, int) else key for key in path), type(at(record, path)))
        found.setdefault(kind, path)
    return list(found.values())


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def of_other_type(record: Record) -> dict[str, Record]:
    """Records in which one value is of another JSON type, one key is missing, or one is unknown."""
    made: dict[str, Record] = {}
    for path in distinct({key: value for key, value in record.items() if key != "digest"}):
        where, old = "/".join(map(str, path)), at(record, path)
        others: tuple[Any, ...] = (None, True, -7, 0.5, "?", [], {})
        for new in others:
            if type(new) is not type(old) and not (isinstance(old, (int, float)) and isinstance(new, float)):
                copy = deepcopy(record)
                at(copy, path[:-1])[path[-1]] = new
                made[f"{where} = {new!r}"] = copy
        if isinstance(path[-1], str) and (len(path) < 2 or path[-2] not in FREE):
            copy = deepcopy(record)
            del at(copy, path[:-1])[path[-1]]
            made[f"{where} dropped"] = copy
        if isinstance(old, dict) and path[-1] not in FREE:
            copy = deepcopy(record)
            at(copy, path)["unknown"] = 1
            made[f"{where} with more"] = copy
    return made


@pytest.fixture(scope="module")
def said(records: Records, elsewhere: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the verifier says of every file below, by name, all of it in one process over the small suite."""
    folder = tmp_path_factory.mktemp("edited")
    files = {f"{name} untouched": json.dumps(record).encode() for name, record in records.record.items()}
    for mutation in MUTATIONS:
        changed = edited(records.record[mutation.of], mutation.edit)
        files[f"{mutation.name}, signed"] = signed(changed)
        files[f"{mutation.name}, unsigned"] = json.dumps(changed).encode()
    good = records.record["good"]
    files |= {f"file: {name}": make(good) for name, (make, _) in FILES.items()}
    names = dict(enumerate(of_other_type(good).items()))
    files |= {f"type {number}": signed(record) for number, (_, record) in names.items()}
    for name, data in files.items():
        (folder / name.replace("/", "|")).write_bytes(data)
    done = records.small.python(MANY, str(folder), path=elsewhere)
    assert done.code == 0, done.err
    found: dict[str, list[str]] = json.loads(done.out)
    assert len(found) == len(files)
    return found | {f"type: {name}": found[f"type {number}"] for number, (name, _) in names.items()}


@pytest.mark.clause("G2")
def test_records_of_every_ending_are_valid(records: Records, said: dict[str, list[str]]) -> None:
    """A record of a failed, a crashed or an unstarted run says what happened, and is as valid as that of a good one."""
    verdicts = {name: record["verdict"] for name, record in records.record.items()}
    assert verdicts == {
        "good": "conformant with waivers",
        "smoke": "passed",
        "bad": "failed",
        "crashed": "failed",
        "away": "failed",
    }
    assert {name: said[f"{name} untouched"] for name in verdicts} == {name: [] for name in verdicts}
    outcomes = {result["outcome"] for record in records.record.values() for result in record["results"]}
    assert outcomes == {"pass", "fail", "refused", "waived", "not-run"}


@pytest.mark.refuses("G2")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_was_edited_is_named_by_whoever_makes_the_digest_anew(
    mutation: Mutation, said: dict[str, list[str]]
) -> None:
    faults = said[f"{mutation.name}, signed"]
    assert any(mutation.says in fault for fault in faults), faults
    assert not any("Traceback" in fault or "its digest" in fault for fault in faults), faults


@pytest.mark.refuses("G2")
def test_what_was_edited_without_a_new_digest_is_called_so(said: dict[str, list[str]]) -> None:
    for mutation in MUTATIONS:
        faults = said[f"{mutation.name}, unsigned"]
        assert any("edited: its digest" in fault for fault in faults) or any(mutation.says in f for f in faults), (
            mutation
        )


@pytest.mark.refuses("G2")
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_record_is_named_for_what_it_is(name: str, said: dict[str, list[str]]) -> None:
    (fault,) = said[f"file: {name}"]
    assert FILES[name][1] in fault


@pytest.mark.refuses("G2")
def test_every_key_is_needed_and_every_value_has_its_type(records: Records, said: dict[str, list[str]]) -> None:
    names = of_other_type(records.record["good"])
    assert len(names) > 400
    accepted = [name for name in names if not said[f"type: {name}"]]
    assert accepted == []
    broken = [name for name in names if any("Traceback" in fault for fault in said[f"type: {name}"])]
    assert broken == []


# -- the real suite --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Real:
    """A record of a run of the real suite, its bytes, and what that suite asks."""

    folder: Path
    data: bytes
    record: Record
    asked: Asked

    def faults(self, data: bytes) -> list[str]:
        (self.folder / "edited.json").write_bytes(data)
        return faults_of(self.folder / "edited.json", lambda requested, profile: self.asked, lambda name, mode: SIM)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    """The smoke profile over sim."""
    folder = tmp_path_factory.mktemp("real")
    done = run_process("conform", "sim", "--profile", "smoke", "--record", "record.json", cwd=folder, path=IMPORTS)
    assert done.code == 0, done.out + done.err
    data = (folder / "record.json").read_bytes()
    command = [sys.executable, "-m", "pytest", *suite_arguments(folder)]
    asked = collect("sim", "smoke", command, isolated_environment(folder))
    return Real(folder, data, json.loads(data), asked)


def test_a_record_of_the_real_suite_is_valid_and_names_no_machine(real: Real) -> None:
    assert real.faults(real.data) == []
    assert signed(real.record) == real.data.rstrip()
    assert real.record["complete"]
    assert str(Path.home()) not in real.data.decode()
    assert str(real.folder) not in real.data.decode()
    assert str(Path(verifier.__file__).parents[2]) not in real.data.decode()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.refuses("G2")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_nothing_in_a_record_breaks_the_verifier(real: Real, data: st.DataObject) -> None:
    """Whatever stands anywhere: an edit without a new digest is found, one with it is judged, and neither raises."""
    path = data.draw(st.sampled_from(list(places(real.record))))
    new = data.draw(JSON)
    changed = deepcopy(real.record)
    at(changed, path[:-1])[path[-1]] = new
    if json.dumps(changed) != json.dumps(real.record):
        assert real.faults(json.dumps(changed).encode())
    for fault in real.faults(signed(changed)):
        assert fault.isprintable()


@pytest.mark.refuses("G2")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_cut_and_no_flipped_byte_is_missed(real: Real, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(real.data) - 2))
    assert real.faults(real.data[:place])
    flipped = bytearray(real.data)
    flipped[place] ^= data.draw(st.integers(1, 255))
    try:
        unchanged = json.loads(flipped) == real.record
    except ValueError:
        unchanged = False
    assert bool(real.faults(bytes(flipped))) is not unchanged


def test_texts_of_a_record_cannot_write_over_what_is_printed(real: Real) -> None:
    forged = edited(
        real.record, lambda r: r["results"][0].update(test="test_a.py::x\x1b[2K\rrecord.json: valid\n\ud800")
    )
    faults = real.faults(signed(forged))
    assert any(r"x\x1b[2K\rrecord.json: valid\n\ud800" in fault for fault in faults)
    assert all(fault.isprintable() for fault in faults)


def test_the_command_says_valid_or_what_is_wrong(real: Real) -> None:
    """Exit code 0 of a valid record, 1 of one that is not, 2 where there is none."""

    def verify(name: str) -> Outcome:
        return run_process("conform", "--verify", name, cwd=real.folder, path=IMPORTS)

    assert verify("record.json") == (0, "record.json: valid\n", "")
    forged = edited(real.record, lambda r: [result.update(outcome="refused") for result in r["results"]])
    (real.folder / "forged.json").write_bytes(signed(forged))
    said = verify("forged.json")
    *faults, more, last = said.out.splitlines()
    assert (said.code, said.err, len(faults)) == (1, "", 20)
    assert "refused without a declared capability" in faults[1]
    assert re.fullmatch(r"forged.json: and \d+ more", more)
    assert last == "forged.json: not a valid record"
    assert_one_line(verify("none.json"), "conform --verify none.json: ", "No such file")
    assert_one_line(verify("."), "conform --verify .: ", "Is a directory")


# -- separate code ---------------------------------------------------------------------------------------------------------


def test_the_verifier_shares_no_code_with_what_it_checks() -> None:
    """It imports the contract, its own modules and, to list the tests, pytest and hypothesis."""
    folder = Path(verifier.__file__).parent
    parts = ("clauses", "descriptor", "driver", "dtypes", "geometry", "sources")
    allowed = {"forebay.specs", *(f"forebay.specs.{part}" for part in parts)}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.partition(".")[0]
                own = name.startswith("forebay.specs.suite.verifier") or name in allowed
                listing = path.name == "listing.py" and top in ("pytest", "hypothesis")
                assert own or listing or top in sys.stdlib_module_names, f"{path.name} imports {name}"
    script = "import sys, forebay.specs.suite.verifier as v; print([m for m in sys.modules if m.startswith('forebay.specs.suite.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(ast.literal_eval(done.stdout)) == {
        "forebay.specs.suite.verifier",
        *(
            f"forebay.specs.suite.verifier.{name}"
            for name in ("content", "implied", "installed", "listing", "results", "shape", "whole")
        ),
    }
