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
Profile = Literal["smoke", "full"]


def of_suite(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The items that lie in the suite's own folder, in their order."""
    return [item for item in items if is_of_suite(item.path)]


def name_of(item: pytest.Item) -> str:
    """The test's name, the same on every machine."""
    return item.path.name + item.nodeid[item.nodeid.index("::") :]


def ids(item: pytest.Item, kind: Kind) -> tuple[str, ...]:
    """The clause ids of an item's markers of one kind, each once, in the markers' order from the function outwards."""
    return tuple(dict.fromkeys(name for marker in item.iter_markers(kind) for name in marker.args))


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


def check_whole(items: Sequence[pytest.Item], contract: Catalogue) -> None:
    """Stop the run if a test has no clause, or a clause in force lacks a test or, where one applies, a refusal test."""
    unmarked = [name_of(item) for item in items if not ids(item, "clause") and not ids(item, "refuses")]
    if unmarked:
        raise pytest.UsageError(f"{_some(unmarked)}: no clause; mark each test with clause(ID) or refuses(ID)")
    shown, refusing = ({name for item in items for name in ids(item, kind)} for kind in get_args(Kind))
    for what, lacking in (
        ("no test", [clause.id for clause in contract.in_force() if clause.id not in shown | refusing]),
        (
            "no refusal test",
            [clause.id for clause in contract.in_force() if clause.refusal and clause.id not in refusing],
        ),
    ):
        if lacking:
            raise pytest.UsageError(
                f"{', '.join(lacking)}: in force in contract {contract.version}, and the suite has {what} of it"
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
    mine = [
        item for item in items if backend.partition(":")[0] == RUNTIME_ON or not _judges_runtime_alone(item, contract)
    ]
    return mine if profile == "full" else _smoke(mine, contract)


def _judges_runtime_alone(item: pytest.Item, contract: Catalogue) -> bool:
    named = (*ids(item, "clause"), *ids(item, "refuses"))
    subjects = {contract.clauses[name].subject for name in named if name in contract.clauses}
    return subjects == {"runtime"} or ASKS_DEVICE not in getattr(item, "fixturenames", ())


def _smoke(items: Sequence[pytest.Item], contract: Catalogue) -> list[pytest.Item]:
    """For every clause in force a test of its values and one of its refusal, so far as the items have one.

    Of several the first that no backend may refuse and that draws no examples; none where a chosen one covers the clause already.
    """
    chosen: dict[str, pytest.Item] = {}
    for kind in get_args(Kind):
        covered: set[str] = set()
        for clause in contract.in_force():
            if clause.id in covered:
                continue
            found = [item for item in items if clause.id in ids(item, kind)]
            if found:
                item = min(found, key=lambda item: (_asks_beyond_core(item), _draws_examples(item)))
                chosen[item.nodeid] = item
                covered.update(ids(item, kind))
    return [item for item in items if item.nodeid in chosen]


def _asks_beyond_core(item: pytest.Item) -> bool:
    named = getattr(getattr(item, "callspec", None), "params", {})
    return item.get_closest_marker("beyond_core") is not None or "layout" in named


def _draws_examples(item: pytest.Item) -> bool:
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
