"""The backend as users and the shared suite see it: every check of the contract, once, in front of a small driver.

The class is final. A port implements :class:`forebay.specs.driver.Driver`; it can neither override nor loosen what is checked
here (clause B6).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast, final

from .attention import AttentionParams, AttentionPath, DecodeCall, check_decode
from .backend_memory import BackendMemory
from .driver import ForeignMemory
from .dtypes import ITEMSIZE, Array, HostArray, is_host
from .errors import CaptureDeclined, ColdCapture, InvalidInput, InvalidLayout, StaleTrace, Unsupported
from .geometry import KVGeometry, check_no_overlap, share_memory, storage_shapes
from .pool import Pool
from .scope import Evaluation, Scope
from .segment import Buffer, Effects, Fetch, Segment, Step, Ticket, Trace
from .shadow import Shadow, check_stage
from .write_loc import BlockTable, WriteLoc


@final
class Backend(BackendMemory):
    """One opened device: its memory (:class:`BackendMemory`), its pools, attention, and the running of Segments."""

    # -- pools -----------------------------------------------------------------------------------------------------------
    def create_pool(
        self, geometry: KVGeometry, layout: str | None = None, *, requires_physical_write_loc: bool = False
    ) -> Pool:
        """A pool of undefined content whose block 0 is the sink; ``layout`` None lets the backend choose.

        ``requires_physical_write_loc`` makes its doors demand the mark although the pool is static.

        Raises:
            Unsupported: layout, dtype or size beyond the backend; the limit is named.
            InvalidLayout: the geometry does not fit the layout.
        """
        self.forbid_in_segment("create_pool")
        layout = self._choose_layout(geometry, layout)
        pool = Pool(
            self,
            geometry,
            layout,
            lambda name, _layer, _part, shape: self._make_buffer(name, shape, geometry.dtype),
            sink=True,
            requires_physical_write_loc=requires_physical_write_loc,
        )
        self._pools.append(pool)
        return pool

    def create_shadow(self, geometry: KVGeometry) -> Shadow:
        """A shadow in the backend's own layout; nothing in it can be read before it is staged."""
        self.forbid_in_segment("create_shadow")
        layout = self._choose_layout(geometry, None)
        shadow = Shadow(
            self, geometry, layout, lambda name, _layer, _part, shape: self._make_buffer(name, shape, geometry.dtype)
        )
        self._pools.append(shadow)
        return shadow

    def wrap_pool(self, arrays: Any, *, layout: str, geometry: KVGeometry) -> Pool:
        """A pool over foreign strided memory (capability ``addressable``): no sink, same clauses, nothing is copied.

        ``arrays`` is one array (KV2, PACKED, FUSED, LATENT) or a pair (NHD, HND) for one layer, a list of these for several; numpy
        (bfloat16 as uint16 bit patterns) or the backend's own arrays. The memory must outlive the pool.

        Raises:
            Unsupported: the backend does not take foreign memory.
            InvalidLayout: shape, dtype or strides do not fit layout and geometry.
        """
        self.forbid_in_segment("wrap_pool")
        if not self.capabilities.addressable:
            message = f"backend {self.name!r} does not take foreign memory (capability 'addressable')"
            raise Unsupported(message, capability="addressable", value=True)
        self._choose_layout(geometry, layout)
        parts = len(storage_shapes(layout, geometry))
        layers = arrays if isinstance(arrays, list) else [arrays]
        layers = [layer if isinstance(layer, tuple) else (layer,) for layer in layers]
        if len(layers) != geometry.num_layers or any(len(layer) != parts for layer in layers):
            raise InvalidLayout(
                f"wrap_pool: got {len(layers)} layers of {[len(layer) for layer in layers]} arrays; layout {layout} with "
                f"num_layers={geometry.num_layers} takes a list of {geometry.num_layers} (one: no list), {parts} array(s) each"
            )

        planes: list[tuple[str, ForeignMemory]] = []

        def wrap(name: str, layer: int, part: int, shape: tuple[int, ...]) -> Buffer:
            foreign = self._driver.wrap(layers[layer][part], geometry.dtype)
            got = foreign.shape
            if got != shape:
                raise InvalidLayout(f"wrap_pool {name}: got shape {list(got)}, layout {layout} expects {list(shape)}")
            check_no_overlap(got, foreign.strides, ITEMSIZE[geometry.dtype], f"wrap_pool {name}")
            for other, memory in planes:
                if share_memory(foreign, memory, ITEMSIZE[geometry.dtype]):
                    raise InvalidLayout(f"wrap_pool {name}: overlaps the memory of {other}; each part needs its own")
            planes.append((name, foreign))
            return self._track(Buffer(self, name, shape, geometry.dtype, foreign.handle, reserved=False))

        pool = Pool(self, geometry, layout, wrap, sink=False)
        self._pools.append(pool)
        return pool

    # -- attention and staging -------------------------------------------------------------------------------------------
    def paged_decode(
        self,
        q: Array,
        pool: Pool,
        layer: int,
        table: BlockTable | Array,
        visible: Array,
        *,
        table_len: int,
        params: AttentionParams | None = None,
        path: str = "direct",
        return_lse: bool = False,
    ) -> Any:
        """Attention of ``q [B, Hq, D]`` or ``[B, T, Hq, D]`` over the visible KV rows of each sequence (clauses D1 to D12).

        ``table`` int32 ``[B, width]``, ``visible`` int32 ``[B]`` counts the last query's keys. Returns ``[B, (T,) Hq, Dv]`` in q's
        dtype, with ``return_lse`` also the natural-log LSE float32 ``[B, (T,) Hq]``. Invalid blocks count in ``pool.invalid``.

        Raises:
            UnmarkedWriteLoc, InvalidInput, InvalidLayout, Unsupported: before any device work.
            CaptureViolation: numpy table or visible, or an undeclared pool, inside a Segment.
        """
        self._use_pool(pool)
        if any(is_host(x) for x in (table.array if isinstance(table, BlockTable) else table, visible)):
            self.forbid_in_segment("paged_decode with a numpy table or visible")
        pool.check_layer(layer, "paged_decode")
        params = AttentionParams() if params is None else params
        q4, blocks, seen, scale = check_decode(
            self.xp, self.capabilities, q, pool, table, visible, table_len, params, path, return_lse
        )
        blocks, seen = (self.to_device(x) if is_host(x) else x for x in (blocks, seen))
        if isinstance(pool, Shadow):
            blocks, table_len = pool.current_blocks(layer, blocks, seen, table_len)
        self._launch("paged_decode")
        call = DecodeCall(
            q4,
            pool,
            layer,
            blocks,
            seen,
            table_len,
            scale,
            params.window,
            params.softcap,
            params.sinks,
            cast("AttentionPath", path),
            return_lse,
            gathered=partial(self._launch, "gather", implemented_by="paged_decode"),
        )
        out, lse = self._driver.paged_decode(call)
        if len(self.xp.shape(q)) == 3:
            rows, _, heads, dim = self.xp.shape(out)
            out = self.xp.reshape(out, (rows, heads, dim))
            lse = None if lse is None else self.xp.reshape(lse, (rows, heads))
        return (out, lse) if return_lse else out

    def merge_partials(self, outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
        """Merge partial results ``[…, Hq, D]`` by natural-log LSEs ``[…, Hq]``; an empty part has LSE -inf (clause D10)."""
        if not outs or len(outs) != len(lses):
            raise InvalidInput(
                f"merge_partials: got {len(outs)} outputs and {len(lses)} LSEs, expected the same number, at least 1"
            )
        for x in (*outs, *lses):
            if not self.xp.is_array(x):
                raise InvalidInput(
                    f"merge_partials: got {type(x).__name__}, expected device arrays (use backend.to_device)"
                )
        shape = self.xp.shape(outs[0])
        for out, lse in zip(outs, lses, strict=True):
            if self.xp.shape(out) != shape or self.xp.shape(lse) != shape[:-1] or self.xp.dtype(lse) != "float32":
                raise InvalidInput(
                    f"merge_partials: got out {list(self.xp.shape(out))}, LSE {self.xp.dtype(lse)}{list(self.xp.shape(lse))}, "
                    f"expected {list(shape)} and float32 {list(shape[:-1])}"
                )
        self._launch("merge_partials")
        return self._driver.merge_partials(outs, lses)

    def stage(
        self,
        k_view: HostArray,
        v_view: HostArray | None,
        shadow: Pool,
        layer: int,
        *,
        src_blocks: Sequence[int] | HostArray,
        dst_blocks: Sequence[int] | HostArray | BlockTable,
        tokens: int,
        dtype: str,
        accept_strided: bool = False,
    ) -> None:
        """Copy ``tokens`` rows of host blocks to blocks of a shadow (or pool), bit for bit (clauses S1 to S4).

        ``k_view``, ``v_view``: numpy ``[NB, BS, Hkv, D]`` of the *named* dtype (bfloat16 as uint16 bits), which must be the shadow's;
        a non-contiguous view needs ``accept_strided=True``. Both may be reused when this returns. Rows past ``tokens`` and other
        blocks keep their bytes. A pool that translates ids takes ``dst_blocks`` as a BlockTable of one row, marked physical.

        Raises:
            InvalidInput, InvalidLayout: nothing was copied.
            UnmarkedWriteLoc: the pool translates ids and ``dst_blocks`` carry no mark.
            CaptureViolation: inside a Segment.
        """
        self.forbid_in_segment("stage (a host write)")
        self._use_pool(shadow)
        shadow.check_layer(layer, "stage")
        k, v, src, dst = check_stage(
            k_view, v_view, shadow, layer, src_blocks, dst_blocks, tokens, dtype, accept_strided
        )
        self._launch("stage")
        g = shadow.geometry
        self.counters.uploads += 1
        self.counters.upload_bytes += (
            tokens * g.num_kv_heads * ITEMSIZE[dtype] * (g.key_dim + (0 if v is None else g.value_dim))
        )
        self._driver.stage(shadow, layer, k, v, src, dst, tokens)
        if isinstance(shadow, Shadow):
            shadow.mark_staged(layer, dst, tokens)

    # -- segments ----------------------------------------------------------------------------------------------------------
    def run(self, segment: Segment) -> Ticket:
        """Run the Segment once, its Python included; makes it warm (clause C1)."""
        self._check_segment(segment, "run")
        fetch = self._driver.run(
            Step(segment, partial(self._evaluate, Scope(segment, capturing=False)), capturing=False)
        )
        self.counters.run += 1
        self.counters.launches.update(self._evaluated[segment].launches)
        self._warm.add(segment)
        return self._ticket(fetch, segment)

    def capture(self, segment: Segment) -> Trace:
        """Record the Segment without changing any Buffer; ``replay`` is the step (clause C12).

        Raises:
            CaptureViolation: an act a captured step may not do, named; outranks ColdCapture.
            ColdCapture: the Segment never ran.
            CaptureDeclined: the device cannot capture it (an operation delegated to numpy, memory); counted.
        """
        self._check_segment(segment, "capture")
        scope = Scope(segment, capturing=True)
        try:
            if not self.capabilities.capture:
                raise CaptureDeclined(f"backend {self.name!r} does not capture")
            warm = segment in self._warm
            payload = self._driver.capture(Step(segment, partial(self._evaluate, scope), capturing=True, warm=warm))
        except CaptureDeclined:
            self.counters.declined += 1
            raise
        if segment not in self._warm:
            self._driver.release_trace(payload)
            raise ColdCapture(f"Segment {segment} was never run on this backend; run it once before capture")
        evaluated = self._evaluated[segment]
        trace = Trace(segment, payload, (*segment.buffers, *evaluated.taken), evaluated.launches)
        self._traces.add(trace)
        self.counters.capture += 1
        self.counters.recapture += segment in self._captured
        self._captured.add(segment)
        return trace

    def replay(self, trace: Trace) -> Ticket:
        """Run a captured step on the present content of its Buffers, without the Segment's Python.

        Raises:
            StaleTrace: the trace was released or never captured here.
        """
        self.forbid_in_segment("replay")
        if not isinstance(trace, Trace) or not trace.live or trace not in self._traces:
            kind = type(trace).__name__
            known = (
                "a Trace this backend did not capture"
                if getattr(trace, "live", False)
                else f"an empty or released {kind}"
            )
            raise StaleTrace(f"replay: got {known}; capture the Segment on this backend")
        fetch = self._driver.replay(trace.payload)
        self.counters.replay += 1
        self.counters.launches.update(trace.launches)
        return self._ticket(fetch, trace.segment)

    # -- called by pools ---------------------------------------------------------------------------------------------------
    def dispatch_write(self, pool: Pool, layer: int, loc: WriteLoc, k: Array, v: Array | None) -> None:
        """Hand a checked write to the driver."""
        self._use_pool(pool)
        self._launch("write_kv")
        self._driver.write_kv(pool, layer, loc, k, v)

    def dispatch_read(self, pool: Pool, layer: int, loc: WriteLoc) -> tuple[Array, Array]:
        """Hand a checked read to the driver."""
        self._use_pool(pool)
        self._launch("read_kv")
        return self._driver.read_kv(pool, layer, loc)

    def dispatch_copy(self, pool: Pool, src: WriteLoc, dst: WriteLoc) -> None:
        """Hand a checked copy to the driver."""
        self._use_pool(pool)
        self._launch("copy_kv")
        self._driver.copy_kv(pool, src, dst)

    # -- inside ------------------------------------------------------------------------------------------------------------
    def _evaluate(self, scope: Scope) -> Effects:
        self._scope = scope
        try:
            effects = scope.effects(scope.segment.fn(self), self.xp)
        finally:
            self._scope = None
        self._evaluated[scope.segment] = Evaluation(scope.launches, tuple(scope.taken))
        return effects

    def _ticket(self, fetch: Fetch, segment: Segment) -> Ticket:
        self._serial += 1

        def check() -> None:
            self.forbid_in_segment(f"reading the Ticket of Segment {segment}")

        return Ticket(self._serial, fetch, self._count_download, check)

    def _choose_layout(self, geometry: KVGeometry, layout: str | None) -> str:
        cap = self.capabilities
        if not isinstance(geometry, KVGeometry):
            raise InvalidInput(f"geometry: got {type(geometry).__name__}, expected KVGeometry")
        if layout is None:
            layout = "LATENT" if geometry.value_head_dim is not None else next(x for x in cap.layouts if x != "LATENT")
        storage_shapes(layout, geometry)
        for field, name, got in (("layouts", "layout", layout), ("kv_dtypes", "KV dtype", geometry.dtype)):
            if not cap.allows(field, got):
                known = ", ".join(getattr(cap, field))
                message = f"{name} {got!r}: backend {self.name!r} supports {known}"
                raise Unsupported(message, capability=field, value=got)
        return layout

    def _use_pool(self, pool: Pool) -> None:
        if not isinstance(pool, Pool) or pool not in self._pools:
            raise InvalidInput(f"a pool of another backend, a released one or no pool at all: {pool!r}")
        if self._scope is not None:
            self._scope.check_pool(pool)

    def _check_segment(self, segment: Segment, act: str) -> None:
        self.forbid_in_segment(act)
        if not isinstance(segment, Segment):
            raise InvalidInput(f"{act}: got {type(segment).__name__}, expected a Segment")
        for buffer in segment.buffers:
            self._check_buffer(buffer)
