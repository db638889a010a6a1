"""The small surface a port implements (clause B6): ten abstract members, everything else has a default through numpy.

A driver trusts its caller: every argument has been checked by :class:`forebay.specs.backend.Backend`, which is final. Host arrays
that cross this surface hold the device's bytes (``BITS_DTYPE``: bfloat16 as uint16 bit patterns). A driver method that is *not*
overridden runs in numpy through ``to_host`` and ``store``; the backend counts it as *delegated* and cannot capture it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from . import numpy_ops
from .array_namespace import ArrayNamespace
from .attention import DecodeCall
from .capabilities import Capabilities
from .dtypes import Array, HostArray
from .errors import Unsupported
from .segment import Buffer, Fetch, Step
from .write_loc import WriteLoc

if TYPE_CHECKING:
    from .pool import Pool


@dataclass(frozen=True)
class ForeignMemory:
    """Strided memory somebody else owns: the driver's handle, its shape, strides in bytes, and the address of its first element."""

    handle: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int


OWN_COUNTS: Final = ("bytes_down", "waits")
"""Counts of its own that a driver may keep in ``info``, ints that only grow."""


class Driver(ABC):
    """One opened device. Attributes ``capabilities`` and ``info`` (device name, library versions) are set by ``__init__``.

    ``info`` may hold counts of the driver's own, looked up anew each time: ``bytes_down``, bytes of device memory that reached the
    host (an emit's when somebody reads it, not when its copy is queued), and ``waits``, how often it waited for work it had queued.
    The tests of clause D7 look at those that are there, and the conformance statement says which: what a driver does inside one of
    its methods no caller sees.

    ``info`` may also hold ``free_bytes``, the bytes of device memory that are free now, measured anew each time. Where it is there,
    the runtime sizes a pool by it and refuses one that cannot fit before it does any work on the device; where it is not, the
    runtime keeps to a size of its own.
    """

    capabilities: Capabilities
    info: Mapping[str, Any]

    # -- the ten members a port must supply ----------------------------------------------------------------------------
    @property
    @abstractmethod
    def xp(self) -> ArrayNamespace:
        """The array namespace."""

    @abstractmethod
    def allocate(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A handle to persistent memory of undefined content.

        Raises:
            Unsupported: beyond a limit of the device, which the message names.
        """

    @abstractmethod
    def from_host(self, bits: HostArray, dtype: str) -> Array:
        """A new device array with these bytes; ``bits`` may be reused at once."""

    @abstractmethod
    def to_host(self, x: Array) -> HostArray:
        """The bytes of a device array, after everything queued before; a copy."""

    @abstractmethod
    def load(self, buffer: Buffer) -> Array:
        """The device array a Buffer holds now, inside or outside a step."""

    @abstractmethod
    def store(self, buffer: Buffer, bits: HostArray, row: int | None) -> None:
        """Write host bytes into a Buffer, behind everything queued before: all of it, or rows ``row : row + len(bits)``."""

    @abstractmethod
    def free(self, buffer: Buffer) -> None:
        """Give a Buffer's memory back."""

    @abstractmethod
    def run(self, step: Step) -> Fetch:
        """Evaluate the step, commit its updates simultaneously (a value may be the first rows of its Buffer), return its emits.

        A driver that keeps an executable of the same Segment need not evaluate again.
        """

    @abstractmethod
    def capture(self, step: Step) -> Any:
        """Evaluate the step for recording only: no Buffer changes. Returns what ``replay`` needs.

        A step that is not ``warm`` is evaluated for its violations alone and released unused: a device that recording cold
        programs would harm must not record then.

        Raises:
            CaptureViolation: a host read or write, a branch on a device value, or an array that no declared Buffer holds.
            CaptureDeclined: the device cannot capture this step now.
        """

    @abstractmethod
    def replay(self, payload: Any) -> Fetch:
        """Run the recorded step once on the present content of its Buffers, without the Segment's Python."""

    # -- housekeeping --------------------------------------------------------------------------------------------------
    def release_trace(self, payload: Any) -> None:  # noqa: B027  (nothing to free is a sound default)
        """Free what ``capture`` made."""

    def synchronize(self) -> None:  # noqa: B027  (a synchronous device has nothing to wait for)
        """Wait for everything queued."""

    def close(self) -> None:  # noqa: B027  (drivers that opened nothing have nothing to close)
        """Free everything the driver opened."""

    def wrap(self, x: object, dtype: str) -> ForeignMemory:
        """Take foreign strided memory without a copy. A capability."""
        message = "this backend does not take foreign memory (capability 'addressable')"
        raise Unsupported(message, capability="addressable", value=True)

    # -- operations with defaults through numpy ------------------------------------------------------------------------
    def zero(self, buffer: Buffer) -> None:
        """Fill a Buffer with zeros, on the device."""
        numpy_ops.zero(self, buffer)

    def write_kv(self, pool: Pool, layer: int, loc: WriteLoc, k: Array, v: Array | None) -> None:
        """Store rows ``k [N, Hkv, D]``, ``v [N, Hkv, Dv]`` (None for LATENT) at ``loc``, in the pool's dtype (clauses W6, W8)."""
        numpy_ops.write_kv(self, pool, layer, loc, k, v)

    def read_kv(self, pool: Pool, layer: int, loc: WriteLoc) -> tuple[Array, Array]:
        """Rows at ``loc`` in the pool's dtype; dropped rows are zero."""
        return numpy_ops.read_kv(self, pool, layer, loc)

    def copy_kv(self, pool: Pool, src: WriteLoc, dst: WriteLoc) -> None:
        """Copy rows of every layer bit for bit, as if all reads came before all writes."""
        numpy_ops.copy_kv(self, pool, src, dst)

    def paged_decode(self, call: DecodeCall) -> tuple[Array, Array | None]:
        """(out ``[B, T, Hq, Dv]`` in q's dtype, LSE float32 ``[B, T, Hq]`` or None); nothing is read by the host (clause D7).

        ``call.path`` alone selects gather, which is reported by ``call.gathered()`` where it is launched (clause D12).
        """
        return numpy_ops.paged_decode(self, call)

    def merge_partials(self, outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
        """Merge partial attention results by their natural-log LSE."""
        return numpy_ops.merge_partials(self, outs, lses)

    def stage(
        self,
        pool: Pool,
        layer: int,
        k: HostArray,
        v: HostArray | None,
        src_blocks: HostArray,
        dst_blocks: HostArray,
        tokens: int,
    ) -> None:
        """Copy the first ``tokens`` rows of host blocks ``src_blocks`` to pool blocks ``dst_blocks``, bit for bit.

        ``k [NB, BS, Hkv, D]``, ``v`` are strided host views of device bytes; both may be reused when this returns.
        """
        numpy_ops.stage(self, pool, layer, k, v, src_blocks, dst_blocks, tokens)


DELEGABLE = ("zero", "write_kv", "read_kv", "copy_kv", "paged_decode", "merge_partials", "stage")
"""Operations a port may leave to numpy."""


def is_delegated(driver: Driver, operation: str) -> bool:
    """True if the driver's class does not override ``operation``."""
    return getattr(type(driver), operation) is getattr(Driver, operation)
