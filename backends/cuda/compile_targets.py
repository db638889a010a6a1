"""The devices that the gate compiles for, and compiling one launch for one of them as Triton's JIT would on it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from .compile_recording import Launch
from .registers import launch_options

KIB: Final = 1024


@dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
        name: as the table names it.
        backend: Triton's name of the compiler, ``cuda`` or ``hip``.
        arch: its compute capability or name.
        warp: threads of a warp.
        shared: bytes of shared memory that a program may have.
    """

    name: str
    backend: str
    arch: int | str
    warp: int
    shared: int


TARGETS: Final = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 * KIB),
        Target("sm_90", "cuda", 90, 32, 227 * KIB),
        Target("sm_100", "cuda", 100, 32, 227 * KIB),
        Target("gfx942", "hip", "gfx942", 64, 64 * KIB),
        Target("gfx950", "hip", "gfx950", 64, 160 * KIB),
    )
}


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes of a device.

    Attributes:
        registers: of a thread; on AMD vector registers, accumulators counted in.
        spilled: bytes of a thread's memory that hold what found no register: stack and local memory, or AMD's private segment.
        lanes: scalar registers that AMD's compiler keeps in lanes of vector registers: no memory is touched.
        shared: bytes of shared memory of a program.
        warps: of a program.
    """

    registers: int
    spilled: int
    lanes: int
    shared: int
    warps: int


class NoDevice(DriverBase):  # type: ignore[misc]  # triton has no types
    """Tells Triton's JIT what device to compile for, where there is none."""

    def __init__(self, target: Target) -> None:
        self._target = GPUTarget(target.backend, target.arch, target.warp)

    @classmethod
    def is_active(cls) -> bool:
        """True: it is set, not found."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Unused: nothing is launched."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """The target."""
        return self._target

    def get_active_torch_device(self) -> torch.device:
        """The host, as there is no device."""
        return torch.device("cpu")

    def get_benchmarker(self) -> None:
        """None: nothing is timed."""

    def get_current_device(self) -> int:
        """One device."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """One stream."""
        return 0


@contextmanager
def compiling_for(target: Target, launch: Launch) -> Iterator[Mapping[str, Any]]:
    """Triton believes, and goes on believing, that ``target`` is there; gives what ``launch`` is launched with on it.

    Triton keeps what it compiled by device number, so a kernel forgets before and after what it was compiled for.
    """
    driver.set_active(NoDevice(target))
    launch.kernel.device_caches.clear()
    try:
        yield {**launch.constants, **launch_options(launch.name, launch.args, launch.constants, target.backend)}
    finally:
        launch.kernel.device_caches.clear()


def specialisation(launch: Launch, target: Target) -> str:
    """What the JIT would compile for a launch, as text; launches of one text share one compiled kernel. Nothing is compiled."""
    found: list[str] = []

    def note(*, key: str, **_: Any) -> bool:
        found.append(key)
        return True  # Triton is not to compile

    with compiling_for(target, launch) as constants:
        before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
        try:
            launch.kernel.warmup(*launch.args, grid=launch.grid, **constants)
        finally:
            knobs.runtime.jit_cache_hook = before
    if len(found) != 1:
        raise RuntimeError(
            f"triton {triton.__version__} asked its hook {len(found)} times for {launch.name}, expected once"
        )
    return found[0]


def compiled(launch: Launch, target: Target) -> Usage:
    """Compile a launch and measure what came out.

    Raises:
        Exception: whatever Triton or the assembler refuses it with.
    """
    with compiling_for(target, launch) as constants:
        made = launch.kernel.warmup(*launch.args, grid=launch.grid, **constants)
        measure = _of_cubin if target.backend == "cuda" else _of_hsaco
        return measure(made)


def _of_cubin(made: Any) -> Usage:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        shown = subprocess.run(  # noqa: S603  # triton's own tool on a file of our own
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", shown.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump names no registers: {shown.stdout!r} {shown.stderr!r}")
    registers, stack, local = (int(x) for x in found.groups())
    return Usage(registers, stack + local, 0, int(made.metadata.shared), int(made.metadata.num_warps))


def _of_hsaco(made: Any) -> Usage:
    text = made.asm["amdgcn"]

    def noted(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        if found is None:
            raise RuntimeError(f"the assembly of {made.name} has no note {name}")
        return int(found[1])

    # Of vector registers a spilled one goes to the private segment, a scalar one first to lanes of vector registers.
    spilled = max(noted("private_segment_fixed_size"), 4 * noted("vgpr_spill_count"))
    return Usage(
        noted("vgpr_count"), spilled, noted("sgpr_spill_count"), int(made.metadata.shared), int(made.metadata.num_warps)
    )
