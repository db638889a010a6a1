"""Every kind of edit of a record, and what the verifier has to say of it."""

from __future__ import annotations

from dataclasses import dataclass

from tests.suite.edits import (
    DECODE,
    GATHER,
    HEAD,
    QUERY,
    REFUSAL,
    RIGHT,
    SINKS,
    STAGE,
    WAIVED,
    Edit,
    add,
    become,
    both,
    change,
    claim_tf32,
    count_again,
    days_after_start,
    drop,
    each,
    exceed,
    of,
    shift,
    smuggle_fail,
    top,
    unread,
    waive,
    waive_all,
    waiver,
    widen,
    within,
)


@dataclass(frozen=True)
class Mutation:
    """An edit of one of the records by name, and words of a fault that has to be named, whatever the digest says."""

    name: str
    says: str
    edit: Edit
    of: str = "good"


NO_FAILURE = {"message": "", "failure": None}
CORE_256 = "the core cannot be refused, and head_dims=(8, 256)"
MUTATIONS = (
    # which tests there are
    Mutation("a result missing", f"1 missing result(s): {GATHER}", drop(GATHER)),
    Mutation("a refused result missing", f"1 missing result(s): {HEAD}", drop(HEAD)),
    Mutation(
        "a failed result missing",
        f"1 missing result(s): {WAIVED}",
        both(drop(WAIVED), top(verdict="conformant")),
        "bad",
    ),
    Mutation("a result twice", f"1 duplicate result(s): {STAGE}", add(STAGE)),
    Mutation(
        "a failure beside its pass",
        f"1 duplicate result(s): {WAIVED}",
        add(WAIVED, outcome="pass", **NO_FAILURE),
        "bad",
    ),
    Mutation(
        "a result too many", "1 extra result(s): test_every.py::test_more", add(STAGE, test="test_every.py::test_more")
    ),
    Mutation("a result renamed", "1 missing result(s)", change(RIGHT, test="test_rich.py::test_right[2]")),
    Mutation("results in another order", "its results are not in the suite's order", lambda r: r["results"].reverse()),
    Mutation("no results", "missing result(s)", both(top(results=[]), count_again)),
    # what they are tests of
    Mutation(
        "clauses of a test edited",
        f"{RIGHT}: clauses ['D6'], the suite's test has ['D5']",
        change(RIGHT, clauses=["D6"]),
    ),
    Mutation("a clause added to a test", "clauses ['D5', 'L1'], the suite's", change(RIGHT, clauses=["D5", "L1"])),
    Mutation("a clause dropped from a test", f"{DECODE}: clauses", lambda r: of(r, DECODE)["clauses"].pop()),
    Mutation("clauses dropped", f"{RIGHT}: no clause", change(RIGHT, clauses=[])),
    Mutation("an unknown clause", "the contract has no clause D99", change(RIGHT, clauses=["D99"])),
    Mutation("refusals dropped", f"{REFUSAL}: refuses []", change(REFUSAL, refuses=[])),
    Mutation("a case claimed", f"{RIGHT}: cases ['G02']", change(RIGHT, cases=["G02"])),
    # outcomes
    Mutation("fail to pass", "with the message", become(WAIVED, "pass"), "bad"),
    Mutation("fail to pass, its message gone", "it tells of a failure", become(WAIVED, "pass", message=""), "bad"),
    Mutation(
        "fail to pass, all of it gone",
        "its verdict is 'failed', its content says 'conformant'",
        become(WAIVED, "pass", **NO_FAILURE),
        "bad",
    ),
    Mutation(
        "fail to pass, uncounted",
        "its summary says",
        both(change(WAIVED, outcome="pass", **NO_FAILURE), top(verdict="conformant")),
        "bad",
    ),
    Mutation(
        "fail to refused", "refused without a declared capability", become(WAIVED, "refused", failure=None), "bad"
    ),
    Mutation("fail to waived", "waived, and no waiver names it", become(WAIVED, "waived"), "bad"),
    Mutation(
        "fail to waived, with a waiver",
        "its verdict is 'failed', its content says 'conformant with waivers'",
        smuggle_fail,
        "bad",
    ),
    Mutation("fail to not-run", f"{WAIVED}: not-run, with the message", become(WAIVED, "not-run"), "bad"),
    Mutation("a failure without a message", "fail, and no message says why", change(WAIVED, message=""), "bad"),
    Mutation(
        "pass to not-run",
        "its verdict is 'conformant with waivers', its content says 'failed'",
        become(RIGHT, "not-run", seconds=0.0),
    ),
    Mutation("not run, and it took time", "not run, and it took time", become(RIGHT, "not-run", seconds=0.5)),
    Mutation("not-run to pass", f"{DECODE}: pass, and no backend was opened", become(DECODE, "pass"), "away"),
    Mutation("waived to pass", f"waiver of {WAIVED}: its state is 'used'", become(WAIVED, "pass", **NO_FAILURE)),
    Mutation("waived to fail", "failed, where a waiver excuses it", become(WAIVED, "fail")),
    Mutation("pass to waived", "waived, and no message says why", become(RIGHT, "waived")),
    Mutation("refused to pass", "it names what was refused", become(HEAD, "pass", message="")),
    Mutation("an unknown outcome", 'outcome: "skipped", expected one of', become(RIGHT, "skipped")),
    # numbers
    Mutation("counts edited", "its summary says", within("summary", **{"pass": 9})),
    Mutation("the total edited", "its summary says", within("summary", total=0)),
    Mutation(
        "the verdict lowered", "its verdict is 'failed', its content says 'conformant with", top(verdict="failed")
    ),
    Mutation(
        "waivers left out of the verdict",
        "its verdict is 'conformant', its content says 'conformant with waivers'",
        top(verdict="conformant"),
    ),
    Mutation(
        "waivers told of a verdict without any", "content says 'passed'", top(verdict="passed with waivers"), "smoke"
    ),
    Mutation(
        "a clause waived as a whole",
        "a problem it does not name: clause D5: every test of its values was waived (4)",
        waive_all,
    ),
    Mutation("tf32 claimed in vain", "a problem it does not name: tf32 is claimed", claim_tf32),
    Mutation(
        "the verdict raised", "its verdict is 'conformant', its content says 'failed'", top(verdict="conformant"), "bad"
    ),
    Mutation(
        "smoke called conformant",
        "its verdict is 'conformant', its content says 'passed'",
        top(verdict="conformant"),
        "smoke",
    ),
    Mutation("a tolerance widened", "where the contract allows", widen),
    Mutation("an error above its limit", "pass with an error of", exceed),
    Mutation("tf32 claimed by nobody", "where the contract allows", change(STAGE, errors={"float32": [0.0, 1e-3]})),
    Mutation("an unknown dtype", "held float8 against", change(STAGE, errors={"float8": [0.0, 1.0]})),
    Mutation("a largest error edited", "its largest errors are", within("tolerances", "float32", largest=0.0)),
    Mutation(
        "the test of a largest error edited", "its largest errors are", within("tolerances", "float32", test=STAGE)
    ),
    Mutation("largest errors dropped", "its largest errors are", top(tolerances={})),
    Mutation("a negative error", "expected an error and its limit", change(STAGE, errors={"float32": [-1.0, 5e-6]})),
    Mutation("an error as a text", "expected an error and its limit", change(STAGE, errors={"float32": ["0", 5e-6]})),
    Mutation("tests longer than the run", "its tests took", change(STAGE, seconds=1e5)),
    # counters
    Mutation(
        "launches zeroed",
        "no launch of paged_decode was counted",
        lambda r: r["counters"]["launches"].update(dict.fromkeys(r["counters"]["launches"], 0)),
    ),
    Mutation(
        "one launch dropped", "no launch of gather was counted", lambda r: r["counters"]["launches"].pop("gather")
    ),
    Mutation("no counters", "it has no counters of its backend", top(counters={})),
    Mutation("captures zeroed", "its counters know no capture", within("counters", capture=0)),
    Mutation("a negative count", "launches: stage: -1, expected a count", within("counters", "launches", stage=-1)),
    Mutation("counters unreadable", "its counters could not be read (why)", unread),
    Mutation("delegation denied", "its delegated operations are not those", within("counters", "delegated", stage=4)),
    Mutation("delegation claimed", "its delegated operations are not those", top(delegated={"gather": 1})),
    Mutation("uploads of nothing", "its counters know no upload_bytes", within("counters", upload_bytes=0)),
    Mutation("an operation that is none", "unknown key 'frobnicate'", within("counters", "launches", frobnicate=3)),
    Mutation(
        "a delegated operation that is none",
        "unknown key 'frobnicate'",
        both(within("counters", "delegated", frobnicate=3), within("delegated", frobnicate=3)),
    ),
    Mutation(
        "a launch of each",
        "and 1 launches of paged_decode, merge_partials were counted",
        lambda r: r["counters"]["launches"].update(dict.fromkeys(r["counters"]["launches"], 1)),
    ),
    Mutation("tests that took no time", f"{STAGE}: pass, and it took no time", each("seconds", 0.0)),
    # waivers
    Mutation("a waiver removed", "waived, and no waiver names it", top(waivers=[])),
    Mutation("a waiver added", f"a problem it does not name: stale waiver: {RIGHT}", waive(RIGHT, state="stale")),
    Mutation("a waiver added as used", f"waiver of {RIGHT}: its state is 'used'", waive(RIGHT)),
    Mutation("a waiver expired on the day", "it had expired on", lambda r: waiver(expiry=days_after_start(r, -1))(r)),
    Mutation("an expiry that is no date", "is no date", waiver(expiry="never")),
    Mutation("a waiver of another clause", "clause L1 is not the test's", waiver(clause="L1")),
    Mutation("a waiver of another device", "waived, and no waiver names it", waiver(device="newer", state="elsewhere")),
    Mutation("a waiver of no test", "the suite has no such test", waive("test_rich.py::test_none", state="idle")),
    Mutation("a waiver twice", "2 of them for 'simulated accelerator'", waive(WAIVED)),
    Mutation("a waiver without a reason", "expected a text that says something", waiver(reason=" ")),
    Mutation("a waiver's state edited", "its test's outcome says 'used'", waiver(state="idle")),
    # capabilities
    Mutation(
        "a refusal of what is claimed",
        "which the backend declares to support",
        within("backend", "capabilities", head_dims=[8, 16, 64, 128]),
    ),
    Mutation(
        "a refusal without a limit",
        "where the backend declares no limit",
        within("backend", "capabilities", head_dims=None),
    ),
    Mutation(
        "a refused feature claimed", f"{SINKS}: refused for sinks=", within("backend", "capabilities", sinks=True)
    ),
    Mutation(
        "a refusal within the limit",
        "which is within the declared 3",
        within("backend", "capabilities", max_query_len=3),
    ),
    Mutation(
        "a refusal of the core",
        "which is of the core and cannot be refused",
        lambda r: of(r, HEAD)["refusal"].update(value="64"),
    ),
    Mutation(
        "a refusal of the least query",
        "max_query_len=1, which is of the core",
        lambda r: of(r, QUERY)["refusal"].update(value="1"),
    ),
    Mutation(
        "a refusal of nothing",
        "where the backend declares no limit",
        lambda r: of(r, HEAD)["refusal"].update(value="None"),
    ),
    Mutation(
        "a refusal of no capability",
        "refused without a declared capability",
        lambda r: of(r, HEAD)["refusal"].update(capability="mondays"),
    ),
    Mutation("a refusal removed", "refused without a declared capability", change(HEAD, refusal=None)),
    Mutation("a refusal with two messages", "refused with two messages", change(HEAD, message="no")),
    Mutation(
        "a refusal by the backend itself",
        f"{HEAD}: refused in forebay.backends.sim.driver, where no check",
        lambda r: of(r, HEAD)["refusal"].update(raised_in="forebay.backends.sim.driver"),
    ),
    Mutation(
        "a refusal by the suite",
        f"{HEAD}: refused in forebay.specs.suite.kv, where no check",
        lambda r: of(r, HEAD)["refusal"].update(raised_in="forebay.specs.suite.kv"),
    ),
    Mutation(
        "a refusal by no module",
        f"{HEAD}: refused in forebay.specs.mondays, where no check",
        lambda r: of(r, HEAD)["refusal"].update(raised_in="forebay.specs.mondays"),
    ),
    Mutation(
        "a refusal of what nobody asks for",
        "recapture_at_boundary=True, which is no limit of what can be asked",
        lambda r: of(r, HEAD)["refusal"].update(capability="recapture_at_boundary", value="True"),
    ),
    Mutation(
        "a refusal of a size that is none",
        "max_query_len=long, which is no number",
        lambda r: of(r, QUERY)["refusal"].update(value="long"),
    ),
    Mutation(
        "a refusal of capture",
        "which is of the core",
        both(
            within("backend", "capabilities", capture=False),
            lambda r: of(r, HEAD)["refusal"].update(capability="capture"),
        ),
    ),
    Mutation("a gap in the core not told", CORE_256, within("backend", "capabilities", head_dims=[8, 256])),
    Mutation(
        "a gap in the core told but no problem",
        f"a problem it does not name: {CORE_256}",
        both(
            within("backend", "capabilities", head_dims=[8, 256]),
            within("backend", core_gaps=[f"{CORE_256} refuses {n}" for n in (64, 128)]),
        ),
    ),
    Mutation("a capability dropped", "capabilities: no 'lse'", lambda r: r["backend"]["capabilities"].pop("lse")),
    Mutation(
        "a capability invented", "capabilities: unknown key 'mondays'", within("backend", "capabilities", mondays=True)
    ),
    Mutation("no layouts", "layouts: [], expected some, each once", within("backend", "capabilities", layouts=[])),
    Mutation(
        "a layout that is none",
        'layouts 1: "XYZ", expected one of NHD',
        within("backend", "capabilities", layouts=["XYZ"]),
    ),
    Mutation(
        "a dtype that is none",
        'kv_dtypes 3: "int3", expected one of float32',
        within("backend", "capabilities", kv_dtypes=["float32", "bfloat16", "int3"]),
    ),
    Mutation(
        "a size twice",
        "head_dims: [8, 64, 128, 8], expected",
        within("backend", "capabilities", head_dims=[8, 64, 128, 8]),
    ),
    Mutation(
        "a size of nothing", "head_dims 1: 0, expected a size", within("backend", "capabilities", head_dims=[0, 64])
    ),
    Mutation("a problem invented", "a problem that it has not: dust", top(problems=["dust"])),
    # what was asked
    Mutation("smoke passed off as full", "missing result(s)", top(profile="full", verdict="conformant"), "smoke"),
    Mutation("full passed off as smoke", "extra result(s)", top(profile="smoke", verdict="passed")),
    Mutation("another profile", 'profile: "quick", expected one of smoke, full', top(profile="quick")),
    Mutation("a selection", "it calls itself a selection", top(complete=False, verdict="passed")),
    Mutation("a selection called complete", "and was selected by -k decode", top(selection=["-k decode"])),
    Mutation("another backend asked for", "asked for 'cpu', but 'limited' was judged", top(requested="cpu")),
    Mutation(
        "another mode asked for", "asked for 'limited:fast', but its mode '' was judged", top(requested="limited:fast")
    ),
    Mutation("an option for a name", "but 'limited' was judged", top(requested="--help")),
    Mutation("the backend absent", "it has counters of a backend that was never opened", top(backend=None)),
    Mutation(
        "the backend absent, and what follows",
        "its verdict is 'conformant with waivers', its content says 'failed'",
        top(backend=None, counters={}, delegated={}),
    ),
    Mutation(
        "a simulator called an accelerator",
        "it calls 'limited' accelerator, the installed one is simulated",
        within("backend", kind="accelerator"),
    ),
    Mutation("a simulator called anything", 'kind: "silicon", expected one of', within("backend", kind="silicon")),
    Mutation("another version of the backend", "'forebay-limited 99' was judged", within("backend", version="99")),
    Mutation(
        "another distribution", "installed is 'forebay-limited 2.5'", within("backend", distribution="forebay-other")
    ),
    Mutation("another Forebay", "written by forebay 0.0.0, installed is", within("versions", forebay="0.0.0")),
    Mutation("an older Python", "python 2.7.18, on which Forebay does not run", within("versions", python="2.7.18")),
    Mutation("a version that is none", "numpy 'new' is no version", within("versions", numpy="new")),
    Mutation("fewer examples", "its inputs were drawn by", within("seeds", hypothesis_max_examples=1)),
    Mutation("random examples", "its inputs were drawn by", within("seeds", hypothesis="random")),
    # the suite, the contract, the form
    Mutation("another suite", "suite 0000000000000000, installed is", top(suite_hash="0" * 64)),
    Mutation("another contract", "contract 9.9, installed is", top(spec_version="9.9")),
    Mutation("another format", "format: 2, expected 1", top(format=2)),
    Mutation("true for one", "format: true, expected 1", top(format=True)),
    Mutation("true for a count", "summary: waived: true, expected a count", within("summary", waived=True)),
    Mutation("an unknown key", "record: unknown key 'note'", top(note="all well")),
    Mutation("an unknown key of a result", "unknown key 'note'", each("note", 1)),
    # its end
    Mutation(
        "a crash passed off as an end", "it has no end and does not say that it was stopped", top(stopped=""), "crashed"
    ),
    Mutation(
        "a crash passed off as complete",
        "its verdict is 'conformant', its content says 'failed'",
        top(stopped="", ended="2999-01-01T00:00:00+00:00", verdict="conformant"),
        "crashed",
    ),
    Mutation(
        "a backend that did not start passed off",
        "its verdict is 'conformant', its content says 'failed'",
        top(stopped="", verdict="conformant"),
        "away",
    ),
    Mutation("an end passed off as a stop", "(tired)", top(stopped="tired")),
    Mutation("another test was running", "why it stopped (", top(running="test_every.py::test_refusal"), "crashed"),
    Mutation(
        "a test that passed was running",
        "was running when it stopped, and its outcome is 'pass'",
        top(running=GATHER, stopped=f"its process died with status 7, in {GATHER}"),
        "crashed",
    ),
    Mutation(
        "what came later was asked",
        f"{DECODE} was running when it stopped, and {GATHER}, which comes after it, has an outcome",
        both(
            top(running=DECODE, stopped=f"its process died with status 7, in {DECODE}"),
            become(DECODE, "not-run", seconds=0.0, errors={}),
        ),
        "crashed",
    ),
    Mutation("no end", "it has no end and does not say that it was stopped", top(ended=None)),
    Mutation("an end before the start", "it ended before it started", shift(ended=-3600)),
    Mutation("a run of the future", "it is of the future", shift(started=10**9, ended=10**9)),
    Mutation("a start that is no time", "its times are 'noon'", top(started="noon")),
    Mutation(
        "times without a zone", "name no zone", lambda r: r.update(started=r["started"][:19], ended=r["ended"][:19])
    ),
    Mutation("times of two kinds", "its times are", lambda r: r.update(started=r["started"][:19])),
)
