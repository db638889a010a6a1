"""Opens a JAX device and makes the driver: the first place where jax is imported."""

from __future__ import annotations

from typing import Final

import jax

from forebay.specs.driver import Driver
from forebay.specs.errors import BackendUnavailable, InvalidInput

from .driver import TpuDriver
from .way import ON_DEVICE, Way

QUICK: Final = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Of XLA on the host, where kernels are interpreted: compiling takes longer than running."""


def open_host(*, by: str) -> Driver:
    """A driver on the host: Pallas interpreted, or the loop of XLA.

    Raises:
        BackendUnavailable: this process has made JAX use other platforms only.
    """
    platforms = _platforms()
    if platforms is None:
        # Otherwise JAX looks for a TPU that is not there for as long as its libraries like.
        jax.config.update("jax_platforms", "cpu")
    elif "cpu" not in platforms.split(","):
        raise BackendUnavailable(
            f"tpu on the host: JAX may not use the host in this process (jax_platforms is {platforms!r}); add 'cpu' to it"
        )
    device = jax.devices("cpu")[0]
    way = Way("pallas", interpret=True, options=dict(QUICK)) if by == "pallas" else Way("xla", interpret=False)
    return TpuDriver(device, way)


def open_device(index: int) -> Driver:
    """A driver for TPU ``index`` of this host.

    Raises:
        InvalidInput: ``index`` is no index.
        BackendUnavailable: JAX sees no such device.
    """
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise InvalidInput(f"tpu option device: got {index!r}, expected an int from 0 on")
    try:
        devices = jax.local_devices(backend="tpu")
    except RuntimeError as error:
        raise BackendUnavailable(
            f"tpu: JAX sees no TPU in this process (jax_platforms is {_platforms()!r}): {error}"
        ) from error
    if index >= len(devices):
        raise BackendUnavailable(f"tpu option device: got {index}, JAX sees {len(devices)} TPU(s) on this host")
    return TpuDriver(devices[index], ON_DEVICE)


def _platforms() -> str | None:
    """What JAX may use in this process, as it was told; None where nobody told it."""
    told: str | None = getattr(jax.config, "jax_platforms")  # noqa: B009  (jax declares its settings at run time)
    return told
