"""What a backend says about itself before its vendor library is imported.

A backend's entry point names a small module that implements the pluggy hook ``forebay_backend() -> BackendDescriptor``. The
module imports nothing but :mod:`forebay.specs`; the vendor library is first imported by :attr:`ModeDescriptor.load`, once the
backend has been chosen (clause B1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from .driver import Driver

ENTRY_POINT_GROUP: Final = "forebay.backends"
HOOK_PROJECT: Final = "forebay"

ModeKind = Literal["accelerator", "host", "reference", "interpreted", "simulated"]
"""What runs the kernels. ``auto`` takes the first usable ``accelerator``, else the ``cpu`` backend (``host``); never another kind."""


@dataclass(frozen=True)
class Availability:
    """Whether a mode can run on this machine, found without allocating device memory.

    ``reason`` says why not (option, need and what was found), or names the device; ``cause`` keeps the original exception;
    ``hint`` is what to install or change.
    """

    usable: bool
    reason: str
    hint: str = ""
    cause: BaseException | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ModeDescriptor:
    """One way of running a backend: the device itself, an interpreter, a simulator.

    Attributes:
        name: the part after the colon (``interpret``), ``""`` for the default mode.
        kind: what runs the kernels; decides whether ``auto`` may take it.
        load: makes the driver; keyword options are those of ``open_backend``. First place where a vendor library is imported.
        probe: says whether the mode can run here; imports at most the vendor library's top level; must not raise for an absent
            device, but may (the plugin manager keeps the error).
        requires: modules that must be importable, checked before ``probe`` runs.
        supports: static features selection can ask for, such as ``{"kv_dtype": ("float32", "bfloat16")}``; a name that is absent
            counts as unlimited.
    """

    name: str
    kind: ModeKind
    load: Callable[..., Driver]
    probe: Callable[[], Availability]
    requires: tuple[str, ...] = ()
    supports: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


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


@dataclass(frozen=True)
class Candidate:
    """One backend that ``auto`` or a requirement looked at, and why it was passed over (``""`` for the chosen one)."""

    name: str
    passed_over: str


@dataclass(frozen=True)
class Selection:
    """The resolved backend choice and where it came from (clause B2); part of every report.

    ``source`` is ``call``, ``environment``, ``file`` or ``default``; ``origin`` names the variable or file. ``requested`` is the
    text as given (``auto``, ``cpu``, ``cuda:interpret``). ``considered`` lists every candidate in the order looked at.
    """

    name: str
    mode: str
    requested: str = "auto"
    source: Literal["call", "environment", "file", "default"] = "default"
    origin: str = ""
    distribution: str = ""
    version: str = ""
    considered: tuple[Candidate, ...] = ()
