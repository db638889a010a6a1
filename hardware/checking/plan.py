"""What one check is: its parts, how its time is shared, and what decides. A package of a machine has one as ``plan.CHECK``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module

from forebay.specs.errors import InvalidInput


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        machine: in words, for the report.
        package: where the parts lie: part ``a-b`` is ``PACKAGE.a_b.run``.
        backend: what is judged; dry_backend: what a dry run takes in its place.
        dry: in words, what a dry run says nothing of.
        parts: every part, in the order of the report.
        timing: parts that measure: nothing else runs beside them, and they decide nothing.
        must_pass: parts that each have to end without a fault; the others decide only by what fails in them.
        may_lack: of these, by part, why nothing is amiss where it is ``not present``.
        shares: of the budget, kept for the parts that measure; the others have the rest.
        caps: of the budget, the most that a part may take, where it is less than what is left.
        beside: parts that run at a time on the device.
    """

    machine: str
    package: str
    backend: str
    dry_backend: str
    dry: str
    parts: tuple[str, ...]
    timing: tuple[str, ...]
    must_pass: tuple[str, ...]
    shares: Mapping[str, float]
    may_lack: Mapping[str, str] = field(default_factory=dict)
    caps: Mapping[str, float] = field(default_factory=dict)
    beside: int = 1


def check_of(package: str) -> Check:
    """The check of a package of this name.

    Raises:
        InvalidInput: it has none.
    """
    try:
        found = import_module(f"{package}.plan").CHECK
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"got the check {package!r}, expected a package with plan.CHECK: {error}") from error
    if not isinstance(found, Check):
        raise InvalidInput(f"{package}.plan.CHECK: got {type(found).__name__}, expected a Check")
    return found
