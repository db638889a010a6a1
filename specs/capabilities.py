"""What a backend can do, as data. Capabilities are tested both ways: a claim that fails and an ability not claimed (clause B4)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Capabilities:
    """Static abilities of one opened backend.

    Attributes:
        layouts: pool layouts ``create_pool`` makes; the first is the backend's own choice.
        kv_dtypes: element types of pools.
        addressable: ``wrap_pool`` takes foreign strided memory, all layouts.
        head_dims: head sizes it decodes, None for any positive one.
        max_group: largest G = Hq / Hkv, None for any.
        block_sizes: block sizes it decodes, None for any positive one.
        max_query_len: largest query_len T in ``paged_decode``, None for any.
        window, sinks, softcap, lse: attention features.
        tf32: float32 operands are rounded to tf32 (tolerance 1e-3 in clause D6).
        capture: Segments can be captured and replayed.
        recapture_at_boundary: a request boundary releases the trace, runs one eager step and captures anew (clause C6).
        traces_run: ``run`` evaluates a Segment by tracing it, so that operations delegated to numpy cannot be part of it.
        deferred: work is queued, so a Ticket may be read behind the device.
        max_pool_elements: largest element count of one storage array, None for no limit below the memory's.
    """

    layouts: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    addressable: bool = False
    head_dims: tuple[int, ...] | None = None
    max_group: int | None = None
    block_sizes: tuple[int, ...] | None = None
    max_query_len: int | None = None
    window: bool = True
    sinks: bool = True
    softcap: bool = True
    lse: bool = True
    tf32: bool = False
    capture: bool = True
    recapture_at_boundary: bool = False
    traces_run: bool = False
    deferred: bool = False
    max_pool_elements: int | None = None

    def allows(self, name: str, value: object) -> bool:
        """Whether the field ``name`` leaves room for ``value``: a member, at most a largest one, or (of a yes-or-no) at all.

        ``None`` and ``False`` ask for nothing.
        """
        limit = getattr(self, name)
        if limit is None or value is None or value is False:
            return True
        if isinstance(limit, bool):
            return limit
        if isinstance(limit, tuple):
            return value in limit
        return isinstance(value, int) and value <= limit

    def as_dict(self) -> dict[str, Any]:
        """Plain data for reports."""
        return asdict(self)
