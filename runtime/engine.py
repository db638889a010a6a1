"""The engine: continuous batching of requests over one model on one backend.

Three arms give the same tokens: *eager* (the host supplies ids, position and slot each step), *hostfree* (the decode Segment,
run) and *captured* (the same Segment, replayed). Every ``step`` computes prompt chunks and one decode step within a token budget;
:mod:`.core` says who gets what.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

from forebay.specs.backend import Backend
from forebay.specs.errors import Cancelled, InvalidInput

from .admission import RequestOptions, checked_requests, pair_with_params
from .assembly import assemble
from .model import Model
from .models.llama import LoadProgress
from .report import describe, describe_memory
from .request import GenerationResult, Prompt, Request
from .sampling import SamplingParams
from .settings import Settings
from .streaming import Reader, Stream


class Engine:
    """Decodes requests of one model on one backend.

    Arguments that are None come from ``settings`` (resolved from file and environment when that is None too).

    Args:
        model: from ``load_model``.
        backend: from ``open_backend``; stays open when the engine closes.
        capture: ``off`` (hostfree), ``auto`` or ``required``.
        arm: ``eager``, ``hostfree`` or ``captured``; overrides ``capture``.
        attention: ``direct`` or ``gather``.
        slots: sequences decoded at once.
        block_size: tokens a KV block.
        num_blocks: blocks of the pool, the sink included.
        max_len: longest sequence, prompt and tokens made together.
        kv_dtype: element type of the pool.
        max_step_tokens: tokens a step computes, decoding rows and prompt chunks together.
        prefix_reuse: reuse the KV of equal prompt beginnings.
        preempt: ``recompute`` or ``offload``: what becomes of the KV of a preempted request.
        prefill_on: ``device``, or ``cpu``: prompts are computed on the host and their KV staged to the device.
        settings: every other setting, and those of the arguments that are None.
        progress: called with (tensors done, tensors in all) while the weights are loaded.
        clock: seconds, for deadlines and latencies.

    Raises:
        InvalidInput, InvalidSetting, InvalidLayout, Unsupported: before anything is put on the device.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        *,
        capture: str | None = None,
        arm: str | None = None,
        attention: str | None = None,
        slots: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        max_len: int | None = None,
        kv_dtype: str | None = None,
        max_step_tokens: int | None = None,
        prefix_reuse: bool | None = None,
        preempt: str | None = None,
        prefill_on: str | None = None,
        settings: Settings | None = None,
        progress: LoadProgress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        given = {
            "capture": capture,
            "arm": arm,
            "attention": attention,
            "slots": slots,
            "block_size": block_size,
            "num_blocks": num_blocks,
            "max_len": max_len,
            "kv_dtype": kv_dtype,
            "max_step_tokens": max_step_tokens,
            "prefix_reuse": prefix_reuse,
            "preempt": preempt,
            "prefill_on": prefill_on,
        }
        if not isinstance(model, Model):
            raise InvalidInput(f"Engine model: got {type(model).__name__} {model!r}, expected what load_model returns")
        if not isinstance(backend, Backend):
            raise InvalidInput(
                f"Engine backend: got {type(backend).__name__} {backend!r}, expected what open_backend returns"
            )
        base = Settings.resolve() if settings is None else settings
        self.settings = base.override(**{key: value for key, value in given.items() if value is not None})
        self.model = model
        self.backend = backend
        self.clock = clock
        self._arrivals = 0
        self._closed = False
        self._dropped: deque[Request] = deque()
        with ExitStack() as made:
            self._parts = assemble(model, backend, self.settings, made, clock=clock, progress=progress)
            self._made = made.pop_all()
        self._core = self._parts.core
        self.arm = self._parts.arm

    # -- life ------------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """End every request, free the traces, the pool, the state and the weights; the backend stays open."""
        if not self._closed:
            self._closed = True
            self._core.end_all(Cancelled("the engine was closed"))
        self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- requests --------------------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[Request, int], None] | None = None,
        **options: Any,
    ) -> list[GenerationResult]:
        """Finish every prompt; results come in the order of the prompts.

        ``params`` is one for all, or one a prompt. ``on_token`` is called with each token that this call's steps release for them.
        ``options`` are those of :meth:`add`, for every prompt. Every prompt is checked before any device work; as many wait at once
        as ``max_waiting`` lets.

        Raises:
            InvalidInput: a bad prompt or parameter, or a request larger than the pool; nothing was started.
        """
        pairs = pair_with_params(prompts, params)
        families = [self._checked(p, s, f"prompt {i}", options) for i, (p, s) in enumerate(pairs, start=1)]
        own = {r for family in families for r in family}
        outside = deque(families)
        try:
            while outside or any(not r.finished for r in own):
                while outside and self.has_room:
                    self.submit(outside.popleft()[0])
                for request, token in self.step():
                    if on_token is not None and request in own:
                        on_token(request, token)
        finally:
            for family in families:
                # The error that is on its way out says what is wrong with the device; a second one must not hide it.
                with suppress(Exception):
                    self.cancel(family[0], "the call that made it ended before it did")
        return [family[0].result(self.model.tokenizer) for family in families]

    def add(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Request:
        """Queue one request; ``step`` works on it.

        ``options``: ``priority`` (int, higher is served earlier), ``deadline`` (seconds from now after which it is ended),
        ``cache_salt`` (prompts share cached KV only under one salt).

        Raises:
            InvalidInput: as :meth:`generate`.
            QueueFull: ``max_waiting`` requests wait already.
        """
        request = self.check(prompt, params, **options)
        self.submit(request)
        return request

    def check(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Request:
        """The request that :meth:`add` would queue; its deadline runs from now.

        Raises:
            InvalidInput: as :meth:`generate`.
        """
        return self._checked(prompt, SamplingParams() if params is None else params, "prompt", options)[0]

    @property
    def has_room(self) -> bool:
        """True while fewer than ``max_waiting`` requests wait."""
        return self._core.waiting.has_room

    def submit(self, request: Request) -> None:
        """Queue a checked request.

        Raises:
            InvalidInput: it was queued before, or the engine is closed.
            QueueFull: ``max_waiting`` requests wait already.
        """
        self._check_open()
        if request.owner is not self:
            raise InvalidInput(f"request {request.index} was checked by another engine; add it to this one")
        if request.finished or request.slot is not None or request in self._core.waiting:
            raise InvalidInput(f"request {request.index} was queued already; add makes a new one")
        self._core.submit(request)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, wait: bool = True, **options: Any
    ) -> Stream:
        """Queue one request and iterate over what comes of it; pulling steps the engine.

        ``wait``: with a full queue step the engine until there is room, for at most ``deadline`` seconds; False refuses at once.
        ``options`` are those of :meth:`add`.

        Raises:
            InvalidInput: as :meth:`generate`.
            QueueFull: ``max_waiting`` requests wait, and there was no time or no wish to wait for room.
        """
        return self.follow(self.check(prompt, params, **options), wait=wait)

    def follow(self, request: Request, *, wait: bool = True) -> Stream:
        """:meth:`stream` of a checked request."""
        while wait and not self.has_room and (request.deadline is None or self.clock() < request.deadline):
            self.step()
        self.submit(request)
        return Stream(Reader(self.model.tokenizer, request), self.step, self.cancel, self._dropped.append)

    def cancel(self, request: Request, why: str = "its caller cancelled it") -> None:
        """End a request, and the samples that come of it, wherever it stands, and give back what it holds."""
        self._core.cancel(request, why)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; what requests hold stays theirs."""
        if self._core.cache.prefix is not None:
            self._core.cache.prefix.clear()

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        self._end_dropped()
        return bool(self._core.waiting or self._core.running)

    def step(self) -> list[tuple[Request, int]]:
        """Admit what fits, compute prompt chunks and one decode step; the tokens that may be released now.

        Raises:
            InvalidInput: the engine is closed.
            StaleTrace: the device ran a row that holds no request; every running request ends with this error.
            DeviceLost: the device answers no more; every request ends with this error, waiting ones too.
            Unsupported: the device's memory was used up; what was not done is tried again by the next call.
            CaptureDeclined: ``capture = "required"`` and the device declined.
        """
        self._check_open()
        self._end_dropped()
        return self._core.step()

    def _end_dropped(self) -> None:
        """Cancel the requests of streams that nobody holds any more."""
        while self._dropped:
            self.cancel(self._dropped.popleft(), "its stream was dropped")

    def _checked(self, prompt: Prompt, params: SamplingParams, what: str, options: dict[str, Any]) -> list[Request]:
        self._check_open()
        family = checked_requests(
            prompt,
            params,
            what,
            RequestOptions.checked(options, what),
            index=self._arrivals,
            model=self.model,
            max_len=self._parts.max_len,
            geometry=self._parts.pool.geometry,
            base_seed=self.settings.seed,
            now=self.clock(),
        )
        self._arrivals += len(family)
        for request in family:
            request.owner = self
        return family

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInput("the engine is closed; make a new one")

    # -- report ----------------------------------------------------------------------------------------------------------
    def report(self) -> dict[str, Any]:
        """What the engine is, did and holds, as plain data; the keys are those of :mod:`.report`."""
        self._end_dropped()
        parts, core = self._parts, self._core
        return {
            **describe(self.settings, self.arm, self.backend, self.model, parts.max_len),
            "counters": self.backend.counters.as_dict(),
            "engine": core.report(),
            "requests": {"waiting": len(core.waiting), "running": len(core.running)},
            "lanes": core.decoder.lanes.report(),
            "memory": describe_memory(parts.pool, core.cache, self.model, parts.offload),
            "latencies": parts.latencies.report(core.waiting, core.steps),
        }

    def metrics_text(self) -> str:
        """The report in Prometheus' text format.

        Raises:
            Unsupported: ``prometheus_client`` is not installed.
        """
        from .metrics import metrics_text  # here, because the package is optional

        return metrics_text(self.report())
