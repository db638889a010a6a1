"""``forebay generate``: continue prompts with a model; stdout gets the text and nothing else."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.runtime.cli.console import (
    Bars,
    print_error,
    print_json,
    progress_bars,
    resolve_settings,
    setting_option,
)
from forebay.runtime.plugins import PluginManager
from forebay.runtime.selection import Requirements, select
from forebay.runtime.settings import Settings
from forebay.specs.errors import InvalidInput, InvalidSetting

if TYPE_CHECKING:
    from forebay.runtime import GenerationResult, Model


def generate(
    context: typer.Context,
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to continue.", metavar="[PROMPTS]...")] = None,
    prompt_file: Annotated[
        str | None, typer.Option(help="File of further prompts, one a line; - is standard input.", metavar="PATH")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most, per prompt.")] = 64,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-text token.")] = False,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Each prompt is a user's message, written as the model's chat template has it."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print results and report as one JSON object.")] = False,
    model: Annotated[str | None, setting_option("model", "PATH|NAME")] = None,
    backend: Annotated[str | None, setting_option("backend", "NAME[:MODE]")] = None,
    dtype: Annotated[str | None, setting_option("dtype", "float32|bfloat16")] = None,
    kv_dtype: Annotated[str | None, setting_option("kv_dtype", "float32|bfloat16")] = None,
    attention: Annotated[str | None, setting_option("attention", "direct|gather")] = None,
    capture: Annotated[str | None, setting_option("capture", "off|auto|required")] = None,
    arm: Annotated[str | None, setting_option("arm", "eager|hostfree|captured")] = None,
    slots: Annotated[int | None, setting_option("slots", "N")] = None,
    block_size: Annotated[int | None, setting_option("block_size", "N")] = None,
    num_blocks: Annotated[int | None, setting_option("num_blocks", "N")] = None,
    max_len: Annotated[int | None, setting_option("max_len", "N")] = None,
    threads: Annotated[int | None, setting_option("threads", "N")] = None,
    read_behind: Annotated[int | None, setting_option("read_behind", "N")] = None,
    max_rewarm: Annotated[int | None, setting_option("max_rewarm", "N")] = None,
    cache_dir: Annotated[Path | None, setting_option("cache_dir", "PATH")] = None,
) -> None:
    """Continue prompts with a model.

    Greedy: the same prompt gives the same text on every backend.
    """
    settings = resolve_settings(
        context,
        model=model,
        backend=backend,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention=attention,
        capture=capture,
        arm=arm,
        slots=slots,
        block_size=block_size,
        num_blocks=num_blocks,
        max_len=max_len,
        threads=threads,
        read_behind=read_behind,
        max_rewarm=max_rewarm,
        cache_dir=cache_dir,
    )
    texts = collect_prompts(prompts or [], prompt_file)
    if settings.model is None:
        raise InvalidSetting("no model; give --model PATH or NAME ('forebay model list' shows the names)")
    with progress_bars(context) as bars:
        results, report = _run(settings, texts, chat=chat, max_tokens=max_tokens, ignore_eos=ignore_eos, bars=bars)
    failed = [f"prompt {n}: {result.error}" for n, result in enumerate(results, start=1) if result.error is not None]
    if as_json:
        prompted = zip(texts, results, strict=True)
        print_json({"results": [_as_data(text, result) for text, result in prompted], "report": report})
    else:
        for result in results:
            print(result.text)
    for message in failed:
        print_error(message)
    if failed:
        raise typer.Exit(1)


def collect_prompts(given: Sequence[str], prompt_file: str | None) -> list[str]:
    """The prompts of the command line, then those of the file, one a line; blank lines of the file are left out.

    Raises:
        InvalidInput: there is none, one is empty, or the file cannot be read as UTF-8 text.
    """
    prompts = list(given)
    if prompt_file is not None:
        try:
            text = sys.stdin.read() if prompt_file == "-" else Path(prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the prompt file '{prompt_file}' cannot be read as UTF-8 text: {error}") from error
        prompts += [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise InvalidInput("no prompt; give one on the command line, or --prompt-file PATH")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise InvalidInput(f"prompt {number} of {len(prompts)} is empty; give at least one character")
    return prompts


def _run(
    settings: Settings, texts: Sequence[str], *, chat: bool, max_tokens: int, ignore_eos: bool, bars: Bars
) -> tuple[list[GenerationResult], dict[str, Any]]:
    """Load the model, open the backend, decode, close: results in the order of the prompts, and the engine's report."""
    # Imported here because numpy, tokenizers and the model code take long, and "forebay --help" needs none of them.
    from forebay.runtime import Engine, SamplingParams, load_model, open_backend

    manager = PluginManager.discover()
    trace = settings.trace("backend")
    # Before a model is fetched: a backend that cannot be had should cost nothing.
    select(settings.backend, trace.source, trace.origin, manager, Requirements.from_settings(settings))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    model = load_model(settings=settings, progress=bars.for_bytes(str(settings.model)))
    prompts = [_as_chat(model, text) if chat else text for text in texts]
    needs = {"head_dim": model.config.head_dim, "kv_dtype": settings.kv_dtype or model.dtype}
    require = Requirements(needs, dict.fromkeys(needs, f"model {model.name}"))
    with open_backend(settings=settings, require=require, manager=manager) as backend:
        load_progress = bars.for_count("loading weights")
        with Engine(model, backend, settings=settings, progress=load_progress) as engine:
            count, total = bars.for_count("generating"), len(texts) * max_tokens
            made = itertools.count(1)
            results = engine.generate(prompts, params, on_token=lambda _request, _token: count(next(made), total))
            return results, engine.report()


def _as_chat(model: Model, text: str) -> list[int]:
    """The token ids of a conversation of which ``text`` is the first message, up to where the answer begins."""
    return model.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True
    )


def _as_data(prompt: str, result: GenerationResult) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "prompt_token_ids": list(result.prompt_token_ids),
        "token_ids": list(result.token_ids),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "error": None if result.error is None else str(result.error),
    }
