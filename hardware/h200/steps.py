"""Time of a decode step, eager beside run and replayed, of the seeded model."""

from __future__ import annotations

from typing import Any

from forebay.hardware.checking.part import Result, Task
from forebay.hardware.checking.shaped_model import prompts, write_model
from forebay.hardware.checking.steps import step_rows
from forebay.runtime import Settings, load_model, open_backend


def run(task: Task) -> Result:
    """One row a number of slots, dtype and arm."""
    slots_of, few, many, rounds = ((1,), 2, 4, 1) if task.dry else ((1, 8), 16, 144, 3)
    settings = Settings()
    rows: list[dict[str, Any]] = []
    with open_backend(task.backend, settings=settings) as backend:
        folder = write_model(task.work / "model-steps", dry=task.dry)
        for dtype in ("float32",) if task.dry else ("float32", "bfloat16"):
            model = load_model(folder, dtype=dtype, settings=settings)
            for slots in slots_of:
                wanted = prompts(slots, dry=task.dry)
                for about, seconds in step_rows(model, backend, wanted, few=few, many=many, rounds=rounds):
                    rows.append(about if task.dry else about | seconds)
                    task.save("measured", {"rows": rows})
    return ("dry" if task.dry else "measured"), {"rows": rows}, []
