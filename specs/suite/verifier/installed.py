"""What a record has to share with the installed suite: contract, sources, tests with their clauses, the way inputs are drawn."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any, Final

from forebay.specs.clauses import catalogue
from forebay.specs.sources import suite_hash
from forebay.specs.suite.verifier.listing import OPTION

LISTING: Final = "forebay.specs.suite.verifier.listing"
MARKS: Final = ("clauses", "refuses", "cases")


@dataclass(frozen=True)
class Installed:
    """What is installed under a backend's name: the kind of device of the mode, the distribution and its version."""

    kind: str
    distribution: str
    version: str


@dataclass(frozen=True)
class Asked:
    """What the installed suite asks one backend in one profile.

    Attributes:
        tests: the tests in their order, each with its ``clauses``, ``refuses`` and ``cases``.
        all_clauses: the clauses, of values and of refusals, of every test of the suite, asked or not.
        asks_backend: the tests that cannot begin before the judged backend is opened.
        seeds: what a record says of how inputs are drawn.
    """

    tests: Mapping[str, Mapping[str, list[str]]]
    all_clauses: Mapping[str, list[str]]
    asks_backend: frozenset[str]
    seeds: Mapping[str, Any]


def collect(requested: str, profile: str, pytest_command: Sequence[str], environment: Mapping[str, str]) -> Asked:
    """Collect the installed suite, whose tests ``pytest_command`` would run, and run none.

    Raises:
        ValueError: pytest could not collect them.
    """
    with tempfile.TemporaryDirectory(prefix="forebay-verify-") as folder:
        path = Path(folder, "listing.json")
        asked = ["-p", LISTING, f"{OPTION}={path}", "--collect-only", "-qq"]
        asked += [f"--backend={requested}", f"--suite-profile={profile}"]
        done = subprocess.run(
            [*pytest_command, *asked], capture_output=True, text=True, env=dict(environment), check=False
        )
        if done.returncode != 0 or not path.exists():
            said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
            raise ValueError(f"the installed suite cannot be collected: {said[-500:]}")
        listed = json.loads(path.read_text(encoding="utf-8"))
    by_name = {test["test"]: {key: test[key] for key in MARKS} for test in listed["all"]}
    return Asked(
        tests={name: by_name[name] for name in listed["asked"]},
        all_clauses={name: [*marks["clauses"], *marks["refuses"]] for name, marks in by_name.items()},
        asks_backend=frozenset(test["test"] for test in listed["all"] if test["asks_backend"]),
        seeds={
            "hypothesis": "derandomized: drawn from each test's own source" if listed["derandomized"] else "random",
            "hypothesis_max_examples": listed["examples"],
            "numpy": "fixed in each test",
        },
    )


def identity_faults(record: dict[str, Any], installed: Callable[[str, str], Installed | None]) -> Iterator[str]:
    """Whether the record is whole as it was written, of the installed contract and suite, and of the backend it was asked for."""
    plain = {key: value for key, value in record.items() if key != "digest"}
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    if hashlib.sha256(canonical).hexdigest() != record["digest"]:
        yield "edited: its digest is not that of its content"
    if record["spec_version"] != catalogue().version:
        yield f"contract {record['spec_version']}, installed is {catalogue().version}"
    if record["suite_hash"] != suite_hash():
        yield f"suite {record['suite_hash'][:16]}, installed is {suite_hash()[:16]}"
    backend = record["backend"]
    name, _, mode = record["requested"].partition(":")
    if backend is not None and name not in (backend["name"], "auto"):
        yield f"asked for {record['requested']!r}, but {backend['name']!r} was judged"
    if backend is not None and mode and mode != backend["mode"]:
        yield f"asked for {record['requested']!r}, but its mode {backend['mode']!r} was judged"
    here = None if backend is None else installed(backend["name"], backend["mode"])
    if backend is not None and here is not None:
        if backend["kind"] != here.kind:
            yield f"it calls {backend['name']!r} {backend['kind']}, the installed one is {here.kind}"
        told, own = (f"{x['distribution']} {x['version']}".strip() for x in (backend, vars(here)))
        if told != own:
            yield f"{told!r} was judged, installed is {own!r}"
    yield from _version_faults(record["versions"])


def _version_faults(versions: Mapping[str, str]) -> Iterator[str]:
    """The suite is that of one version of Forebay, which runs on some versions of Python."""
    if versions["forebay"] != version("forebay"):
        yield f"written by forebay {versions['forebay']}, installed is {version('forebay')}"
    least = _numbers(metadata("forebay")["Requires-Python"])
    if _numbers(versions["python"])[: len(least)] < least:
        yield f"python {versions['python']}, on which Forebay does not run"
    for name in ("numpy", "pytest", "hypothesis"):
        if not _numbers(versions[name]):
            yield f"{name} {versions[name]!r} is no version"


def _numbers(text: str) -> tuple[int, ...]:
    """The first dotted numbers of a text, as numbers; () where there are none."""
    found = re.search(r"\d{1,9}(\.\d{1,9})*", text)
    return tuple(map(int, found.group().split("."))) if found else ()


def membership_faults(record: dict[str, Any], asked: Asked) -> Iterator[str]:
    """Whether the record has one result of every test that was to be asked, with the clauses the test has, and no other.

    What explains other faults comes first: a selection lacks results because it is one.
    """
    if not record["complete"]:
        yield "it calls itself a selection: only the whole of a profile can be verified"
    elif record["selection"]:
        yield f"it calls itself complete, and was selected by {', '.join(record['selection'])}"
    names = [result["test"] for result in record["results"]]
    held = Counter(names)
    differences = {
        "missing": [name for name in asked.tests if name not in held],
        "extra": sorted(set(held) - set(asked.tests)),
        "duplicate": [name for name, count in held.items() if count > 1],
    }
    for title, found in differences.items():
        if found:
            yield f"{len(found)} {title} result(s): {', '.join(found[:3])}{' …' if len(found) > 3 else ''}"
    if not any(differences.values()) and names != list(asked.tests):
        first = next(got for got, want in zip(names, asked.tests, strict=True) if got != want)
        yield f"its results are not in the suite's order, from {first} on"
    for result in record["results"]:
        for key in MARKS if result["test"] in asked.tests else ():
            if result[key] != asked.tests[result["test"]][key]:
                yield f"{result['test']}: {key} {result[key]}, the suite's test has {asked.tests[result['test']][key]}"
        if record["backend"] is None and result["outcome"] != "not-run" and result["test"] in asked.asks_backend:
            yield f"{result['test']}: {result['outcome']}, and no backend was opened"
    if record["seeds"] != asked.seeds:
        yield f"its inputs were drawn by {record['seeds']}, those of the suite by {dict(asked.seeds)}"
