"""What the machine is: device, driver, versions, and the state of the tree."""

from __future__ import annotations

from forebay.hardware.checking.machine import machine, output_of
from forebay.hardware.checking.part import Result, Task
from forebay.runtime import Settings, open_backend


def run(task: Task) -> Result:
    """Fails where the backend does not open."""
    data = machine(task.backend, ("triton", "numba", "flash-attn"))
    data["nvidia_smi"] = "not asked: dry run" if task.dry else output_of(["nvidia-smi"])
    task.save("crashed", data)
    with open_backend(task.backend, settings=Settings()) as backend:
        data["info"] = {key: str(value) for key, value in backend.info.items()}
    return "passed", data, []
