"""The check of a TPU host: its dry run, without the packages that such a host does not have."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from forebay.hardware.checking import report
from forebay.hardware.checking.bandwidth import Size, Ways, measured
from forebay.hardware.checking.part import Task
from forebay.hardware.tpu import bandwidth, faults, peers
from forebay.hardware.tpu.plan import CHECK
from forebay.runtime import Settings, open_backend
from forebay.specs.faults.seeding import check_applies

from .dry import Ran, dry_run

ABSENT = (
    *("torch", "transformers", "triton", "numba", "llvmlite", "typer", "rich", "matplotlib", "huggingface_hub"),
    *("pydantic", "pydantic_core", "gguf", "requests", "prometheus_client", "importlinter"),
)
"""More than on an H200; tokenizers and safetensors are there, or no model could be opened."""
MODEL = ("safetensors", "tokenizers", "jinja2", "filelock")
NUMBERS = ("gb_s", "median_s", "best_s", "to_ceiling", "ceiling_gb_s", "median_step_s", "best_step_s", "to_captured")
"""Columns that would claim something of a device."""


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return dry_run("tpu", ABSENT, tmp_path_factory.mktemp("dry"))


def test_every_part_of_the_dry_run_has_a_result(dry: Ran) -> None:
    assert dry.status == 0, dry.said
    assert tuple(dry.parts) == CHECK.parts
    assert {name: part["status"] for name, part in dry.parts.items()} == {
        "facts": "passed",
        "kernels": "passed",
        "tokens": "passed",
        "suite": "passed",
        "faults": "passed",
        "suite-full": "passed",
        "bandwidth": "dry",
        "overhead": "dry",
    }
    for name in ("suite", "suite-full"):
        summary = dry.parts[name]["data"]["summary"]
        assert 1 <= summary["pass"] == summary["total"]
    tokens = dry.parts["tokens"]["data"]
    assert (tokens["reference"], tokens["compared"] >= 6, tokens["distinct_tokens"] >= 4) == ("tpu:xla", True, True)
    assert all(row["killed_by"] for row in dry.parts["faults"]["data"]["faults"])
    assert dry.parts["kernels"]["data"]["ended"] == dry.parts["kernels"]["data"]["cases"]


def test_facts_name_the_versions_and_the_device(dry: Ran) -> None:
    facts = dry.parts["facts"]["data"]
    assert facts["info"]["device"]
    assert {"jax", "jaxlib", "libtpu"} <= facts["versions"].keys()
    assert facts["versions"]["jax"] != "not installed"
    assert facts["devices"][0].keys() == {"id", "platform", "kind", "memory"}


def test_a_dry_run_claims_nothing_of_a_device(dry: Ran) -> None:
    assert dry.report["dry"] is True
    assert CHECK.dry in (dry.out / "report.md").read_text(encoding="utf-8")
    for name in CHECK.timing:
        rows = dry.parts[name]["data"]["rows"]
        assert rows
        assert [row for row in rows if row.keys() & set(NUMBERS)] == []
    assert {row["step"] for row in dry.parts["overhead"]["data"]["rows"]} == {"empty", "model"}


def test_it_leaves_few_and_small_files(dry: Ran) -> None:
    files = list(dry.out.rglob("*"))
    assert {"report.json", "report.md", "log.txt", "conform-smoke.json", "conform-full.json"} <= {f.name for f in files}
    assert len(files) <= report.MOST_FILES
    assert sum(file.stat().st_size for file in files) < report.MOST_BYTES


def test_without_what_opens_a_model_the_parts_say_so(tmp_path: Path) -> None:
    ran = dry_run("tpu", (*ABSENT, *MODEL), tmp_path, "--only", "tokens", "overhead")
    tokens, overhead = ran.parts["tokens"], ran.parts["overhead"]
    assert tokens["status"] == "not present"
    assert "tokenizers" in tokens["problems"][0]
    assert overhead["status"] == "dry"
    assert {row["step"] for row in overhead["data"]["rows"]} == {"empty"}
    assert "not present" in overhead["problems"][0]
    assert "tokens" not in ran.report["bad"]


def test_the_seeded_faults_apply() -> None:
    known = faults.known()
    assert known.keys() == faults.TESTS.keys()
    for fault in known.values():
        check_applies(fault)


def test_sizes_span_8k_to_1m_tokens_and_fit_a_table() -> None:
    tokens = [size.batch * size.context for size in bandwidth.SIZES]
    assert (tokens[0], tokens[-1]) == (8_192, 1_048_576)
    assert tokens == sorted(tokens)


def test_peers_are_asked_at_one_group_only() -> None:
    assert peers.peers(8, 64, 1, 128, 2) == ({}, {})
    ready, absent = peers.peers(8, 64, peers.AT_GROUP, 128, 2)
    assert {*ready, *absent} == {"paged_attention", "ragged_paged_attention"}
    assert bandwidth.peers_of(Size(8, 64), 1, 128) == ({}, {})


def test_what_times_a_device_gives_rates_on_the_host_and_refusals_of_peers(tmp_path: Path) -> None:
    task = Task("tpu:xla", False, tmp_path, tmp_path, tmp_path, time.monotonic() + 600, lambda _status, _data: None)
    size = Size(2, 64)
    ways = Ways((size,), bandwidth.ours, bandwidth.timed, bandwidth.read_ceiling, bandwidth.peers_of)
    with open_backend("tpu:xla", settings=Settings()) as backend:
        rows = {row["way"]: row for row in measured(backend, task, ways, 128, peers.AT_GROUP, size, 2**19)}
    ours = rows.pop("forebay direct")
    assert ours["gb_s"] > 0
    assert ours["to_ceiling"] == pytest.approx(ours["gb_s"] / ours["ceiling_gb_s"])
    assert rows.keys() == {"paged_attention", "ragged_paged_attention"}
    assert "Only interpret mode" in rows["paged_attention"]["error"]  # the host runs no TPU kernel
    assert "TPU version" in rows["ragged_paged_attention"]["error"]
