"""What an engine reports: every key documented, every number true, and the same as Prometheus text and as a file."""

from __future__ import annotations

import builtins
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from forebay.runtime import Engine, Model, SamplingParams
from forebay.runtime import report as report_module
from forebay.runtime.latency import BOUNDS
from forebay.runtime.report_file import ReportFile
from forebay.specs import Backend, InvalidInput
from forebay.specs.errors import Unsupported
from tests.runtime.harness import make_engine, prompt

FIVE = SamplingParams(max_tokens=5, ignore_eos=True)

DRAWN = SamplingParams(max_tokens=5, ignore_eos=True, temperature=1.0, seed=3)


@pytest.fixture
def busy(tiny_model: Model, backend: Backend) -> Iterator[Engine]:
    """An engine that has finished three requests and cancelled one, runs one, and lets one wait."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.004
        return now[0]

    with make_engine(tiny_model, backend, slots=1, block_size=4, max_len=64, prefix_reuse=True, clock=clock) as engine:
        engine.generate([prompt(9), prompt(9), prompt(3)], [FIVE, FIVE, DRAWN])
        engine.cancel(engine.add(prompt(4), FIVE))
        engine.add(prompt(6), SamplingParams(max_tokens=50, ignore_eos=True))
        engine.add(prompt(6), FIVE)
        for _ in range(3):
            engine.step()
        yield engine


def keys_of(data: Any) -> set[str]:
    """Names of the report's fields, to the depth at which they are fixed."""
    top = {"configuration", "backend", "model", "engine", "requests", "memory", "latencies"}
    found = set(data)
    for section in top - {"configuration"}:
        found |= set(data[section])
    found |= {k for kind in data["latencies"].values() if isinstance(kind, dict) for k in kind}
    return found | {k for lane in data["lanes"] for k in lane}


def test_every_key_is_documented(busy: Engine) -> None:
    documented = set(re.findall(r"``(\w+)``", report_module.__doc__ or ""))
    assert keys_of(busy.report()) <= documented


def test_numbers_are_those_of_what_was_done(busy: Engine) -> None:
    report = busy.report()
    assert json.loads(json.dumps(report)) == report, "plain data"
    engine, memory, latencies = report["engine"], report["memory"], report["latencies"]
    assert (engine["finished"], engine["cancelled"], engine["deadline"], engine["error"]) == (3, 1, 0, 0)
    assert report["requests"] == {"waiting": 1, "running": 1}
    assert engine["tokens"] == 15 + 4, "the running request has its prompt's token and those of three steps"
    assert engine["reused_tokens"] == 8, "two full blocks of the second of two equal prompts"
    assert latencies["time_to_first_token_s"]["count"] == 4
    assert latencies["inter_token_s"]["count"] == engine["tokens"] - 4
    assert latencies["queue_wait_s"]["count"] == 4
    assert latencies["worst_wait_steps"] >= 3
    assert latencies["worst_wait_s"] >= latencies["queue_wait_s"]["max"] > 0
    assert memory["blocks_free"] + memory["blocks_allocated"] + memory["blocks_in_flight"] == 16
    assert 0 < memory["blocks_cached"] <= memory["blocks_allocated"]
    assert report["configuration"]["slots"] == {"value": 1, "source": "call", "origin": ""}


def test_who_gave_up_waiting_counts_for_the_worst_wait(tiny_model: Model, backend: Backend) -> None:
    now = [0.0]
    with make_engine(tiny_model, backend, slots=1, block_size=4, max_len=64, clock=lambda: now[0]) as engine:
        engine.add(prompt(6), SamplingParams(max_tokens=50, ignore_eos=True))
        engine.step()
        overdue = engine.add(prompt(6), FIVE, deadline=8.0)
        now[0] = 8.5
        engine.step()
        now[0] = 100.0
        latencies = engine.report()["latencies"]
        assert overdue.finish_reason == "deadline"
        assert (latencies["worst_wait_s"], latencies["worst_wait_steps"]) == (8.5, 1)
        assert latencies["queue_wait_s"]["count"] == 1


def samples_of(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a Prometheus text by name and labels, read by the client's own parser."""
    samples: list[Sample] = [s for family in text_string_to_metric_families(text) for s in family.samples]
    found = {(s.name, frozenset(s.labels.items())): s.value for s in samples}
    assert len(found) == len(samples), "no sample comes twice"
    return found


def test_prometheus_text_says_what_the_report_says(busy: Engine) -> None:
    report, text = busy.report(), busy.metrics_text()
    found = samples_of(text)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    for end in ("finished", "cancelled", "deadline", "error"):
        assert value("forebay_requests_total", end=end) == report["engine"][end]
    for key, name in {
        "steps": "forebay_decode_steps_total",
        "eager_steps": "forebay_eager_decode_steps_total",
        "tokens": "forebay_tokens_total",
        "prefills": "forebay_prefills_total",
        "prefill_tokens": "forebay_prefill_tokens_total",
        "reused_tokens": "forebay_reused_tokens_total",
        "forks": "forebay_forks_total",
        "reseeds": "forebay_reseeds_total",
        "preemptions": "forebay_preemptions_total",
        "block_copies": "forebay_kv_block_copies_total",
    }.items():
        assert value(name) == report["engine"][key]
    for act, key in {"saved": "offloaded", "restored": "restored", "refused": "offload_refused"}.items():
        assert value("forebay_offloads_total", act=act) == report["engine"][key]
    for state, count in report["requests"].items():
        assert value("forebay_current_requests", state=state) == count
    for state in ("free", "allocated", "in_flight", "cached", "offloaded"):
        assert value("forebay_kv_blocks", state=state) == report["memory"][f"blocks_{state}"]
    for key in ("capacity_tokens", "kv_bytes", "weight_bytes"):
        assert value(f"forebay_{key.replace('capacity', 'kv_capacity')}") == report["memory"][key] > 0
    for act in ("run", "capture", "replay", "recapture", "declined", "uploads", "downloads", "syncs"):
        assert value("forebay_device_acts_total", act=act) == report["counters"][act]
    assert value("forebay_upload_bytes_total") == report["counters"]["upload_bytes"] > 0
    for operation, count in report["counters"]["launches"].items():
        assert value("forebay_kernel_launches_total", operation=operation) == count
    assert len(report["lanes"]) == 2, "a greedy one and one that draws"
    for lane in report["lanes"]:
        labels = {"bucket": str(lane["bucket"]), "variant": lane["variant"]}
        assert value("forebay_lane_acts_total", **labels, act="replay") == lane["replay"]
    info = next(dict(labels) for name, labels in found if name == "forebay_engine_info")
    assert (info["arm"], info["backend"], info["kv_dtype"]) == ("captured", "cpu", "float32")


def test_latencies_are_histograms_in_seconds(busy: Engine) -> None:
    text = busy.metrics_text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found, latencies = samples_of(text), busy.report()["latencies"]
    for key in ("queue_wait", "time_to_first_token", "inter_token"):
        name, times = f"forebay_{key}_seconds", latencies[f"{key}_s"]
        assert families[name].type == "histogram"
        assert found[f"{name}_count", frozenset()] == times["count"] > 0
        assert found[f"{name}_sum", frozenset()] == pytest.approx(times["sum"])
        counts = [found[f"{name}_bucket", frozenset({("le", str(b))})] for b in (*BOUNDS, "+Inf")]
        assert counts == [*times["buckets"].values(), times["count"]]
        assert counts == sorted(counts)
    for name, family in families.items():
        assert name.startswith("forebay_")
        assert family.documentation.endswith(".")
        assert all(s.name.endswith("_total") for s in family.samples if family.type == "counter")


# -- files -------------------------------------------------------------------------------------------------------------
def test_a_report_file_holds_the_report(busy: Engine, tmp_path: Path) -> None:
    report = busy.report()
    ReportFile.at(tmp_path / "report.json").write(report)
    ReportFile.at("report.prom").write(report)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert samples_of((tmp_path / "report.prom").read_text())["forebay_tokens_total", frozenset()] == 19
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.json", "report.prom"]


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ReportFile.at(tmp_path / "report.json")
    file.write({"turn": 1})

    def full(path: Path, text: str, **options: Any) -> int:
        with path.open("w") as half:
            half.write(text[:3])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InvalidInput, match=r"report\.json' cannot be written: no space"):
        file.write({"turn": 2})
    assert json.loads((tmp_path / "report.json").read_text()) == {"turn": 1}
    assert [f.name for f in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("path", "message"), [("gone/report.json", "there is no folder 'gone'"), (".", "is a folder"), ("", "is a folder")]
)
def test_a_bad_path_is_refused_before_anything_is_written(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ReportFile.at(path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_prometheus_client_is_named_with_what_to_install(
    tiny_model: Model, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine, its report and its JSON need no such package."""
    honest = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return honest(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "forebay.runtime.metrics", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with make_engine(tiny_model, backend, slots=1, block_size=4, max_len=64) as engine:
        for act in (engine.metrics_text, lambda: ReportFile.at("report.prom")):
            with pytest.raises(Unsupported, match=r"pip install 'forebay\[metrics\]'"):
                act()
        ReportFile.at("report.json").write(engine.report())
    assert json.loads(Path("report.json").read_text())["engine"]["tokens"] == 0
