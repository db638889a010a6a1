"""Tells Forebay about the ``cuda`` backend; torch and triton are imported only once it has been chosen."""

from __future__ import annotations

import ctypes
import runpy
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pluggy

from forebay.specs.descriptor import HOOK_PROJECT, Availability, BackendDescriptor, ModeDescriptor

if TYPE_CHECKING:
    from forebay.specs.driver import Driver

hookimpl: Final = pluggy.HookimplMarker(HOOK_PROJECT)
INSTALL: Final = "pip install 'forebay[cuda]', with a build of torch for the machine's CUDA or ROCm"
KV_DTYPES: Final = ("float32", "bfloat16", "float16")
LIBRARIES: Final = {
    "cuda": ("libcuda.so.1", "cuInit", "cuDeviceGetCount"),
    "hip": ("libamdhip64.so", "hipInit", "hipGetDeviceCount"),
}
"""By the kind of torch's build: the driver's library, what opens it, and what counts the devices; both return 0 where all is well."""


@hookimpl
def forebay_backend() -> BackendDescriptor:
    """Triton kernels on a device of CUDA or ROCm, or in Triton's interpreter on the host."""
    supports = {"kv_dtype": KV_DTYPES}
    modes = (
        ModeDescriptor(
            name="", kind="accelerator", load=load, probe=probe, requires=("torch", "triton"), supports=supports
        ),
        ModeDescriptor(
            name="interpret",
            kind="interpreted",
            load=load_interpreted,
            probe=probe_interpreted,
            requires=("torch", "triton"),
            supports=supports,
        ),
    )
    return BackendDescriptor(
        name="cuda",
        summary="NVIDIA and AMD devices: torch for dense work, Triton for doors, attention and sampling, graphs for capture",
        modes=modes,
        install_hint=INSTALL,
    )


def load(*, device: int = 0) -> Driver:
    """Make the driver for a device, by its index."""
    from .opening import open_device

    return open_device(device)


def load_interpreted() -> Driver:
    """Make the driver for Triton's interpreter; kernels run on the host's cores, some thousand times slower than on a device."""
    from .opening import open_interpreter

    return open_interpreter()


def probe() -> Availability:
    """Look for a device by the driver's own library; torch is not imported, only asked by its files what it was built for."""
    built = _build()
    kind = next((name for name in LIBRARIES if built.get(name)), None)
    if kind is None:
        return Availability.lacking(
            "device", need="a build of torch for CUDA or ROCm", found=f"torch {built.get('__version__')}", hint=INSTALL
        )
    library, start, count = LIBRARIES[kind]
    try:
        opened = ctypes.CDLL(library)
    except OSError as error:
        return Availability.lacking(
            "device", need=f"the driver's library {library}", found=f"none: {error}", hint="install the device's driver"
        )
    found = ctypes.c_int(0)
    if getattr(opened, start)(0) != 0 or getattr(opened, count)(ctypes.byref(found)) != 0 or found.value < 1:
        return Availability.lacking(
            "device", need="a device that the driver sees", found="none", hint="look at nvidia-smi or rocm-smi"
        )
    return Availability(
        usable=True, reason=f"{found.value} device(s), torch {built['__version__']}, triton {version('triton')}"
    )


def probe_interpreted() -> Availability:
    """It runs wherever torch and triton are installed."""
    return Availability(usable=True, reason=f"torch {version('torch')}, triton {version('triton')}, interpreted")


def _build() -> dict[str, Any]:
    """What torch says it was built for, from its file of constants, which imports nothing."""
    spec = find_spec("torch")
    origin = Path(spec.origin) if spec is not None and spec.origin is not None else None
    file = origin.with_name("version.py") if origin is not None else None
    return runpy.run_path(str(file)) if file is not None and file.is_file() else {}
