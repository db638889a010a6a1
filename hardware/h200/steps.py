"""Time of a decode step, eager beside run and replayed, of the seeded model."""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

from forebay.hardware.h200.part import Result, Task
from forebay.hardware.h200.shaped_model import prompts, write_model
from forebay.runtime import Engine, SamplingParams, Settings, load_model, open_backend

ARMS: Final = ("eager", "hostfree", "captured")


def run(task: Task) -> Result:
    """One row a number of slots, dtype and arm; the step is the difference of a long and a short run, so that prefill falls out."""
    slots_of, few, many, rounds = ((1,), 2, 4, 1) if task.dry else ((1, 8), 16, 144, 3)
    settings = Settings()
    rows: list[dict[str, Any]] = []
    with open_backend(task.backend, settings=settings) as backend:
        folder = write_model(task.work / "model-steps", dry=task.dry)
        for dtype in ("float32",) if task.dry else ("float32", "bfloat16"):
            model = load_model(folder, dtype=dtype, settings=settings)
            for slots in slots_of:
                wanted = prompts(slots, dry=task.dry)
                for arm in ARMS:
                    options: dict[str, Any] = {"slots": slots, "max_len": 512, "prefix_reuse": False}
                    with Engine(model, backend, arm=arm, settings=settings, **options) as engine:
                        seconds = _step_seconds(engine, wanted, few, many, rounds)
                    row = {"slots": slots, "dtype": dtype, "arm": arm}
                    rows.append(row if task.dry else row | seconds)
                    task.save("measured", {"rows": rows})
    return ("dry" if task.dry else "measured"), {"rows": rows}, []


def _step_seconds(engine: Engine, wanted: list[list[int]], few: int, many: int, rounds: int) -> dict[str, float]:
    def timed(tokens: int) -> float:
        start = time.perf_counter()
        engine.generate(wanted, SamplingParams(max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - start

    timed(few)
    steps = [(timed(many) - timed(few)) / (many - few) for _ in range(rounds)]
    return {"median_step_s": statistics.median(steps), "best_step_s": min(steps)}
