"""What the host is: kind of device and its memory, versions of JAX and libtpu, and the state of the tree."""

from __future__ import annotations

from forebay.hardware.checking.machine import machine
from forebay.hardware.checking.part import Result, Task
from forebay.runtime import Settings, open_backend


def run(task: Task) -> Result:
    """Fails where the backend does not open."""
    data = machine(task.backend, ("jax", "jaxlib", "libtpu"))
    task.save("crashed", data)
    with open_backend(task.backend, settings=Settings()) as backend:
        data["info"] = {key: str(value) for key, value in backend.info.items()}
        data["devices"] = devices()
    return "passed", data, []


def devices() -> list[dict[str, str]]:
    """Every device JAX sees in this process: its kind, and what it says of its memory."""
    import jax

    return [
        {"id": str(device.id), "platform": device.platform, "kind": device.device_kind}
        | {"memory": str(device.memory_stats() or "it does not say")}
        for device in jax.local_devices()
    ]
