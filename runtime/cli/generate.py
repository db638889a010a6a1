"""``forebay generate``: continue prompts with a model; stdout gets the text and nothing else."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.runtime.cli.console import Bars, print_error, print_json, progress_bars
from forebay.runtime.cli.setting_options import with_setting_options
from forebay.runtime.plugins import PluginManager
from forebay.runtime.report_file import ReportFile
from forebay.runtime.selection import Requirements, select
from forebay.runtime.settings import Settings
from forebay.specs.errors import ForebayError, InvalidInput, InvalidSetting

if TYPE_CHECKING:
    from forebay.runtime import Engine, GenerationResult, Model, SamplingParams
    from forebay.runtime.request import Prompt
    from forebay.runtime.streaming import Stream


@with_setting_options
def generate(
    context: typer.Context,
    *,
    settings: Settings,
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to continue.", metavar="[PROMPTS]...")] = None,
    prompt_file: Annotated[
        str | None, typer.Option(help="File of further prompts, one a line; - is standard input.", metavar="PATH")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most, per sample.")] = 64,
    temperature: Annotated[float | None, typer.Option(help="0: the most likely token; above: draw.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k most likely tokens; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the most likely ones of this total.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Draw among those this times as likely as the first.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens that were there already become less likely.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a sample; may be repeated.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="Token that ends a sample; may be repeated.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of so many most likely tokens too.")
    ] = None,
    n: Annotated[int | None, typer.Option(help="Samples of each prompt.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-text token.")] = False,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Each prompt is a user's message, written as the model's chat template has it."),
    ] = False,
    as_stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes, prompt after prompt.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print results and report as one JSON object.")] = False,
    report: Annotated[
        str | None, typer.Option(help="Write the engine's report: JSON, or Prometheus text to *.prom.", metavar="FILE")
    ] = None,
) -> None:
    """Continue prompts with a model.

    Greedy unless a temperature is given: the same prompt gives the same text on every backend.
    """
    texts = collect_prompts(prompts or [], prompt_file)
    if settings.model is None:
        raise InvalidSetting("no model; give --model PATH or NAME ('forebay model list' shows the names)")
    if as_stream and as_json:
        raise InvalidInput("--stream prints text as it comes, --json one object at the end; give one of the two")
    file = None if report is None else ReportFile.at(report)
    params = _sampling_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop) if stop else None,
        stop_token_ids=tuple(stop_token_id) if stop_token_id else None,
        logprobs=logprobs,
        n=n,
        ignore_eos=ignore_eos,
    )
    with ExitStack() as opened:
        with progress_bars(context) as bars:
            manager = PluginManager.discover()
            model = _load(settings, manager, bars)
            written: list[Prompt] = [_as_chat(model, text) if chat else text for text in texts]
            engine = _open_engine(model, settings, manager, bars, opened)
            results = [] if as_stream else _finish(engine, written, params, bars)
        if as_stream:  # behind the bars, which have the terminal for themselves
            results = _print_as_it_comes(engine, written, params)
        told = engine.report()
    if as_json:
        prompted = zip(texts, results, strict=True)
        print_json({"results": [{"prompt": text, **_as_data(result)} for text, result in prompted], "report": told})
    elif not as_stream:
        for sample in itertools.chain.from_iterable(result.samples for result in results):
            print(sample.text)
    if file is not None:
        file.write(told)
    _tell_failures(results)


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


def _sampling_params(**given: Any) -> SamplingParams:
    """What the options ask for; what is None keeps its default.

    Raises:
        InvalidInput: a value out of its range.
    """
    # Imported here because numpy takes long, and "forebay --help" does not need it.
    from forebay.runtime import SamplingParams

    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _load(settings: Settings, manager: PluginManager, bars: Bars) -> Model:
    from forebay.runtime import load_model

    trace = settings.trace("backend")
    # Before a model is fetched: a backend that cannot be had should cost nothing.
    select(settings.backend, trace.source, trace.origin, manager, Requirements.from_settings(settings))
    return load_model(settings=settings, progress=bars.for_bytes(str(settings.model)))


def _as_chat(model: Model, text: str) -> list[int]:
    """The token ids of a conversation of which ``text`` is the first message, up to where the answer begins."""
    return model.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True
    )


def _open_engine(model: Model, settings: Settings, manager: PluginManager, bars: Bars, opened: ExitStack) -> Engine:
    """Open a backend that can serve the model, and make the engine; ``opened`` closes them."""
    from forebay.runtime import Engine, open_backend

    needs = {"head_dim": model.config.head_dim, "kv_dtype": settings.kv_dtype or model.dtype}
    require = Requirements(needs, dict.fromkeys(needs, f"model {model.name}"))
    backend = opened.enter_context(open_backend(settings=settings, require=require, manager=manager))
    progress = bars.for_count("loading weights")
    return opened.enter_context(Engine(model, backend, settings=settings, progress=progress))


def _finish(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, bars: Bars) -> list[GenerationResult]:
    """Results in the order of the prompts."""
    count, total = bars.for_count("generating"), len(prompts) * params.max_tokens * params.n
    made = itertools.count(1)
    return engine.generate(prompts, params, on_token=lambda _request, _token: count(next(made), total))


def _print_as_it_comes(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> list[GenerationResult]:
    """Print each prompt's samples, the first of them as its text comes; the prompts behind it run meanwhile."""
    coming = deque([engine.check(prompt, params) for prompt in prompts])
    streams: deque[Stream] = deque()
    results = []
    while coming or streams:
        while coming and (engine.has_room or not streams):
            streams.append(engine.follow(coming.popleft()))
        results.append(_print_stream(streams.popleft()))
    return results


def _print_stream(stream: Stream) -> GenerationResult:
    try:
        for piece in stream:
            if piece.sample == 0:
                print(piece.text, end="", flush=True)
    except ForebayError:
        if not stream.finished:
            raise
    print()
    for sample in stream.result.others:
        print(sample.text)
    return stream.result


def _tell_failures(results: Sequence[GenerationResult]) -> None:
    """One line for each sample that could not be finished, and exit code 1 if there is one."""
    errors = [(i, sample.error) for i, result in enumerate(results, start=1) for sample in result.samples]
    failed = [f"prompt {i}: {error}" for i, error in errors if error is not None]
    for message in failed:
        print_error(message)
    if failed:
        raise typer.Exit(1)


def _as_data(result: GenerationResult) -> dict[str, Any]:
    """Every field of a result as plain data, those of its further samples too."""
    data = {field.name: _plain(getattr(result, field.name)) for field in fields(result)}
    data["others"] = [_as_data(other) for other in result.others]
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Exception):
        return str(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
