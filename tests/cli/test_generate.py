"""``forebay generate`` on a tiny model: text on stdout, one line for every fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime import Engine, SamplingParams, load_model, open_backend
from forebay.runtime.settings import Settings
from forebay.specs.errors import DeviceLost
from tests.cli.running import Run
from tests.models.tiny import weights, write_folder
from tests.selection.fakes import Site

PROMPTS = ("hello world", "or else")
SMALL = ("--max-tokens", "6", "--ignore-eos", "--slots", "2", "--max-len", "32", "--block-size", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[dict[str, Any]]:
    """What the engine itself makes of the prompts, one at a time."""
    settings = Settings.resolve(environ={}, start_dir=model, slots=1, max_len=32, block_size=4)
    with (
        open_backend("cpu", settings=settings) as backend,
        Engine(load_model(model), backend, settings=settings) as engine,
    ):
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        results = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
    return [{"text": result.text, "token_ids": list(result.token_ids)} for result in results]


def test_stdout_holds_the_text_and_nothing_else(run: Run, model: Path, expected: list[dict[str, Any]]) -> None:
    code, out, err = run("generate", *PROMPTS, "--model", str(model), *SMALL)
    assert (code, err) == (0, "")
    assert out == "".join(f"{result['text']}\n" for result in expected)


@pytest.mark.clause("C11", "B2")
@pytest.mark.parametrize("arm", ["eager", "hostfree", "captured"])
def test_options_reach_the_engine_and_its_report(
    run: Run, model: Path, expected: list[dict[str, Any]], arm: str
) -> None:
    code, out, err = run(
        "generate", *PROMPTS, "--model", str(model), *SMALL, "--arm", arm, "--attention", "gather", "--json"
    )
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert [result["token_ids"] for result in data["results"]] == [result["token_ids"] for result in expected]
    assert [result["prompt"] for result in data["results"]] == list(PROMPTS)
    assert {result["finish_reason"] for result in data["results"]} == {"length"}
    assert data["report"]["arm"] == arm
    configuration = data["report"]["configuration"]
    assert configuration["arm"] == {"value": arm, "source": "call", "origin": ""}
    assert configuration["attention"] == {"value": "gather", "source": "call", "origin": ""}
    assert configuration["capture"]["source"] == "default"


@pytest.mark.clause("B2")
def test_settings_come_from_file_and_environment_too(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text(f'model = "{model}"\nslots = 2\nmax_len = 32\nblock_size = 4\n')
    monkeypatch.setenv("FOREBAY_SLOTS", "3")
    code, out, _ = run("generate", PROMPTS[0], "--max-tokens", "2", "--block-size", "8", "--json")
    assert code == 0
    configuration = json.loads(out)["report"]["configuration"]
    assert configuration["slots"] == {"value": 3, "source": "environment", "origin": "FOREBAY_SLOTS"}
    assert configuration["block_size"] == {"value": 8, "source": "call", "origin": ""}
    assert configuration["max_len"] == {"value": 32, "source": "file", "origin": f"{file}:3"}


def test_prompts_of_a_file_follow_those_of_the_command_line(
    run: Run, model: Path, tmp_path: Path, expected: list[dict[str, Any]]
) -> None:
    (tmp_path / "prompts").write_text(f"\n{PROMPTS[1]}\n")
    code, out, _ = run("generate", PROMPTS[0], "--prompt-file", "prompts", "--model", str(model), *SMALL)
    assert (code, out) == (0, "".join(f"{result['text']}\n" for result in expected))


def test_progress_goes_to_stderr_and_only_where_it_is_asked_for(run: Run, model: Path) -> None:
    code, out, err = run("--progress", "generate", PROMPTS[0], "--model", str(model), *SMALL)
    assert code == 0
    assert "loading weights" in err
    assert "generating" in err
    assert "generating" not in out


@pytest.mark.clause("B3")
@pytest.mark.case("F04")
def test_auto_passes_over_an_accelerator_that_lacks_what_the_model_needs(run: Run, site: Site, model: Path) -> None:
    site.install(
        "wide-chip",
        {
            "wide": """
            def never():
                raise AssertionError("loaded although it lacks the head size")

            @hookimpl
            def forebay_backend():
                mode = ModeDescriptor("", "accelerator", never, probe, supports={"head_dim": (128,)})
                return BackendDescriptor("wide", "a fake", (mode,), "")
            """
        },
    )
    code, out, err = run("generate", PROMPTS[0], "--model", str(model), *SMALL, "--json")
    assert (code, err) == (0, "")
    backend = json.loads(out)["report"]["backend"]
    assert backend["name"] == "cpu"
    assert backend["considered"]["wide"] == f"head_dim: needs 16 (model {model}), found 128"
    code, out, err = run("generate", PROMPTS[0], "--model", str(model), *SMALL, "--backend", "wide")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "backend 'wide' (call) does not support what is required: head_dim: needs 16" in err


# -- faults ------------------------------------------------------------------------------------------------------------

BAD_REQUESTS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("--max-tokens", "40"), ("40", "max_len is 32")),
    (("--num-blocks", "2"), ("need", "blocks of 4 tokens", "num_blocks")),
    (("--max-len", "1000"), ("1000", "128")),
    (("--backend", "cpu:fast"), ("no mode 'fast'",)),
]


@pytest.mark.parametrize(("options", "parts"), BAD_REQUESTS)
def test_a_request_that_cannot_be_served_is_one_line_and_code_2(
    run: Run, model: Path, tmp_path: Path, options: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    code, out, err = run("generate", *PROMPTS, "--model", str(model), *SMALL, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    for part in parts:
        assert part in err
    assert list(tmp_path.iterdir()) == []


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def corrupt(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize("damage", [truncate, corrupt, drop_weights, drop_tokenizer, break_config])
def test_a_damaged_model_is_one_line_and_code_2(run: Run, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = write_folder(tmp_path / "damaged")
    damage(folder)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("generate", "hello", "--model", "./damaged")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert "damaged" in err
    assert sorted(tmp_path.rglob("*")) == before


def test_missing_tensors_are_named(run: Run, tmp_path: Path) -> None:
    tensors = weights()
    del tensors["model.norm.weight"]
    write_folder(tmp_path / "holes", tensors)
    code, out, err = run("generate", "hello", "--model", "./holes")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "model.norm.weight" in err


def test_a_model_that_is_nowhere_is_refused_with_the_known_names(run: Run) -> None:
    code, out, err = run("generate", "hello", "--model", "smolm2-135m")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "'smolm2-135m'" in err
    assert "smollm2-135m" in err


def test_a_prompt_that_fails_on_the_device_is_named_and_the_others_are_kept(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, expected: list[dict[str, Any]]
) -> None:
    real = Engine.generate

    def lossy(engine: Engine, *arguments: Any, **options: Any) -> Any:
        first, second = real(engine, *arguments, **options)
        object.__setattr__(second, "error", DeviceLost("receipts did not match"))
        return [first, second]

    monkeypatch.setattr(Engine, "generate", lossy)
    code, out, err = run("generate", *PROMPTS, "--model", str(model), *SMALL)
    assert code == 1
    assert out.startswith(f"{expected[0]['text']}\n")
    assert err == "error: prompt 2: receipts did not match\n"
