"""What makes a run a failed one whatever its tests say, and what became of its waivers, from the rest of the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from forebay.specs.clauses import catalogue

NEVER_REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "kv_dtypes": ("float32", "bfloat16"),
    "head_dims": (64, 128),
    "max_group": (1, 3, 4, 8),
    "block_sizes": (16, 32),
    "max_query_len": (1,),
    "max_pool_elements": (2**24,),
    "window": (True,),
    "lse": (True,),
    "capture": (True,),
}
"""The core, by capability: what every backend has to support."""
MAY_BE_REFUSED: Final = (
    *("layouts", "kv_dtypes", "head_dims", "block_sizes", "addressable", "sinks", "softcap"),
    *("max_group", "max_query_len", "max_pool_elements"),
)
"""Capabilities that limit what a test can ask for."""
_MUST_HAVE_RUN: Final = ("paged_decode", "gather", "write_kv", "stage")
_ENDED: Final = {"fail": "failed", "refused": "was refused", "waived": "was waived", "not-run": "was not run"}

Record = Mapping[str, Any]


def problems_of(record: Record) -> list[str]:
    """The problems of the run, in the words of records."""
    backend = record["backend"]
    found = [] if backend is None else core_gaps(backend["capabilities"])
    found += [
        f"stale waiver: {waiver['test']} does not fail on {waiver['device']}; take the waiver out"
        for waiver in record["waivers"]
        if state_of(waiver, record) == "stale"
    ]
    if not record["complete"] or record["stopped"] or backend is None:
        return found
    return [*found, *_never_shown(record), *_needless_rounding(record), *_never_launched(record)]


def state_of(waiver: Mapping[str, str], record: Record) -> str:
    """``used``, ``stale`` (its test does not fail), ``elsewhere`` (of another device) or ``idle`` (its test was not run)."""
    backend = record["backend"]
    outcome = next((each["outcome"] for each in record["results"] if each["test"] == waiver["test"]), "not-run")
    if backend is None or outcome == "not-run":
        return "idle"
    if waiver["device"] != backend["info"].get("device"):
        return "elsewhere"
    return "used" if outcome == "waived" else "stale"


def core_gaps(capabilities: Mapping[str, Any]) -> list[str]:
    """What of the core the declared capabilities leave out, in the words of records."""
    found = []
    for name, values in NEVER_REFUSED.items():
        declared = capabilities[name]
        limit = tuple(declared) if isinstance(declared, list) else declared
        for value in values:
            if isinstance(limit, bool):
                refused = not limit
            elif isinstance(limit, tuple):
                refused = value not in limit
            else:
                refused = limit is not None and value > limit
            if refused:
                found.append(f"the core cannot be refused, and {name}={limit!r} refuses {value!r}")
    return found


def _never_shown(record: Record) -> Iterator[str]:
    """Clauses in force whose values, or refusals where they have no values, no test showed."""
    kinds: dict[str, set[str]] = {}
    for result in record["results"]:
        for kind in ("clauses", "refuses"):
            for clause in result[kind]:
                kinds.setdefault(clause, set()).add(kind)
    known = list(catalogue().clauses)
    for clause in sorted(kinds, key=lambda each: known.index(each) if each in known else len(known)):
        kind = "clauses" if "clauses" in kinds[clause] else "refuses"
        outcomes = [result["outcome"] for result in record["results"] if clause in result[kind]]
        if "pass" in outcomes:
            continue
        of = "its values" if len(kinds[clause]) == 2 else "it"
        if len(set(outcomes)) == 1:
            yield f"clause {clause}: every test of {of} {_ENDED[outcomes[0]]} ({len(outcomes)})"
        else:
            told = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
            yield f"clause {clause}: no test of {of} passed ({told})"


def _never_launched(record: Record) -> Iterator[str]:
    launches = record["counters"].get("launches", {})
    for operation in _MUST_HAVE_RUN if record["profile"] == "full" else ():
        if not launches.get(operation) and not record["delegated"].get(operation):
            yield f"no launch of {operation} was counted, of the backend's own kernels or delegated to numpy"


def _needless_rounding(record: Record) -> Iterator[str]:
    """A claim of tf32, which allows larger errors, beside none that is larger than float32 may have."""
    errors = [result["errors"]["float32"][0] for result in record["results"] if "float32" in result["errors"]]
    allowed = catalogue().tolerances.limit["float32"]
    claimed = record["backend"]["capabilities"]["tf32"]
    if record["profile"] == "full" and claimed and errors and max(errors) <= allowed:
        yield (
            f"tf32 is claimed, and the largest error in float32, {max(errors):.2e}, is within {allowed:g}, which is allowed "
            "without it; take the claim out"
        )
