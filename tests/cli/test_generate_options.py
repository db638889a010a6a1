"""Options of ``forebay generate``: settings, sampling, streamed text, reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families

from forebay.runtime import Engine
from forebay.runtime.cli import app
from forebay.runtime.cli import generate as generate_module
from forebay.runtime.core import EngineCore
from forebay.runtime.settings import SETTINGS
from forebay.specs.errors import DeviceLost
from tests.cli.running import Run, assert_one_line
from tests.models.tiny import write_folder

PROMPTS = ("hello world", "or else", "hello")
SMALL = ("--max-tokens", "8", "--ignore-eos", "--slots", "2", "--max-len", "32", "--block-size", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


def results_of(out: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads(out)["results"]
    return results


# -- settings ----------------------------------------------------------------------------------------------------------
def test_every_setting_has_its_option() -> None:
    program: Any = typer.main.get_command(app.app)
    options = {o for p in (*program.params, *program.commands["generate"].params) for o in p.opts}
    assert {f"--{key.replace('_', '-')}" for key in SETTINGS} <= options


def test_options_of_every_type_are_the_calls_values(run: Run, model: Path, tmp_path: Path) -> None:
    given = {
        "max_waiting": ("3", 3),
        "max_step_tokens": ("5", 5),
        "priority_steps": ("9", 9),
        "preempt": ("offload", "offload"),
        "offload_blocks": ("7", 7),
        "prefill_on": ("cpu", "cpu"),
        "seed": ("11", 11),
        "read_behind": ("1", 1),
        "cache_dir": (str(tmp_path), str(tmp_path)),
    }
    options = [word for key, (text, _) in given.items() for word in (f"--{key.replace('_', '-')}", text)]
    code, out, err = run("generate", *PROMPTS, "--model", str(model), *SMALL, *options, "--no-prefix-reuse", "--json")
    assert (code, err) == (0, "")
    configuration = json.loads(out)["report"]["configuration"]
    for key, (_, value) in (given | {"prefix_reuse": ("", False)}).items():
        assert configuration[key] == {"value": value, "source": "call", "origin": ""}
    assert configuration["kv_dtype"]["source"] == "default"
    assert [r["finish_reason"] for r in results_of(out)] == ["length"] * 3


BAD_SETTINGS: list[tuple[tuple[str, ...], str]] = [
    (("--max-step-tokens", "0"), "max_step_tokens = 0 (call); expected an integer of at least 1"),
    (("--preempt", "drop"), "preempt = 'drop' (call); expected 'recompute' or 'offload'"),
    (("--prefill-on", "host"), "prefill_on = 'host' (call); expected 'device' or 'cpu'"),
    (("--seed", "-1"), "seed = -1 (call); expected an integer of at least 0"),
    (("--offload-blocks", "many"), "--offload-blocks"),
]
BAD_SAMPLING: list[tuple[tuple[str, ...], str]] = [
    (("--n", "0"), "SamplingParams.n: got 0"),
    (("--stop", ""), "SamplingParams.stop: got ''"),
    (("--stop-token-id", "-1"), "SamplingParams.stop_token_ids: got"),
    (("--top-k", "some"), "--top-k"),
    (("--stream", "--json"), "--stream prints text as it comes"),
]
BAD_DRAWS: list[tuple[tuple[str, ...], str]] = [
    (("--temperature", "-1"), "SamplingParams.temperature: got -1.0"),
    (("--temperature", "nan"), "SamplingParams.temperature: got nan"),
    (("--top-k", "-1"), "SamplingParams.top_k: got -1"),
    (("--top-p", "0"), "SamplingParams.top_p: got 0.0"),
    (("--min-p", "1.5"), "SamplingParams.min_p: got 1.5"),
    (("--repetition-penalty", "0"), "SamplingParams.repetition_penalty: got 0.0"),
    (("--logprobs", "21"), "SamplingParams.logprobs: got 21"),
]


@pytest.mark.parametrize(("options", "message"), [*BAD_SETTINGS, *BAD_SAMPLING, *BAD_DRAWS])
def test_a_bad_value_is_one_line_and_code_2_before_any_model_is_loaded(
    run: Run, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    assert_one_line(run("generate", "hello", "--model", "./gone", *options), message)
    assert list(tmp_path.iterdir()) == []


# -- sampling ----------------------------------------------------------------------------------------------------------
def test_stop_strings_and_samples(run: Run, model: Path) -> None:
    arguments = ("generate", PROMPTS[0], "--model", str(model), *SMALL)
    whole = results_of(run(*arguments, "--json").out)[0]["text"]
    first, last = whole[2], whole[-1]
    code, out, _ = run(*arguments, "--stop", last, "--stop", first, "--n", "2", "--json")
    assert code == 0
    (result,) = results_of(out)
    assert (result["text"], result["finish_reason"]) == (whole[: whole.index(first)], "stop")
    (other,) = result["others"]
    assert (other["text"], other["token_ids"]) == (result["text"], result["token_ids"])
    assert other["seed"] != result["seed"]
    assert run(*arguments, "--stop", first, "--n", "2").out == f"{result['text']}\n" * 2


def test_draws_follow_the_seed(run: Run, model: Path) -> None:
    def draw(*options: str) -> list[list[int]]:
        code, out, err = run("generate", *PROMPTS, "--model", str(model), *SMALL, *options, "--json")
        assert (code, err) == (0, "")
        return [r["token_ids"] for r in results_of(out)]

    hot = ("--temperature", "5", "--top-k", "50", "--top-p", "0.99", "--min-p", "0.001", "--repetition-penalty", "1.1")
    assert draw(*hot, "--seed", "1") == draw(*hot, "--seed", "1") != draw(*hot, "--seed", "2")
    assert draw(*hot[:2], "--top-k", "1") == draw() == draw("--temperature", "0")


def test_log_probabilities_come_with_the_tokens(run: Run, model: Path) -> None:
    out = run("generate", PROMPTS[0], "--model", str(model), *SMALL, "--logprobs", "3", "--json").out
    (result,) = results_of(out)
    assert [len(entry["top"]) for entry in result["logprobs"]] == [3] * 8
    for token, entry in zip(result["token_ids"], result["logprobs"], strict=True):
        assert entry["top"][0] == [token, entry["chosen"]], "greedy: the most likely one"


# -- text as it comes --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [(), ("--n", "2"), ("--max-waiting", "1")], ids=str)
def test_streamed_text_is_the_text(run: Run, model: Path, options: tuple[str, ...]) -> None:
    arguments = ("generate", *PROMPTS, "--model", str(model), *SMALL, *options)
    plain, streamed = run(*arguments), run(*arguments, "--stream")
    assert plain == streamed
    assert plain.code == 0
    assert run("--progress", *arguments, "--stream").out == plain.out, "bars do not get in its way"


def test_text_is_printed_before_the_last_token_is_made(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    step = EngineCore.step

    def stepped(core: EngineCore) -> Any:
        events.append("step")
        return step(core)

    monkeypatch.setattr(EngineCore, "step", stepped)
    monkeypatch.setattr(
        generate_module, "print", lambda *texts, **_options: events.append("".join(texts)), raising=False
    )
    assert run("generate", PROMPTS[0], "--model", str(model), *SMALL, "--stream").code == 0
    printed = [i for i, event in enumerate(events) if event != "step"]
    assert "step" in events[printed[0] :]
    assert len(printed) > 3


def test_a_streamed_prompt_that_is_too_long_stops_all_before_any_text(run: Run, model: Path) -> None:
    assert_one_line(
        run("generate", "hello", "a" * 40, "--model", str(model), *SMALL, "--stream"),
        "40 prompt tokens",
        "max_len is 32",
    )


def test_a_streamed_prompt_that_fails_is_named_and_the_others_are_printed(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run("generate", *PROMPTS, "--model", str(model), *SMALL).out.split("\n")
    check = Engine.check

    def checked(engine: Engine, *arguments: Any, **options: Any) -> Any:
        request = check(engine, *arguments, **options)
        if request.index == 0:
            monkeypatch.setattr(
                EngineCore,
                "_end_overdue",
                lambda core: core.end(request, "error", DeviceLost("receipts did not match")),
            )
        return request

    monkeypatch.setattr(Engine, "check", checked)
    code, out, err = run("generate", *PROMPTS, "--model", str(model), *SMALL, "--stream")
    assert (code, err) == (1, "error: prompt 1: receipts did not match\n")
    assert out.split("\n") == ["", *plain[1:]]


# -- reports -----------------------------------------------------------------------------------------------------------
def test_a_report_is_written_as_json_or_as_prometheus_text(run: Run, model: Path) -> None:
    for file in ("report.json", "report.prom"):
        code, out, err = run("generate", *PROMPTS, "--model", str(model), *SMALL, "--report", file)
        assert (code, out.count("\n"), err) == (0, 3, "")
    report = json.loads(Path("report.json").read_text())
    assert report["engine"]["tokens"] == 24
    assert report["latencies"]["time_to_first_token_s"]["count"] == 3
    assert report["configuration"]["slots"] == {"value": 2, "source": "call", "origin": ""}
    families = text_string_to_metric_families(Path("report.prom").read_text())
    assert {s.value for f in families for s in f.samples if s.name == "forebay_tokens_total"} == {24.0}


@pytest.mark.parametrize(("file", "message"), [("gone/report.json", "there is no folder 'gone'"), (".", "is a folder")])
def test_a_report_that_cannot_be_written_is_refused_before_any_work(run: Run, file: str, message: str) -> None:
    assert_one_line(run("generate", "hello", "--model", "./nowhere", "--report", file), message)
