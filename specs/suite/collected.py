"""What was collected: the clauses of each test, which tests a backend is asked, and what the whole suite must hold.

A *test* is named by its file and what follows: ``test_decode.py::test_lengths[NHD-float32]``, wherever the suite is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

import pytest

from forebay.specs.clauses import Catalogue, catalogue
from forebay.specs.suite.command import FOLDER
from forebay.specs.suite.surroundings import is_of_suite

RUNTIME_ON: Final = "sim"
"""The backend on which tests run that judge the runtime alone."""
ASKS_DEVICE: Final = "backend_name"
"""The fixture below every fixture that opens the judged backend."""

Kind = Literal["clause", "refuses"]
SUBJECTS: Final = 2
"""How many of the clauses that a test names, from the first, it shows so well that the profile ``smoke`` needs no other of them."""
Profile = Literal["smoke", "full"]


def of_suite(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The items that lie in the suite's own folder, in their order."""
    return [item for item in items if is_of_suite(item.path)]


def name_of(item: pytest.Item) -> str:
    """The test's name, the same on every machine."""
    return item.path.name + item.nodeid[item.nodeid.index("::") :]


def ids(item: pytest.Item, kind: Kind | Literal["smoke"]) -> tuple[str, ...]:
    """The clause ids of an item's markers of one kind, each once, in the markers' order from the function outwards."""
    return tuple(dict.fromkeys(name for marker in item.iter_markers(kind) for name in marker.args))


def clauses_of(item: pytest.Item) -> tuple[str, ...]:
    """The clause ids a test carries, of values first, then of refusals, each once."""
    return tuple(dict.fromkeys(name for kind in get_args(Kind) for name in ids(item, kind)))


def check_ids(items: Iterable[pytest.Item]) -> None:
    """Stop the run if a marker names no clause, or one the contract does not have."""
    known = catalogue().clauses
    for item in items:
        for kind in get_args(Kind):
            for marker in item.iter_markers(kind):
                unknown = [name for name in marker.args if name not in known]
                if unknown or not marker.args or marker.kwargs:
                    raise pytest.UsageError(
                        f"{item.nodeid}: {kind}{marker.args!r}: expected clause ids, all of them known"
                    )
        carried = clauses_of(item)
        strange = [name for name in ids(item, "smoke") if name not in carried]
        if strange:
            raise pytest.UsageError(f"{item.nodeid}: smoke{tuple(strange)!r}: expected clauses that the test carries")


def check_whole(items: Sequence[pytest.Item], contract: Catalogue, backend: str = "") -> None:
    """Stop the run if a test has no clause, or a clause in force lacks a test or, where one applies, a refusal test.

    With ``backend`` (``NAME[:MODE]``) the items are those that it is asked, and the clauses those that it has to hold.
    """
    unmarked = [name_of(item) for item in items if not ids(item, "clause") and not ids(item, "refuses")]
    if unmarked:
        raise pytest.UsageError(f"{_some(unmarked)}: no clause; mark each test with clause(ID) or refuses(ID)")
    shown, refusing = ({name for item in items for name in ids(item, kind)} for kind in get_args(Kind))
    held = [
        clause for clause in contract.in_force() if not backend or clause.subject != "runtime" or _runs_runtime(backend)
    ]
    for what, lacking in (
        ("no test", [clause.id for clause in held if clause.id not in shown | refusing]),
        ("no refusal test", [clause.id for clause in held if clause.refusal and clause.id not in refusing]),
    ):
        if lacking:
            where = f"{backend} is asked" if backend else "the suite has"
            raise pytest.UsageError(
                f"{', '.join(lacking)}: in force in contract {contract.version}, and {where} {what} of it"
            )


def is_whole(items: Iterable[pytest.Item], arguments: Iterable[str]) -> bool:
    """Whether these items are the whole suite: every test file, and no argument that picks out of one."""
    present = {item.path.resolve() for item in items}
    return not any("::" in argument for argument in arguments) and present >= set(FOLDER.glob("test_*.py"))


def selection_of(config: pytest.Config) -> list[str]:
    """What of pytest's arguments picks out of the suite: words, marks, files and tests of it, in a form that names no machine."""
    options = [("-k", config.getoption("keyword")), ("-m", config.getoption("markexpr"))]
    picked = [f"{option} {value}" for option, value in options if value]
    for argument in config.args:
        place, _, test = argument.partition("::")
        name = Path(place).name
        if name.startswith("test_") and name.endswith(".py"):
            picked.append(f"{name}::{test}" if test else name)
    return picked


def asked_of(items: Iterable[pytest.Item], backend: str, profile: Profile) -> list[pytest.Item]:
    """The items that ``backend`` (``NAME[:MODE]``) is asked in a profile, in their order."""
    contract = catalogue()
    mine = [item for item in items if _runs_runtime(backend) or not _judges_runtime_alone(item, contract)]
    return mine if profile == "full" else _smoke(mine, contract)


def _runs_runtime(backend: str) -> bool:
    return backend.partition(":")[0] == RUNTIME_ON


def _judges_runtime_alone(item: pytest.Item, contract: Catalogue) -> bool:
    subjects = {contract.clauses[name].subject for name in clauses_of(item) if name in contract.clauses}
    return subjects == {"runtime"} or ASKS_DEVICE not in getattr(item, "fixturenames", ())


def _smoke(items: Sequence[pytest.Item], contract: Catalogue) -> list[pytest.Item]:
    """For every clause in force a test of its values and one of its refusal, so far as the items have one.

    First the tests marked to show a clause here, the first of each function; one that a backend may refuse is chosen beside another.
    Then, for a clause that no chosen test shows among the first it names, of its tests the first that no backend may refuse, that
    draws no examples, and that names the clause before others; clauses with few tests first, for these may show others as well.
    """
    chosen = {item.nodeid: item for clause in contract.in_force() for item in _marked(items, clause.id)}
    for kind in get_args(Kind):
        carrying = {
            clause.id: [item for item in items if clause.id in ids(item, kind)] for clause in contract.in_force()
        }
        for name, found in sorted(carrying.items(), key=lambda each: len(each[1])):
            if found and not any(_shows(item, name, kind) for item in chosen.values()):
                item = min(found, key=lambda item: _rank(item, ids(item, kind).index(name)))
                chosen[item.nodeid] = item
    return [item for item in items if item.nodeid in chosen]


def _marked(items: Sequence[pytest.Item], clause: str) -> list[pytest.Item]:
    """The first item of each function that is marked as a test of ``clause`` for the profile, one of the core if there is one."""
    first: dict[object, pytest.Item] = {}
    for item in items:
        if clause in ids(item, "smoke"):
            key = getattr(item, "function", item)
            if key not in first or (_asks_beyond_core(first[key]) and not _asks_beyond_core(item)):
                first[key] = item
    return list(first.values())


def _shows(item: pytest.Item, clause: str, kind: Kind) -> bool:
    """Whether a chosen item makes another test of the clause unnecessary."""
    if kind == "refuses":
        return clause in ids(item, kind)
    return not _asks_beyond_core(item) and (clause in ids(item, "smoke") or clause in ids(item, kind)[:SUBJECTS])


def _rank(item: pytest.Item, place: int) -> tuple[bool, bool, int]:
    return _asks_beyond_core(item), _draws_examples(item), place


def _asks_beyond_core(item: pytest.Item) -> bool:
    named = getattr(getattr(item, "callspec", None), "params", {})
    return item.get_closest_marker("beyond_core") is not None or named.get("layout") is not None


def _draws_examples(item: pytest.Item) -> bool:
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
