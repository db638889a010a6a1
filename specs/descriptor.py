"""What a backend says about itself before its vendor library is imported.

A backend's entry point names a small module that implements the pluggy hook ``forebay_backend() -> BackendDescriptor``.
The module imports nothing but pluggy and :mod:`forebay.specs`; the vendor library is first imported by
:attr:`ModeDescriptor.load`, once the backend has been chosen (clause B1). Descriptors check their own fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from forebay.specs.errors import InvalidInput

if TYPE_CHECKING:
    from forebay.specs.driver import Driver

ENTRY_POINT_GROUP: Final = "forebay.backends"
HOOK_PROJECT: Final = "forebay"
AUTO: Final = "auto"
"""The backend name that asks for a choice; no backend may have it."""

ModeKind = Literal["accelerator", "host", "reference", "interpreted", "simulated"]
"""What runs the kernels. ``auto`` takes the first usable ``accelerator``, else ``cpu`` (``host``), never another."""


@dataclass(frozen=True)
class Availability:
    """Whether a mode can run on this machine, found without allocating device memory.

    ``reason`` says why not (option, need and what was found), or names the device; ``cause`` keeps the original
    exception; ``hint`` is what to install or change.
    """

    usable: bool
    reason: str
    hint: str = ""
    cause: BaseException | None = field(default=None, compare=False)

    @classmethod
    def lacking(cls, option: str, *, need: str, found: str, hint: str = "") -> Availability:
        """An unusable mode, with a reason that names the option, what it needs and what this machine has."""
        return cls(usable=False, reason=f"{option}: needs {need}, found {found}", hint=hint)


@dataclass(frozen=True)
class ModeDescriptor:
    """One way of running a backend: the device itself, an interpreter, a simulator.

    Attributes:
        name: the part after the colon (``interpret``), ``""`` for the default mode.
        kind: what runs the kernels; decides whether ``auto`` may take it.
        load: makes the driver; keyword options are those of ``open_backend``. The first place where a vendor library is
            imported.
        probe: says whether the mode can run here; imports at most the vendor library's top level; must not raise for an
            absent device, but may (the error is kept).
        requires: modules that must be importable, checked before ``probe`` runs.
        supports: static features selection can ask for, such as ``{"kv_dtype": ("float32", "bfloat16")}``; a name that
            is absent counts as unlimited.
    """

    name: str
    kind: ModeKind
    load: Callable[..., Driver]
    probe: Callable[[], Availability]
    requires: tuple[str, ...] = ()
    supports: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name != "":
            _check_name("mode name", self.name)
        _check(self.kind in get_args(ModeKind), "kind", self.kind, f"one of {', '.join(get_args(ModeKind))}")
        _check(callable(self.load), "load", self.load, "a callable that makes the driver")
        _check(callable(self.probe), "probe", self.probe, "a callable that returns an Availability")
        _check_tuple("requires", self.requires, str)
        _check(isinstance(self.supports, Mapping), "supports", self.supports, "a mapping of names to tuples")
        for name, values in self.supports.items():
            _check(isinstance(values, tuple), f"supports[{name!r}]", values, "a tuple of the supported values")


@dataclass(frozen=True)
class BackendDescriptor:
    """The lazy, named description of one backend; returned by the hook ``forebay_backend``.

    ``name`` must equal the entry point's name. ``install_hint`` is a command or sentence that makes the backend usable.
    ``modes[0]`` is the default mode.
    """

    name: str
    summary: str
    modes: tuple[ModeDescriptor, ...]
    install_hint: str

    def __post_init__(self) -> None:
        _check_name("backend name", self.name)
        _check(self.name != AUTO, "backend name", self.name, "any other name, this one asks for a choice")
        _check(isinstance(self.summary, str), "summary", self.summary, "a string")
        _check(isinstance(self.install_hint, str), "install_hint", self.install_hint, "a string")
        _check_tuple("modes", self.modes, ModeDescriptor)
        _check(len(self.modes) > 0, "modes", self.modes, "at least one mode; the first is the default")
        names = [mode.name for mode in self.modes]
        _check(len(set(names)) == len(names), "modes", names, "mode names that differ")


@dataclass(frozen=True)
class Candidate:
    """One backend that ``auto`` or a requirement looked at, and why it was passed over (``""`` for the chosen one)."""

    name: str
    passed_over: str


@dataclass(frozen=True)
class Selection:
    """The resolved backend choice and where it came from (clause B2); part of every report.

    ``kind`` is the mode's: what runs the kernels. ``source`` is ``call``, ``environment``, ``file`` or ``default``; ``origin`` names
    the variable or file.
    ``requested`` is the text as given (``auto``, ``cpu``, ``cuda:interpret``). ``considered`` lists every candidate in
    the order looked at.
    """

    name: str
    mode: str
    requested: str = "auto"
    source: Literal["call", "environment", "file", "default"] = "default"
    origin: str = ""
    distribution: str = ""
    version: str = ""
    considered: tuple[Candidate, ...] = ()
    kind: ModeKind | None = None


_NAME: Final = re.compile(r"[a-z][a-z0-9_-]*")


def _check(holds: bool, what: str, given: object, expected: str) -> None:
    if not holds:
        raise InvalidInput(f"{what} is {given!r}; expected {expected}")


def _check_name(what: str, name: object) -> None:
    holds = isinstance(name, str) and _NAME.fullmatch(name) is not None
    _check(holds, what, name, "lower-case letters, digits, '-' and '_', starting with a letter")


def _check_tuple(what: str, values: object, kind: type) -> None:
    holds = isinstance(values, tuple) and all(isinstance(value, kind) for value in values)
    _check(holds, what, values, f"a tuple of {kind.__name__}")
