"""Whether a record is what a run of the installed suite can have written. Shares no code with what runs the suite and writes records.

A valid record says what happened; whether that is conformance is its verdict, which has to follow from the rest of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from importlib import resources
from pathlib import Path
from typing import Any, Final

from forebay.specs.clauses import catalogue

_SHAPE: Final[Mapping[str, type | tuple[type, ...]]] = {
    "format": int,
    "spec_version": str,
    "suite_hash": str,
    "requested": str,
    "profile": str,
    "complete": bool,
    "backend": (dict, type(None)),
    "versions": dict,
    "seeds": dict,
    "started": str,
    "ended": (str, type(None)),
    "stopped": str,
    "tolerances": dict,
    "counters": dict,
    "delegated": dict,
    "waivers": list,
    "results": list,
    "summary": dict,
    "problems": list,
    "verdict": str,
    "digest": str,
}
_RESULT: Final[Mapping[str, type | tuple[type, ...]]] = {
    "test": str,
    "clauses": list,
    "refuses": list,
    "outcome": str,
    "seconds": (int, float),
    "message": str,
    "refusal": (dict, type(None)),
    "errors": dict,
}
_BACKEND: Final[Mapping[str, type]] = {"name": str, "version": str, "info": dict, "capabilities": dict}
_WAIVER: Final = ("test", "clause", "device", "reason", "expiry", "state")
_KINDS: Final = ("pass", "fail", "refused", "waived", "not-run")
_NEVER_REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "kv_dtypes": ("float32", "bfloat16"),
    "head_dims": (64, 128),
    "max_group": (8,),
    "block_sizes": (16, 32),
    "max_query_len": (1,),
    "max_pool_elements": (2**24,),
    "window": (True,),
    "lse": (True,),
    "capture": (True,),
}
_MUST_HAVE_RUN: Final = ("paged_decode", "gather", "write_kv", "stage")
_TEST: Final = re.compile(r"test_\w+\.py::.+")


def faults_of(path: Path, pytest_command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What is wrong with the record in a file, ``[]`` if nothing is.

    ``pytest_command`` runs pytest over the installed suite, whose tests are collected, not run, to know what had to be asked.

    Raises:
        OSError: the file cannot be read.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        return [f"not JSON: {error}"]
    malformed = list(_malformed(record))
    if malformed:
        return malformed
    faults = [*_identity(record), *_content(record)]
    try:
        expected = collect(record["requested"], record["profile"], pytest_command, environment)
    except ValueError as error:
        return [*faults, str(error)]
    return [*faults, *_membership(record, expected)]


def collect(requested: str, profile: str, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Names of the tests that the installed suite asks a backend in a profile.

    Raises:
        ValueError: pytest could not collect them.
    """
    asked = ["--collect-only", "-q", "--backend", requested, "--suite-profile", profile]
    done = subprocess.run([*command, *asked], capture_output=True, text=True, env=dict(environment), check=False)
    found = [line for line in done.stdout.splitlines() if _TEST.fullmatch(line)]
    if done.returncode != 0 or not found:
        raise ValueError(f"the installed suite cannot be collected: {(done.stderr or done.stdout).strip()[-500:]}")
    return found


# -- shape ---------------------------------------------------------------------------------------------------------------


def _malformed(record: object) -> Iterator[str]:
    if not isinstance(record, dict):
        yield f"a {type(record).__name__}, not a JSON object"
        return
    yield from _differs(record, _SHAPE, "record")
    for key in sorted(set(record) - set(_SHAPE) - {"arguments"}):
        yield f"record: unknown key {key!r}"
    for number, result in enumerate(record.get("results") or [], 1):
        yield from _differs(result, _RESULT, f"result {number}")
    if isinstance(record.get("backend"), dict):
        yield from _differs(record["backend"], _BACKEND, "backend")
    for number, waiver in enumerate(record.get("waivers") or [], 1):
        yield from _differs(waiver, dict.fromkeys(_WAIVER, str), f"waiver {number}")


def _differs(part: Any, shape: Mapping[str, Any], where: str) -> Iterator[str]:
    if not isinstance(part, dict):
        yield f"{where}: not an object"
        return
    for key, kind in shape.items():
        if key not in part:
            yield f"{where}: no {key!r}"
        elif not isinstance(part[key], kind):
            yield f"{where}: {key!r} is a {type(part[key]).__name__}"


# -- who made it ---------------------------------------------------------------------------------------------------------


def _identity(record: dict[str, Any]) -> Iterator[str]:
    plain = {key: value for key, value in record.items() if key != "digest"}
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    if hashlib.sha256(canonical).hexdigest() != record["digest"]:
        yield "edited: its digest is not that of its content"
    if record["format"] != 1:
        yield f"format {record['format']}, this verifier reads 1"
    if record["spec_version"] != catalogue().version:
        yield f"contract {record['spec_version']}, installed is {catalogue().version}"
    if record["suite_hash"] != _installed_suite():
        yield f"suite {record['suite_hash'][:16]}, installed is {_installed_suite()[:16]}"
    if record["profile"] not in ("smoke", "full"):
        yield f"profile {record['profile']!r}, expected smoke or full"
    backend = record["backend"]
    name = record["requested"].partition(":")[0]
    if backend is not None and name not in (backend["name"], "auto"):
        yield f"asked for {record['requested']!r}, but {backend['name']!r} was judged"


def _installed_suite() -> str:
    specs = resources.files("forebay.specs")
    names = [entry.name for entry in specs.joinpath("suite").iterdir() if entry.name.endswith(".py")]
    content = {name: specs.joinpath("suite", name).read_bytes() for name in names}
    content["clauses.toml"] = specs.joinpath("clauses.toml").read_bytes()
    stream = b"".join(b"%s %d\n%s" % (name.encode(), len(content[name]), content[name]) for name in sorted(content))
    return hashlib.sha256(stream).hexdigest()


# -- which tests it has ----------------------------------------------------------------------------------------------------


def _membership(record: dict[str, Any], expected: list[str]) -> Iterator[str]:
    held = Counter(result["test"] for result in record["results"])
    for title, names in (
        ("missing", [name for name in expected if name not in held]),
        ("extra", sorted(set(held) - set(expected))),
        ("duplicate", [name for name, count in held.items() if count > 1]),
    ):
        if names:
            yield f"{len(names)} {title} result(s): {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
    if not record["complete"]:
        yield "it calls itself a selection: only the whole of a profile can be verified"


# -- whether it agrees with itself -----------------------------------------------------------------------------------------


def _content(record: dict[str, Any]) -> Iterator[str]:
    counts = Counter(result["outcome"] for result in record["results"])
    for result in record["results"]:
        yield from _result_faults(result, record)
    told = {**{kind: counts[kind] for kind in _KINDS}, "total": len(record["results"])}
    if record["summary"] != told:
        yield f"its summary says {record['summary']}, its results {told}"
    if record["delegated"] != record["counters"].get("delegated", {}):
        yield "its delegated operations are not those of its counters"
    yield from _tolerance_faults(record)
    wrong = [*_whole_run(record), *record["problems"]]
    failed = counts["fail"] or counts["not-run"] or wrong or record["stopped"] or record["backend"] is None
    right = "failed" if failed else "conformant" if record["profile"] == "full" and record["complete"] else "passed"
    if record["verdict"] != right:
        because = f" ({wrong[0]})" if wrong else f" ({record['stopped']})" if record["stopped"] else ""
        yield f"its verdict is {record['verdict']!r}, its content says {right!r}{because}"
    try:
        started = datetime.fromisoformat(record["started"])
        if record["ended"] is not None and datetime.fromisoformat(record["ended"]) < started:
            yield "it ended before it started"
    except (TypeError, ValueError):
        yield f"its times are {record['started']!r} and {record['ended']!r}"
    if record["ended"] is None and not record["stopped"]:
        yield "it has no end and does not say that it was stopped"


def _result_faults(result: dict[str, Any], record: dict[str, Any]) -> Iterator[str]:
    name, outcome = result["test"], result["outcome"]
    unknown = [clause for clause in (*result["clauses"], *result["refuses"]) if clause not in catalogue().clauses]
    if unknown or not (result["clauses"] or result["refuses"]):
        yield f"{name}: clauses {unknown or 'none'}, which the contract has not"
    if outcome not in _KINDS:
        yield f"{name}: outcome {outcome!r}, expected one of {', '.join(_KINDS)}"
    elif outcome in ("pass", "not-run") and result["message"]:
        yield f"{name}: {outcome}, with the message {result['message']!r} of a failure"
    elif outcome == "fail" and not result["message"]:
        yield f"{name}: failed without a message"
    elif outcome == "refused":
        yield from _refusal_faults(result, record)
    elif outcome == "waived":
        yield from _waiver_faults(result, record)
    if outcome == "pass":
        for dtype, (error, limit) in result["errors"].items():
            if not error <= limit:
                yield f"{name}: passed with an error of {error} in {dtype}, where {limit} is allowed"


def _refusal_faults(result: dict[str, Any], record: dict[str, Any]) -> Iterator[str]:
    refusal, backend = result["refusal"], record["backend"]
    where = f"{result['test']}: refused"
    if refusal is None or backend is None or refusal.get("capability") not in backend["capabilities"]:
        yield f"{where} without a declared capability"
        return
    name, value = refusal["capability"], str(refusal.get("value"))
    declared, core = backend["capabilities"][name], _NEVER_REFUSED.get(name, ())
    if declared is None or declared is True:
        yield f"{where} for {name}={value}, where the backend declares no limit"
    elif isinstance(declared, list) and value in map(str, declared):
        yield f"{where} for {name}={value}, which the backend declares to support"
    elif isinstance(declared, int) and declared is not False and not (value.isdecimal() and int(value) > declared):
        yield f"{where} for {name}={value}, which is within the declared {declared}"
    small = name.startswith("max_") and value.isdecimal() and int(value) <= max(core)
    if small or value in map(str, core) or True in core[:1]:
        yield f"{where} for {name}={value}, which is of the core and cannot be refused"


def _waiver_faults(result: dict[str, Any], record: dict[str, Any]) -> Iterator[str]:
    device = (record["backend"] or {"info": {}})["info"].get("device")
    mine = [w for w in record["waivers"] if w["test"] == result["test"] and w["device"] == device]
    if not mine:
        yield f"{result['test']}: waived, and no waiver names it for {device!r}"
        return
    (waiver,) = mine[:1]
    if waiver["clause"] not in (*result["clauses"], *result["refuses"]):
        yield f"{result['test']}: waived for clause {waiver['clause']}, which is not the test's"
    try:
        expired = date.fromisoformat(waiver["expiry"]) < datetime.fromisoformat(record["started"]).date()
    except ValueError:
        expired = True
    if expired:
        yield f"{result['test']}: its waiver's expiry {waiver['expiry']} had passed"
    if not waiver["reason"].strip():
        yield f"{result['test']}: its waiver gives no reason"


def _tolerance_faults(record: dict[str, Any]) -> Iterator[str]:
    largest: dict[str, float] = {}
    for result in record["results"]:
        for dtype, (error, limit) in result["errors"].items():
            largest[dtype] = max(error, largest.get(dtype, 0.0))
            allowed = {catalogue().tolerances.limit.get(name) for name in (dtype, "tf32")}
            if limit not in allowed:
                yield f"{result['test']}: held {dtype} against {limit}, a limit the contract has not"
    if {dtype: seen.get("largest") for dtype, seen in record["tolerances"].items()} != largest:
        yield f"its largest errors are not those of its results, {largest}"


def _whole_run(record: dict[str, Any]) -> Iterator[str]:
    """What makes any complete run a failed one, whatever its tests say."""
    backend = record["backend"]
    for name, values in _NEVER_REFUSED.items() if backend is not None else ():
        limit = backend["capabilities"].get(name)
        for value in values:
            member = not isinstance(limit, list) or value in limit
            small = isinstance(limit, list) or limit is None or isinstance(limit, bool) or value <= limit
            if not member or not small or limit is False:
                yield f"the core cannot be refused: {name} = {limit!r}"
    for waiver in record["waivers"]:
        outcome = next((r["outcome"] for r in record["results"] if r["test"] == waiver["test"]), None)
        here = backend is not None and waiver["device"] == backend["info"].get("device")
        if here and outcome in ("pass", "refused"):
            yield f"a stale waiver of {waiver['test']}"
    if not record["complete"] or record["stopped"] or backend is None:
        return
    shown: dict[tuple[str, str], bool] = {}
    for result in record["results"]:
        for kind in ("clauses", "refuses"):
            for clause in result[kind]:
                shown[kind, clause] = shown.get((kind, clause), False) or result["outcome"] in ("pass", "waived")
    hidden = [
        clause
        for (kind, clause), seen in shown.items()
        if not seen and (kind == "clauses" or ("clauses", clause) not in shown)
    ]
    for clause in hidden:
        yield f"clause {clause} was never shown"
    launches = record["counters"].get("launches", {})
    for operation in _MUST_HAVE_RUN if record["profile"] == "full" else ():
        if not launches.get(operation) and not record["delegated"].get(operation):
            yield f"nothing launched {operation}"
