"""Whether one result can have its outcome: its message, its errors, what was refused, which waiver excuses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Final

from forebay.specs.clauses import catalogue
from forebay.specs.suite.verifier.whole import MAY_BE_REFUSED, NEVER_REFUSED

_ASKS_NOTHING: Final = ("None", "False")
"""Values, as texts, that no declared limit can refuse."""
_RAISED_NOTHING: Final = ("marked as an expected failure", "[XPASS")
"""How the messages of failures begin in which nothing was raised: a test that was expected to fail and did not."""

Result = Mapping[str, Any]
Record = Mapping[str, Any]


def result_faults(result: Result, record: Record) -> Iterator[str]:
    """What one result of a record says that cannot be."""
    name, outcome = result["test"], result["outcome"]
    known = catalogue().clauses
    unknown = [clause for clause in (*result["clauses"], *result["refuses"]) if clause not in known]
    if unknown:
        yield f"{name}: the contract has no clause {', '.join(unknown)}"
    if not result["clauses"] and not result["refuses"]:
        yield f"{name}: no clause"
    yield from _telling_faults(result)
    yield from _error_faults(result, record)
    if outcome == "refused":
        yield from _refusal_faults(result, record)
    elif result["refusal"] is not None:
        yield f"{name}: {outcome}, and it names what was refused"
    device = None if record["backend"] is None else record["backend"]["info"].get("device")
    waived = any(w["test"] == name and w["device"] == device for w in record["waivers"])
    if outcome == "waived" and not waived:
        yield f"{name}: waived, and no waiver names it for {device!r}"
    if outcome == "fail" and waived and record["backend"] is not None:
        yield f"{name}: failed, where a waiver excuses it"


def _telling_faults(result: Result) -> Iterator[str]:
    name, outcome = result["test"], result["outcome"]
    if outcome in ("pass", "not-run"):
        if result["message"]:
            yield f"{name}: {outcome}, with the message {result['message']!r} of something else"
        if outcome == "not-run" and (result["seconds"] or result["errors"]):
            yield f"{name}: not run, and it took time or saw errors"
    elif not result["message"]:
        yield f"{name}: {outcome}, and no message says why"
    failed = outcome in ("fail", "waived")
    if not failed and result["failure"] is not None:
        yield f"{name}: {outcome}, and it tells of a failure"
    if failed and result["failure"] is None and not result["message"].startswith(_RAISED_NOTHING):
        yield f"{name}: {outcome}, and it does not tell what was expected and what came"


def _error_faults(result: Result, record: Record) -> Iterator[str]:
    name, limits = result["test"], catalogue().tolerances.limit
    rounds = record["backend"] is not None and record["backend"]["capabilities"]["tf32"]
    for dtype, (error, limit) in result["errors"].items():
        allowed = max(limits.get(dtype, 0.0), limits["tf32"] if rounds else 0.0)
        if dtype not in limits or limit != allowed:
            yield f"{name}: held {dtype} against {limit}, where the contract allows {allowed}"
        if result["outcome"] in ("pass", "refused") and error > min(limit, allowed):
            yield f"{name}: {result['outcome']} with an error of {error} in {dtype}, where {allowed} is allowed"


def _refusal_faults(result: Result, record: Record) -> Iterator[str]:
    refusal, backend = result["refusal"], record["backend"]
    where = f"{result['test']}: refused"
    if refusal is None or backend is None or refusal["capability"] not in backend["capabilities"]:
        yield f"{where} without a declared capability"
        return
    if refusal["message"] != result["message"]:
        yield f"{where} with two messages, {refusal['message']!r} and {result['message']!r}"
    if not _is_host_check(refusal["raised_in"]):
        yield f"{where} in {refusal['raised_in']}, where no check of the contract or the runtime is"
    name, value = refusal["capability"], refusal["value"]
    declared, core = backend["capabilities"][name], NEVER_REFUSED.get(name, ())
    number = int(value) if value.isdecimal() and len(value) <= 20 else None
    if declared is None or declared is True or value in _ASKS_NOTHING:
        yield f"{where} for {name}={value}, where the backend declares no limit"
    elif isinstance(declared, list) and value in map(str, declared):
        yield f"{where} for {name}={value}, which the backend declares to support"
    elif isinstance(declared, int) and declared is not False and number is not None and number <= declared:
        yield f"{where} for {name}={value}, which is within the declared {declared}"
    if name.startswith("max_") and number is None:
        yield f"{where} for {name}={value}, which is no number"
    if name not in (*MAY_BE_REFUSED, *NEVER_REFUSED):
        yield f"{where} for {name}={value}, which is no limit of what can be asked"
    small = name.startswith("max_") and number is not None and core and number <= max(core)
    if small or value in map(str, core) or any(each is True for each in core):
        yield f"{where} for {name}={value}, which is of the core and cannot be refused"


def _is_host_check(module: str) -> bool:
    """Whether a module checks calls in front of a driver: one of the contract's own, or any of the runtime."""
    package, _, name = module.rpartition(".")
    if package == "forebay.specs":
        return name.isidentifier() and resources.files(package).joinpath(f"{name}.py").is_file()
    return module.startswith("forebay.runtime.")
