"""The captured decode step of the golden model's shape, as cases of the ahead-of-time gate: a whole program for a TPU, without weights.

.. code-block:: console

   python -m forebay.backends.tpu.compile_gate --cases tests.backends_tpu.step_cases --table tests/records/tpu_step.json
"""

from __future__ import annotations

from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from forebay.backends.tpu.compile_cases import LAYER_BYTES, Case
from forebay.backends.tpu.driver import TpuDriver
from forebay.backends.tpu.programs import Program, Programs
from forebay.backends.tpu.way import ON_DEVICE
from forebay.runtime.admission import MAX_STOP_TOKENS
from forebay.runtime.decode_step import decode_segment
from forebay.runtime.models.config import ModelConfig
from forebay.runtime.models.json_fields import Fields
from forebay.runtime.models.llama import bind_llama
from forebay.runtime.models.weights import Weights
from forebay.runtime.state import DeviceState
from forebay.runtime.variants import GREEDY
from forebay.specs.backend import Backend
from forebay.specs.descriptor import Selection
from forebay.specs.dtypes import BITS_DTYPE, ITEMSIZE, HostArray
from forebay.specs.errors import ColdCapture
from forebay.specs.geometry import KVGeometry, storage_shapes
from forebay.specs.segment import Buffer, Step

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""SmolLM2-135M."""
BLOCK = 16
TABLE_LEN = 64
SLOTS = 8
WEIGHTS_ON_THEIR_WAY = 40 << 20
"""Bytes, a quarter of what is allowed: XLA fetches weights ahead, and holds the largest (113 MB in float32) once more, split for its
product with 8 rows. The bound stays below one layer of the pool."""


class Described(TpuDriver):
    """Traces as on a TPU; its Buffers hold nothing, and what it captures is compiled for another device than it has."""

    def __init__(self, chip: Any) -> None:
        super().__init__(jax.devices("cpu")[0], ON_DEVICE)
        self._for_chip = Programs(self._scope, chip, ON_DEVICE.options)
        self.program: Program | None = None

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def store(self, buffer: Buffer, bits: HostArray, row: int | None) -> None:
        pass

    def capture(self, step: Step) -> Program | None:
        self._programs, before = self._for_chip, self._programs
        try:
            self.program = self._for_chip.compile(self._for_chip.trace(step))
        finally:
            self._programs = before
        return self.program


class Blank(Weights):
    """Tensors of any name and shape."""

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    @property
    def nbytes(self) -> int:
        return 0

    def check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        pass

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        return np.zeros(shape, BITS_DTYPE.get(dtype, np.float32))


def geometry(dtype: str) -> KVGeometry:
    """Layers so large that a copy of one would not fit the vector memory of any chip."""
    lanes = 2 * SMOLLM2["head_dim"]
    blocks = -(-LAYER_BYTES // (SMOLLM2["num_key_value_heads"] * BLOCK * lanes * ITEMSIZE[dtype]))
    return KVGeometry(
        num_blocks=blocks,
        block_size=BLOCK,
        num_kv_heads=SMOLLM2["num_key_value_heads"],
        head_dim=SMOLLM2["head_dim"],
        num_layers=SMOLLM2["num_hidden_layers"],
        dtype=dtype,
    )


def compiled(chip: Any, dtype: str, bucket: int, path: str) -> Any:
    """The step's executable for a chip."""
    config = ModelConfig.from_fields(Fields("config.json", SMOLLM2), Fields("generation_config.json", {}))
    driver = Described(chip)
    backend = Backend(driver, Selection("tpu", ""))
    pool = backend.create_pool(geometry(dtype))
    model = bind_llama(backend, config, Blank(Path("blank")), dtype=dtype, max_len=TABLE_LEN * BLOCK)
    state = DeviceState(backend, SLOTS, TABLE_LEN, MAX_STOP_TOKENS, config.vocab_size)
    segment = decode_segment(model, pool, state, bucket, path, GREEDY)
    with suppress(ColdCapture):  # it never ran, for there is nothing to run it on
        backend.capture(segment)
    program = driver.program
    if program is None:
        raise AssertionError("the step was not compiled")
    return program.executable


def case(dtype: str, bucket: int, path: str = "direct") -> Case:
    layer = prod(storage_shapes("FUSED", geometry(dtype))[0])
    page = SMOLLM2["num_key_value_heads"] * BLOCK * 2 * SMOLLM2["head_dim"] * ITEMSIZE[dtype]
    return Case(
        "decode_step",
        f"SmolLM2-135M, {dtype}, {bucket} rows of {SLOTS} slots, {TABLE_LEN} columns, {path}",
        lambda chip: compiled(chip, dtype, bucket, path),
        layer=layer,
        layer_bytes=layer * ITEMSIZE[dtype],
        beside=WEIGHTS_ON_THEIR_WAY,
        passes=bucket * TABLE_LEN * page if path == "gather" else 0,
        kernels=SMOLLM2["num_hidden_layers"],
    )


def cases() -> list[Case]:
    """The step of one row and of all, in both dtypes."""
    made = [case(dtype, bucket) for dtype in ("float32", "bfloat16") for bucket in (1, 8)]
    return [*made, case("float32", 8, "gather")]
