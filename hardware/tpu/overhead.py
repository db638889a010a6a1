"""What a replay costs beside the same step run and by the host, of an empty step and of a model's.

A part of the check, and a script: ``python -m forebay.hardware.tpu.overhead --backend tpu:xla --model smollm2-135m --json FILE``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from forebay.hardware.checking.machine import load_average, machine
from forebay.hardware.checking.part import Result, Task
from forebay.hardware.checking.shaped_model import absent, prompts, write_model
from forebay.hardware.checking.steps import step_rows, with_ratios
from forebay.runtime import Settings, open_backend
from forebay.specs.backend import Backend
from forebay.specs.dtypes import Array
from forebay.specs.segment import Buffer, Segment

if TYPE_CHECKING:
    from forebay.runtime import Model

STEPS: Final = 200
"""Empty steps a round, the last of which is waited for."""
ROUNDS: Final = 9
BASE: Final = "captured"
"""The arm to which the others are set in ratio."""


def run(task: Task) -> Result:
    """Rows of the empty step, then of the seeded model's."""
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    data: dict[str, Any] = {"rows": rows}
    settings = Settings()
    with open_backend(task.backend, settings=settings) as backend:
        empty = empty_rows(backend, *((2, 1) if task.dry else (STEPS, ROUNDS)))
        rows += [{"step": row["step"], "arm": row["arm"]} for row in empty] if task.dry else empty
        task.save("measured", data)
        lacking = absent()
        if lacking:
            problems.append(f"the model's step: not present: no model can be opened without {', '.join(lacking)}")
        else:
            from forebay.runtime import load_model

            folder = write_model(task.work / "model-overhead", dry=task.dry)
            model = load_model(folder, dtype="float32", settings=settings)
            few, many, rounds = (2, 4, 1) if task.dry else (16, 144, 3)
            for slots in (1,) if task.dry else (1, 8):
                rows += model_rows(model, backend, prompts(slots, dry=task.dry), few, many, rounds, dry=task.dry)
                task.save("measured", data)
    return ("dry" if task.dry else "measured"), data, problems


def model_rows(
    model: Model, backend: Backend, wanted: list[list[int]], few: int, many: int, rounds: int, *, dry: bool = False
) -> list[dict[str, Any]]:
    """A row an arm, with its ratio to the replayed one; without seconds in a dry run."""
    made = step_rows(model, backend, wanted, few=few, many=many, rounds=rounds)
    rows = [{"step": "model"} | about | ({} if dry else seconds) for about, seconds in made]
    return rows if dry else with_ratios(rows, "median_step_s", BASE)


def empty_rows(backend: Backend, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a step that adds one to one number: by the host, run, replayed, and as JAX itself calls the same program.

    Rounds of all ways are interleaved.
    """
    with ExitStack() as made:
        cell = backend.buffer("overhead.number", np.zeros(1, np.int32))
        made.callback(backend.release, cell)

        def step(_: Backend) -> tuple[dict[Buffer, Array], dict[str, Array]]:
            return {cell: cell.get() + 1}, {}

        segment = Segment("empty", step, key=(), updates=(cell,))
        backend.run(segment)
        trace = backend.capture(segment)
        made.callback(backend.release, trace)

        def eager() -> None:
            backend.upload(cell, backend.to_host(cell.get() + 1))

        ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "eager": (eager, lambda: backend.fetch(cell)),
            "hostfree": (lambda: backend.run(segment), lambda: backend.fetch(cell)),
            "captured": (lambda: backend.replay(trace), lambda: backend.fetch(cell)),
            "jax, compiled ahead": _bare(backend),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):  # the first warms up
            for name, (once, wait) in ways.items():
                start = time.perf_counter()
                for _turn in range(steps):
                    once()
                wait()
                seconds[name].append((time.perf_counter() - start) / steps)
        rows = [
            {"step": "empty", "arm": name, "median_step_s": statistics.median(found[1:]), "best_step_s": min(found[1:])}
            for name, found in seconds.items()
        ]
        return with_ratios(rows, "median_step_s", BASE)


def _bare(backend: Backend) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same program without Forebay, on the device of ``backend``: one call, and the wait for it."""
    import jax
    import jax.numpy as jnp

    device = jax.devices(backend.info["platform"])[0]
    held = jax.device_put(jnp.zeros(1, jnp.int32), device)
    program = jax.jit(lambda x: x + 1, donate_argnums=0).lower(held).compile()

    def once() -> None:
        nonlocal held
        held = program(held)

    return once, lambda: np.asarray(held)


def main() -> None:
    """Measure and print; ``--json FILE`` writes the record."""
    parser = argparse.ArgumentParser(prog="overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="tpu:xla")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs=2, default=(8, 40), metavar=("FEW", "MANY"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    from forebay.runtime import load_model

    before = load_average()
    model = load_model(a.model, dtype="float32")
    few, many = a.tokens
    with open_backend(a.backend) as backend:
        rows = empty_rows(backend, STEPS, ROUNDS)
        for slots in a.slots:
            rows += model_rows(model, backend, prompts(slots, dry=False), few, many, a.rounds)
        info = {key: str(value) for key, value in backend.info.items() if key != "launches"}
    for row in rows:
        print({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()})
    if a.json is not None:
        facts = machine(a.backend, ("jax", "jaxlib"))
        about = {"model": a.model, "few_and_many_tokens": [few, many], "empty_steps_a_round": STEPS}
        about |= {"rounds": {"empty": ROUNDS, "model": a.rounds}, "info": info, "rows": rows}
        record = facts | {"load_before": before, "load_after": load_average()} | about
        a.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
