"""Which kernels did the work: by the backend's own counts, by what the stand-in ran, and with everything else that could refusing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from forebay.backends.cuda.standin import StandIn
from forebay.backends.torch_shared.namespace import TorchNamespace
from forebay.runtime import Model, SamplingParams, load_model, open_backend
from forebay.runtime.decode_step import _advance, _rows_that_check
from forebay.runtime.digests import digest, digest_weights
from forebay.runtime.state import BucketRows
from forebay.specs import Backend, Segment
from forebay.specs.step_operations import fuses_step
from forebay.specs.suite.kv import geometry, int32, new_pool, put_values
from forebay.specs.suite.mapped import Mapped
from tests.runtime.harness import ARMS, make_engine, prompt, tokens_of, write_tiny_folder

PROMPTS = [prompt(n, seed=9) for n in (3, 9)]
FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
LAYERS = 2
DECODE = {"decode_kernel", "reduce_kernel", "write_rows_kernel", "slots_from_table_kernel"}
STEP = {"accepted_rows_kernel", "advance_rows_kernel", "digest_rows_kernel", "largest_places_kernel"}
LIBRARY = (
    "softmax",
    "_softmax",
    "_safe_softmax",
    "logsumexp",
    "scaled_dot_product",
    "_scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "_cudnn_attention",
    "_fused_sdp",
    "flex_attention",
    "bmm",
    "baddbmm",
    "index_put",
    "_index_put",
    "index_copy",
    "index_add",
    "scatter",
    "masked_scatter",
    "gather",
    "put",
    "cumsum",
    "exp",
)
"""Operations of torch, by the beginning of their names, that attention, a scatter or a gather of KV would be made of."""


class NoLibrary(TorchDispatchMode):
    """Sees every operation that torch runs, those of the stand-in's stream too, and refuses the library's.

    Attributes:
        seen: names of operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse, or let through."""
        name = func._schema.name.removeprefix("aten::")
        self.seen[name] += 1
        if any(name == begin or name.startswith((f"{begin}_", f"{begin}.")) for begin in LIBRARY):
            raise AssertionError(f"the library ran {name}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[NoLibrary]:
    """torch's attention raises by name and by operation."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the library was called")

    for place in (torch, torch.Tensor, torch.nn.functional, flex_attention):
        for name in ("scaled_dot_product_attention", "flex_attention", "softmax", "index_put", "index_put_", "bmm"):
            if hasattr(place, name):
                monkeypatch.setattr(place, name, refuse)
    with NoLibrary() as mode:
        yield mode


def test_the_library_is_seen_where_it_is_used(no_library: NoLibrary) -> None:
    """On the host and on the stream: what is asked for on the stand-in is refused at once, or when it is done."""
    x = StandIn().empty((2, 3), torch.float32)
    acts: tuple[Callable[[], object], ...] = (
        lambda: torch.ops.aten._softmax(torch.ones(2, 3), -1, half_to_float=False),
        lambda: torch.exp(x),
        lambda: torch.softmax(x, -1),
    )
    for act in acts:
        with pytest.raises(AssertionError, match="the library"):
            act()


@pytest.fixture
def backend() -> Iterator[Backend]:
    with open_backend("cuda:interpret") as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model"), dtype="float32")


@pytest.fixture(scope="module")
def expected(model: Model) -> list[tuple[int, ...]]:
    with open_backend("cpu", threads=1) as cpu, make_engine(model, cpu, arm="eager", slots=2, max_len=32) as engine:
        return tokens_of(engine.generate(PROMPTS, FOUR))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Kernels that the stand-in really ran, by name, counted where the interpreter is entered."""
    counted: Counter[str] = Counter()
    whole = StandIn.launch

    def launch(self: StandIn, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        class Counting:
            fn = kernel.fn

            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                counted[kernel.fn.__name__] += 1
                return kernel[grid]

        whole(self, Counting(), grid, *args, **constants)

    monkeypatch.setattr(StandIn, "launch", launch)
    return counted


# -- an engine -----------------------------------------------------------------------------------------------------------
@pytest.mark.clause("C11", "D4", "D12")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("arm", ARMS)
def test_an_engine_decodes_by_kernels_alone(
    arm: str,
    path: str,
    backend: Backend,
    model: Model,
    expected: list[tuple[int, ...]],
    ran: Counter[str],
    no_library: NoLibrary,
) -> None:
    """Equal tokens, each kernel launched, none of the library's operations run, and in the captured arm the same kernels in replays."""
    capture = "required" if arm == "captured" else "auto"
    options = {"slots": 2, "max_len": 32, "block_size": 4, "attention": path}
    with make_engine(model, backend, arm=arm, capture=capture, **options) as engine:
        assert tokens_of(engine.generate(PROMPTS, FOUR)) == expected
    launched = backend.info["launches"]
    assert launched.keys() >= DECODE | (set() if arm == "eager" else STEP)
    assert ("gather_kernel" in launched) == (path == "gather")
    assert backend.counters.delegated.total() == 0
    assert "mm" in no_library.seen or "addmm" in no_library.seen
    replays = backend.counters.replay
    assert (replays > 0) == (arm == "captured")
    replayed = backend.info["replayed"]
    assert replayed.get("decode_kernel", 0) == LAYERS * replays
    assert replayed.get("advance_rows_kernel", 0) == replays


@pytest.mark.clause("C11")
def test_a_replay_runs_the_kernels_that_its_capture_recorded(backend: Backend, ran: Counter[str]) -> None:
    """A capture records and runs nothing; each replay runs what was recorded, and the count of replayed kernels says so."""
    g = geometry(num_blocks=4)
    with new_pool(backend, g) as pool:
        put_values(backend, pool, range(g.block_size, 2 * g.block_size), range(g.block_size))
        q = backend.buffer("q", np.ones((1, g.num_kv_heads, g.head_dim), np.float32))
        table, visible = backend.buffer("table", int32([1])), backend.buffer("visible", int32(g.block_size))
        inputs = (q, table, visible)

        def attend(b: Backend) -> Any:
            given = [x.get() for x in inputs]
            return {}, {"out": b.paged_decode(given[0], pool, 0, given[1], given[2], table_len=1, path="gather")}

        segment = Segment("attend", attend, reads=inputs, pools=(pool,))
        backend.run(segment).get()
        backend.synchronize()
        before, asked = Counter(ran), Counter(backend.info["launches"])
        trace = backend.capture(segment)
        backend.synchronize()
        recorded = Counter(backend.info["launches"]) - asked
        assert {"decode_kernel", "gather_kernel", "reduce_kernel"} <= recorded.keys()
        assert ran == before
        for turn in range(1, 4):
            backend.replay(trace).get()
            backend.synchronize()
            times = Counter({name: n * turn for name, n in recorded.items()})
            assert ran - before == times == Counter(backend.info["replayed"])
        backend.release(trace)
        for buffer in inputs:
            backend.release(buffer)


@pytest.mark.clause("S1", "S3")
def test_what_was_offloaded_comes_back_by_a_kernel(
    backend: Backend, model: Model, ran: Counter[str], no_library: NoLibrary
) -> None:
    """Two requests in room for one and a half: one is preempted, kept by the host and staged back; its tokens stay."""
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [prompt(5, seed=1), prompt(6, seed=2)]
    options: dict[str, Any] = {"slots": 2, "block_size": 2, "max_len": 22}
    with open_backend("cpu", threads=1) as cpu, make_engine(model, cpu, arm="eager", **options) as engine:
        want = tokens_of(engine.generate(prompts, params))
    with make_engine(model, backend, num_blocks=14, preempt="offload", **options) as engine:
        assert tokens_of(engine.generate(prompts, params)) == want
        assert engine.report()["engine"]["restored"] > 0
    assert ran["stage_rows_kernel"] > 0
    assert ran["read_rows_kernel"] > 0


@pytest.mark.clause("W4", "W9")
def test_a_mapped_pool_translates_by_a_kernel(backend: Backend, ran: Counter[str], no_library: NoLibrary) -> None:
    """Virtual slots of page 1, which is at 2, and of page 3, which is at 1; a pad reads zeros."""
    g = geometry(num_blocks=4)
    with new_pool(backend, g, requires_physical_write_loc=True) as pool:
        mapped, size = Mapped(backend, pool, (0, 2, 3, 1)), g.block_size
        put_values(backend, pool, range(size, 4 * size), range(size, 4 * size))
        ids = backend.to_device(int32(size + 1, 3 * size + 2, -1))
        got = backend.to_host(pool.read(0, mapped.loc(ids))[1])
        assert got[:, 0, 0].tolist() == [2 * size + 1, size + 2, 0]
        backend.release(mapped.map)
    assert ran["translate_kernel"] == 1


# -- the step's rows against the runtime's own operations ------------------------------------------------------------------
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
BLOCK, WIDTH, BLOCKS, STOPS = 4, 5, 9, 8


def random_rows(seed: int, count: int) -> tuple[dict[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Rows and next tokens: live ones, and ones with a stale stamp, a met limit, a wrong length, no page, a stop token, idle ones."""
    random = np.random.default_rng(seed)
    position = random.integers(0, WIDTH * BLOCK + 2, count)
    rows = {
        "token": random.integers(0, 9, count),
        "position": position,
        "visible": position + 1,
        "epoch": random.integers(0, 3, count),
        "limit": position + random.integers(-1, 4, count),
        "seed": random.integers(INT_MIN, INT_MAX, count),
        "table": random.integers(-1, BLOCKS + 1, (count, WIDTH)),
        "stop": random.integers(-1, 40, (count, STOPS)),
    }
    rows["stamp"] = np.where(random.random(count) < 0.8, rows["epoch"], rows["epoch"] + 1)
    rows["visible"][random.random(count) < 0.1] += 1
    idle = random.random(count) < 0.1
    rows["position"][idle], rows["visible"][idle] = -1, 0
    rows["position"][:2], rows["visible"][:2], rows["limit"][:2] = INT_MAX, INT_MIN, INT_MAX
    return {name: x.astype(np.int32) for name, x in rows.items()}, random.integers(0, 40, count).astype(np.int32)


@contextmanager
def in_both(rows: dict[str, np.ndarray[Any, Any]]) -> Iterator[tuple[Any, ...]]:
    """The rows on cuda:interpret, whose namespace has operations for them, and as host tensors, whose namespace has none."""
    with open_backend("cuda:interpret") as backend:
        plain: Any = SimpleNamespace(xp=TorchNamespace(), to_device=torch.from_numpy, to_host=lambda x: x.numpy())
        made = []
        for b in (backend, plain):
            held = {name: b.to_device(x) for name, x in rows.items()}
            digests = {"table_digest": held["token"], "stop_digest": held["token"]}
            made.append((b, BucketRows(bucket=len(rows["token"]), **held, **digests)))
        assert fuses_step(backend.xp)
        assert not fuses_step(plain.xp)
        yield tuple(made)


@pytest.mark.clause("C4", "C5")
@pytest.mark.parametrize("count", [1, 2, 7, 500])
def test_rows_are_checked_and_advanced_as_the_runtime_does_it(count: int) -> None:
    """Bit by bit the same: which rows act, and token, position and visible behind the step."""
    pool: Any = SimpleNamespace(geometry=SimpleNamespace(block_size=BLOCK, num_blocks=BLOCKS), first_block=1)
    state: Any = SimpleNamespace(scalars={name: name for name in ("token", "position", "visible")})
    for seed in range(3):
        rows, chosen = random_rows(seed, count)
        results = []
        with in_both(rows) as both:
            for b, held in both:
                accepted = _rows_that_check(b, held, pool)
                advanced: Any = _advance(b, state, held, accepted, b.to_device(chosen))
                results.append({"accepted": accepted, **advanced})
                results[-1] = {name: b.to_host(x) for name, x in results[-1].items()}
        for name, want in results[1].items():
            assert results[0][name].dtype == want.dtype
            np.testing.assert_array_equal(results[0][name], want, err_msg=name)
        if count == 500:
            assert 0.1 < results[0]["accepted"].mean() < 0.7
            retired = results[0]["accepted"] & (results[0]["position"] == -1)
            assert 0.05 < retired.mean() < results[0]["accepted"].mean()


@pytest.mark.clause("C5")
def test_digests_are_the_hosts(backend: Backend) -> None:
    """Of the block columns of wider rows, as a table with its stamp has them."""
    random = np.random.default_rng(0)
    for width in (1, 8, 300):
        values = random.integers(INT_MIN, INT_MAX, (6, width + 1), np.int32)
        got = backend.xp.digest_rows(  # type: ignore[attr-defined]  # which the cuda namespace has
            backend.to_device(values)[:, :width], backend.to_device(digest_weights(width)[None])
        )
        assert backend.to_host(got).tolist() == [digest(row[:width]) for row in values]
