"""A pool sized by default fits what the device has free beside the weights."""

from __future__ import annotations

import pytest

from forebay.runtime import Model, Settings
from forebay.runtime.models.llama_tensors import expected_tensors
from forebay.runtime.sizing import DEFAULT_POOL_BYTES, FREE_SHARE, PoolRoom, pool_geometry, pool_room
from forebay.specs import Backend, InvalidInput
from forebay.specs.dtypes import ITEMSIZE
from tests.runtime.harness import MAX_POSITIONS, make_engine


def says(backend: Backend, monkeypatch: pytest.MonkeyPatch, **known: int) -> Backend:
    """The backend with a driver that says more of itself."""
    driver = backend._driver
    monkeypatch.setattr(driver, "info", {**driver.info, **known})
    return backend


def weight_bytes(model: Model) -> int:
    """Bytes of the model's matrices, by the list of its tensors."""
    shapes = expected_tensors(model.config).values()
    return sum(ITEMSIZE[model.dtype] * shape[0] * shape[1] for shape in shapes if len(shape) == 2)


def test_a_device_that_says_nothing_gets_the_default(backend: Backend, tiny_model: Model) -> None:
    assert pool_room(backend, tiny_model) == PoolRoom(DEFAULT_POOL_BYTES, None)


@pytest.mark.parametrize("blocks", [1, 5, 40])
def test_the_pool_takes_what_the_weights_leave(
    blocks: int, backend: Backend, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = pool_geometry(Settings(num_blocks=2, block_size=4, slots=8), tiny_model, MAX_POSITIONS, PoolRoom(0, None))
    block = g.layer_bytes * g.num_layers // g.num_blocks
    free = int((weight_bytes(tiny_model) + blocks * block) / FREE_SHARE) + 4
    room = pool_room(says(backend, monkeypatch, free_bytes=free), tiny_model)
    made = pool_geometry(Settings(block_size=4, slots=8), tiny_model, MAX_POSITIONS, room)
    assert made.num_blocks == blocks + 1  # the sink is one more


def test_a_pool_that_fits_holds_every_slot_and_a_full_device_is_told_of(
    backend: Backend, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(block_size=4, slots=8)
    room = pool_room(says(backend, monkeypatch, free_bytes=1 << 40), tiny_model)
    assert pool_geometry(settings, tiny_model, MAX_POSITIONS, room).num_blocks == 8 * MAX_POSITIONS // 4 + 1
    full = pool_room(says(backend, monkeypatch, free_bytes=0), tiny_model)
    with pytest.raises(InvalidInput, match=r"got 2 by default, the least .* memory for 0 blocks .*; free some, or"):
        pool_geometry(settings, tiny_model, MAX_POSITIONS, full)


def test_a_number_of_blocks_beyond_the_memory_is_refused_before_anything_is_put_on_the_device(
    backend: Backend, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eleven blocks fit exactly, one byte less they do not; the message says how many do and what the default would be."""
    g = pool_geometry(Settings(num_blocks=2, block_size=4, slots=8), tiny_model, MAX_POSITIONS, PoolRoom(0, None))
    block = g.layer_bytes * g.num_layers // g.num_blocks
    free = weight_bytes(tiny_model) + 11 * block
    with make_engine(tiny_model, says(backend, monkeypatch, free_bytes=free), num_blocks=11, block_size=4, slots=8):
        pass
    before = backend.counters.as_dict()
    message = rf"num_blocks: got 11, {11 * block} bytes of KV; the device has memory for 10 blocks of {block} bytes"
    with pytest.raises(InvalidInput, match=message):
        make_engine(tiny_model, says(backend, monkeypatch, free_bytes=free - 1), num_blocks=11, block_size=4, slots=8)
    assert backend.counters.as_dict() == before
