"""Tells Forebay about the ``tpu`` backend; jax is imported only once it has been chosen."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pluggy

from forebay.specs.descriptor import HOOK_PROJECT, Availability, BackendDescriptor, ModeDescriptor

if TYPE_CHECKING:
    from forebay.specs.driver import Driver

hookimpl: Final = pluggy.HookimplMarker(HOOK_PROJECT)
INSTALL: Final = "pip install 'forebay[tpu]' libtpu"
KV_DTYPES: Final = ("float32", "bfloat16")
DEVICE_FILES: Final = ("/dev/accel0", "/dev/vfio/0")
"""What a host with a TPU has, by the kind of its driver."""


@hookimpl
def forebay_backend() -> BackendDescriptor:
    """Pallas kernels on a TPU or interpreted on the host, or the JAX path on the host without Pallas."""
    supports = {"kv_dtype": KV_DTYPES}
    modes = (
        ModeDescriptor(name="", kind="accelerator", load=load, probe=probe, requires=("jax",), supports=supports),
        ModeDescriptor(
            name="interpret",
            kind="interpreted",
            load=load_interpreted,
            probe=probe_host,
            requires=("jax",),
            supports=supports,
        ),
        ModeDescriptor(name="xla", kind="host", load=load_xla, probe=probe_host, requires=("jax",), supports=supports),
    )
    return BackendDescriptor(
        name="tpu",
        summary="TPUs: JAX for dense work, Pallas for attention, programs compiled ahead of time for capture",
        modes=modes,
        install_hint=INSTALL,
    )


def load(*, device: int = 0) -> Driver:
    """Make the driver for a TPU, by its index on this host."""
    from .opening import open_device

    return open_device(device)


def load_interpreted() -> Driver:
    """Make the driver for the host with Pallas interpreted: some thousand times slower than on a TPU."""
    from .opening import open_host

    return open_host(by="pallas")


def load_xla() -> Driver:
    """Make the driver for the host with attention as a loop of XLA."""
    from .opening import open_host

    return open_host(by="xla")


def probe() -> Availability:
    """Look for a TPU by its device files; jax is not imported."""
    found = [name for name in DEVICE_FILES if Path(name).exists()]
    if not found:
        return Availability.lacking(
            "device", need=f"a TPU ({' or '.join(DEVICE_FILES)})", found="none", hint="run on a TPU host"
        )
    try:
        libtpu = version("libtpu")
    except PackageNotFoundError:
        return Availability.lacking("libtpu", need="the TPU's runtime", found="none", hint=INSTALL)
    return Availability(usable=True, reason=f"{found[0]}, jax {version('jax')}, libtpu {libtpu}")


def probe_host() -> Availability:
    """It runs wherever jax is installed."""
    return Availability(usable=True, reason=f"jax {version('jax')} on the host")
