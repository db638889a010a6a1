"""The smallest case of each kernel, compared with numpy: the first that is known of a chip."""

from __future__ import annotations

from typing import Any, Final

from forebay.hardware.checking.cases import CASES
from forebay.hardware.checking.part import Result, Task
from forebay.runtime import Settings, open_backend

DRY_BACKEND: Final = "tpu:interpret"
"""Kernels are Pallas's own there."""
DRY: Final = ("decode, one head", "merge")
"""Cases of a dry run."""


def run(task: Task) -> Result:
    """Fails by a value that is wrong, or by an error; one case does not hinder another."""
    cases = {name: case for name, case in CASES.items() if name in DRY or not task.dry}
    ended: list[str] = []
    problems: list[str] = []
    data: dict[str, Any] = {"cases": list(cases), "ended": ended}
    with open_backend(DRY_BACKEND if task.dry else task.backend, settings=Settings()) as backend:
        for name, case in cases.items():
            try:
                case(backend)
                backend.synchronize()
            except Exception as error:  # noqa: BLE001  # a compiler raises what it likes, and the other cases are worth knowing
                problems.append(f"{name}: {type(error).__name__}: {error}"[:600])
            else:
                ended.append(name)
            task.save("crashed", data)
    return ("failed" if problems else "passed"), data, problems
