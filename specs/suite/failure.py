"""How a failed test is told: the clause, the smallest input that fails, what was expected, what came, and how to run it alone."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack, walk_tb
from typing import Final

import pytest

from forebay.specs import Unsupported

_FALSIFYING: Final = re.compile(
    r"(Falsifying|Explicit|Failing) (explicit )?(example|test case)|Draw \d+\b", re.IGNORECASE
)
"""Notes of hypothesis that tell an input: the arguments, and what the test drew on its way."""
SCENE: Final = "The call: "
"""How a note begins that tells the call of ``paged_decode`` a test was at."""
TOLD: Final = re.compile(r"^(?:\w+: )?expected: (?P<want>.*)\n(?:E? *)got: (?P<got>.*)$", re.MULTILINE)
"""A message that tells both sides itself."""
_FIXTURE: Final = re.compile(r"^ +\w+=<[\w.]+ object at 0x[0-9a-f]+>,\n", re.MULTILINE)
"""A line of an example that names a fixture by its address: no input, and another one in every run."""
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_NUMPY: Final = re.compile(r"^ ACTUAL: (?P<got>.*?)^ DESIRED: (?P<want>.*)", re.MULTILINE | re.DOTALL)
_NOT_RAISED: Final = re.compile(r"DID NOT RAISE (?:<class ')?(?P<want>[\w.]+|\(.*\))")
_NOT_MATCHED: Final = re.compile(r"Expected regex: (?P<want>.*)\n\s*(?:Actual message|Input): (?P<got>.*)", re.DOTALL)
_EXPLAINS: Final = "_pytest.assertion.rewrite"
"""The module that rewritten ``assert`` statements call, and whose frame is next to theirs."""
_LONGEST: Final = 2000
"""Characters of one part that are kept; what is longer repeats itself."""


Place = tuple[str, int]
"""File and line of a statement."""


@dataclass(frozen=True)
class Comparison:
    """The two sides of the last comparison that did not hold, as texts: ``got OPERATOR expected``, and the ``assert`` it is of."""

    got: str
    operator: str
    expected: str
    place: Place


@dataclass(frozen=True)
class Failure:
    """What a failed test says, each part a text."""

    input: str
    expected: str
    got: str

    def as_dict(self) -> dict[str, str]:
        """Plain data for the record."""
        return {name: text[:_LONGEST] for name, text in vars(self).items()}


def failure_of(
    item: pytest.Item, caught: pytest.ExceptionInfo[BaseException], comparison: Comparison | None
) -> Failure:
    """Put an exception of ``item`` into words."""
    error = leaves(caught.value)[0]
    asked = "\n".join(part for part in (_parameters(item), _falsifying(error)) if part) or "none: the test has one case"
    expected, got = _expected_and_got(error, _statement(caught), comparison)
    return Failure(asked, expected, got)


def asserting() -> Place:
    """Where the ``assert`` is that pytest explains just now, to a hook that calls this."""
    frames = list(walk_stack(None))
    explaining = [n for n, (frame, _) in enumerate(frames) if frame.f_globals.get("__name__") == _EXPLAINS]
    if not explaining or explaining[-1] + 1 == len(frames):
        return "", 0
    frame, line = frames[explaining[-1] + 1]
    return frame.f_code.co_filename, line


def _raised_at(error: BaseException) -> Place:
    """The statement that raised an error."""
    frame, line = list(walk_tb(error.__traceback__))[-1]
    return frame.f_code.co_filename, line


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions in a group of several (hypothesis reports every distinct one), or the one itself; what was refused comes last."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    found = [leaf for each in error.exceptions for leaf in leaves(each)]
    return sorted(found, key=lambda leaf: isinstance(leaf, Unsupported))


def causes(error: BaseException) -> str:
    """An error and what caused it, in one line; a cause whose words are in what it caused is not said again."""
    said: list[str] = []
    each: BaseException | None = error
    while each is not None:
        if not said or str(each) not in said[-1]:
            said.append(f"{type(each).__name__}: {each}")
        each = each.__cause__
    return "; caused by ".join(said)


def _parameters(item: pytest.Item) -> str:
    """The values a test is parametrised with; of a value that only has an address, what the test's name calls the case."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return ""
    values = ", ".join(f"{name}={value!r}" for name, value in callspec.params.items())
    named = _ADDRESS.sub("", values)
    return values if named == values else f"[{callspec.id}]: {named}"


def _falsifying(error: BaseException) -> str:
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return "\n".join(_FIXTURE.sub("", note) for note in notes if _FALSIFYING.match(note) or note.startswith(SCENE))


def _statement(caught: pytest.ExceptionInfo[BaseException]) -> str:
    """The suite's own statement that was running: the innermost that lies in a test of the suite."""
    entries = [entry for entry in caught.traceback if Path(entry.path).name.startswith("test_")]
    entry = (entries or list(caught.traceback))[-1]
    try:
        return " ".join(str(entry.statement).split())
    except (AssertionError, IndexError, OSError):  # a source that is not there
        return f"{Path(entry.path).name}:{entry.lineno + 1}"


def _expected_and_got(error: BaseException, statement: str, comparison: Comparison | None) -> tuple[str, str]:
    text = str(error)
    for pattern, got in ((TOLD, None), (_NUMPY, None), (_NOT_MATCHED, None), (_NOT_RAISED, "no error")):
        if found := pattern.search(text):
            return found["want"].strip(), got or found["got"].strip()
    if isinstance(error, AssertionError):
        if comparison is not None and comparison.place == _raised_at(error):
            return f"{comparison.operator} {comparison.expected}", comparison.got
        return statement, text.strip() or "it does not hold"
    return f"no error from: {statement}", f"{type(error).__name__}: {text}"


def rerun_command(backend: str, test: str) -> str:
    """The command line that runs one test alone."""
    return f"forebay conform {shlex.quote(backend)} --test {shlex.quote(test)}"
