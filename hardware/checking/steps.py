"""Time of a decode step of a model, eager beside run and replayed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.runtime import Settings

if TYPE_CHECKING:
    from forebay.runtime import Engine, Model
    from forebay.specs.backend import Backend

ARMS: Final = ("eager", "hostfree", "captured")
MAX_LEN: Final = 512


def step_rows(
    model: Model, backend: Backend, wanted: Sequence[list[int]], *, few: int, many: int, rounds: int
) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """What one row an arm is about, and its seconds; as many slots as prompts.

    The step is the difference of a run of ``many`` tokens and one of ``few``, so that prefill falls out.
    """
    from forebay.runtime import Engine

    settings = Settings()
    for arm in ARMS:
        options: dict[str, Any] = {"slots": len(wanted), "max_len": MAX_LEN, "prefix_reuse": False}
        with Engine(model, backend, arm=arm, settings=settings, **options) as engine:
            seconds = _step_seconds(engine, list(wanted), few, many, rounds)
        yield {"slots": len(wanted), "dtype": model.dtype, "arm": arm}, seconds


def _step_seconds(engine: Engine, wanted: list[list[int]], few: int, many: int, rounds: int) -> dict[str, float]:
    from forebay.runtime import SamplingParams

    def timed(tokens: int) -> float:
        start = time.perf_counter()
        engine.generate(wanted, SamplingParams(max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - start

    timed(few)
    steps = [(timed(many) - timed(few)) / (many - few) for _ in range(rounds)]
    return {"median_step_s": statistics.median(steps), "best_step_s": min(steps)}


def with_ratios(rows: Sequence[dict[str, Any]], key: str, base: str) -> list[dict[str, Any]]:
    """Rows with ``to_BASE``: ``key`` of each over that of the row whose arm is ``base``."""
    of_base = next(row[key] for row in rows if row["arm"] == base)
    return [row | {f"to_{base}": row[key] / of_base} for row in rows]
