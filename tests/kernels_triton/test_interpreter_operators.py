"""The short ways of the interpreter give what Triton's long ones give, bit for bit and type for type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language import core
from triton.language.semantic import IncompatibleTypeErrorImpl as TritonTypeError
from triton.runtime import interpreter

from forebay.kernels.triton import interpreter_operators as operators

SEMANTIC = interpreter.interpreter_semantic
LONG = {
    "__add__": lambda a, b: SEMANTIC.add(a, b, True),
    "__radd__": lambda a, b: SEMANTIC.add(b, a, True),
    "__sub__": lambda a, b: SEMANTIC.sub(a, b, True),
    "__rsub__": lambda a, b: SEMANTIC.sub(b, a, True),
    "__mul__": lambda a, b: SEMANTIC.mul(a, b, True),
    "__rmul__": lambda a, b: SEMANTIC.mul(b, a, True),
    "__truediv__": SEMANTIC.truediv,
    "__floordiv__": SEMANTIC.floordiv,
    "__mod__": SEMANTIC.mod,
    "__and__": SEMANTIC.and_,
    "__or__": SEMANTIC.or_,
    "__lt__": lambda a, b: SEMANTIC.less_than(a, SEMANTIC.to_tensor(b)),
    "__le__": lambda a, b: SEMANTIC.less_equal(a, SEMANTIC.to_tensor(b)),
    "__gt__": lambda a, b: SEMANTIC.greater_than(a, SEMANTIC.to_tensor(b)),
    "__ge__": lambda a, b: SEMANTIC.greater_equal(a, SEMANTIC.to_tensor(b)),
    "__eq__": lambda a, b: SEMANTIC.equal(a, SEMANTIC.to_tensor(b)),
    "__ne__": lambda a, b: SEMANTIC.not_equal(a, SEMANTIC.to_tensor(b)),
}
KINDS: dict[Any, Any] = {tl.int1: bool, tl.int32: np.int32, tl.int64: np.int64, tl.float32: np.float32}
SHAPES = ((), (8,), (4, 8), (4, 1), (1, 8))
NUMBERS = (0, 3, -5, 2**31 - 1, 2**40, 0.0, -0.0, 0.5, float("inf"), float("nan"))


def tensor(kind: Any, shape: tuple[int, ...], seed: int) -> Any:
    """Random elements, those at the ends of the type's range among them."""
    random, dtype = np.random.default_rng(seed), KINDS[kind]
    size = shape or (1,)
    if dtype is bool:
        data = random.integers(0, 2, size).astype(bool)
    elif dtype is np.float32:
        data = random.standard_normal(size).astype(np.float32)
        data.reshape(-1)[:3] = [np.nan, -0.0, np.inf][: data.size]
    else:
        info = np.iinfo(dtype)
        data = random.integers(info.min, info.max, size, dtype, endpoint=True)
        data.reshape(-1)[:4] = [info.min, info.max, 1, -1][: data.size]
    return core.tensor(interpreter.TensorHandle(data, kind), core.block_type(kind, list(shape)) if shape else kind)


def outcome(run: Any, *operands: Any) -> Any:
    """Type and bits of what comes, or the kind of error."""
    with np.errstate(all="ignore"):
        try:
            made = run(*operands)
        except (TypeError, ValueError, AttributeError, TritonTypeError) as error:
            return type(error)
    return (
        str(made.type),
        str(made.dtype),
        [int(s) for s in made.shape],
        made.handle.data.dtype,
        made.handle.data.tobytes(),
    )


@pytest.mark.parametrize("name", LONG)
def test_an_operator_gives_what_tritons_gives(name: str) -> None:
    """All types and shapes with one another, and with numbers."""
    taken = 0

    def long(*operands: Any, **_: Any) -> Any:
        nonlocal taken
        taken += 1
        return LONG[name](*map(_plain, operands))

    short, cases = operators.short_operator(name, long), 0
    for a in KINDS:
        for left in SHAPES:
            x = tensor(a, left, 1)
            others = [tensor(b, right, 2) for b in KINDS for right in SHAPES]
            others += [y if isinstance(y, int) else float(y) for y in NUMBERS] + [core.constexpr(3), True]
            for y in others:
                if name in ("__floordiv__", "__mod__") and (y is True or np.any((_data(y) == 0) | (_data(y) == -1))):
                    continue  # a device does not define it
                cases += 1
                assert outcome(short, x, y) == outcome(LONG[name], x, _plain(y)), (name, x.type, y)
    assert 0 < taken < cases, "some cases are to take each way"


def _data(x: Any) -> Any:
    return x.handle.data if isinstance(x, core.tensor) else np.asarray(_plain(x))


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, core.constexpr) else x


@pytest.mark.parametrize("offset", [tl.int32, tl.int64])
def test_a_pointer_moves_by_elements(offset: Any) -> None:
    for element in (tl.float32, tl.bfloat16, tl.int8, tl.int64):
        kind = core.pointer_type(element)
        base = core.tensor(interpreter.TensorHandle(np.array([2**46], np.uint64), kind), kind)
        for shape in SHAPES:
            steps = tensor(offset, shape, 3)
            assert outcome(base.__add__, steps) == outcome(LONG["__add__"], base, steps)


def test_an_index_adds_axes() -> None:
    x = tensor(tl.int32, (4, 8), 4)
    for places in (
        (None, slice(None), slice(None)),
        (slice(None), None, slice(None)),
        (slice(None), slice(None), None),
    ):
        got = x[places]
        assert (got.handle.data == x.handle.data[places]).all()
        assert [int(s) for s in got.shape] == list(x.handle.data[places].shape)
    with pytest.raises(Exception, match="unsupported tensor index"):
        x[(slice(0, 2), slice(None))]


@pytest.mark.parametrize("kind", [tl.int8, tl.float16, tl.bfloat16, tl.int32, tl.float32, tl.int64])
@pytest.mark.parametrize("shift", [0, 1])
def test_memory_is_read_and_written_as_by_tritons_loop(kind: Any, shift: int) -> None:
    """Whole tiles and masked ones, with and without what stands for the others, and at odd addresses."""
    dtype = interpreter._get_np_dtype(kind)
    random = np.random.default_rng(5)
    memory = random.integers(0, 256, 4096, np.uint8)
    size = dtype.itemsize
    base = -(-memory.ctypes.data // 8) * 8 + shift
    places = random.permutation(256).astype(np.uint64).reshape(16, 16)
    pointers = interpreter.TensorHandle(np.uint64(base) + places * np.uint64(size), core.pointer_type(kind))
    filler = interpreter.TensorHandle(random.integers(0, 256, (16, 16, size), np.uint8).view(dtype)[..., 0], kind)
    builder, loop = interpreter.interpreter_builder, interpreter._interpreter
    for live in (np.ones((16, 16), bool), random.random((16, 16)) < 0.3, np.zeros((16, 16), bool)):
        mask = interpreter.TensorHandle(live, tl.int1)
        for other in (None, filler):
            got = builder.create_masked_load(pointers, mask, other, None, None, False)
            rest = np.zeros((16, 16), dtype) if other is None else filler.data
            want = loop.load(pointers.data, live, rest, dtype)
            assert (got.data.dtype, got.data.tobytes(), str(got.dtype)) == (want.dtype, want.tobytes(), str(kind))
        before = memory.copy()
        builder.create_masked_store(pointers, filler, mask, None, None)
        got_memory = memory.copy()
        memory[:] = before
        loop.store(pointers.data, filler.data, live)
        assert (got_memory == memory).all()


def test_of_lanes_that_store_to_one_address_the_last_wins() -> None:
    memory = np.zeros(8, np.int32)
    where = np.full(64, memory.ctypes.data, np.uint64)
    pointers = interpreter.TensorHandle(where, core.pointer_type(tl.int32))
    value = interpreter.TensorHandle(np.arange(64, dtype=np.int32), tl.int32)
    mask = interpreter.TensorHandle(np.ones(64, bool), tl.int1)
    interpreter.interpreter_builder.create_masked_store(pointers, value, mask, None, None)
    assert memory.tolist() == [63, 0, 0, 0, 0, 0, 0, 0]
