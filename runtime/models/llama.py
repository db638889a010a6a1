"""The Llama family, written once against a backend's array namespace.

``forward`` is the only definition of the model: prefill, eager decode and the captured step all call it. It creates no arrays;
constants are Buffers made by :func:`bind_llama` before any capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forebay.specs.attention import AttentionParams
from forebay.specs.backend import Backend
from forebay.specs.dtypes import Array, HostArray
from forebay.specs.pool import Pool
from forebay.specs.segment import Buffer
from forebay.specs.write_loc import BlockTable, WriteLoc

from .config import ModelConfig
from .llama_tensors import EMBEDDING, FINAL_NORM, OUTPUT, expected_tensors, layer_tensor
from .weights import Weights

LoadProgress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all) while weights go to the device."""


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; products are ``[out, in]``. Query, key and value share one product, gate and up another."""

    input_norm: Buffer
    qkv: Buffer
    output: Buffer
    mlp_norm: Buffer
    gate_up: Buffer
    down: Buffer


@dataclass(frozen=True)
class KVContext:
    """Where one forward pass writes its KV and what each sequence sees.

    Attributes:
        loc: where the rows of the pass go.
        table: block table ``[B, width]``, ``table_len`` of its columns are blocks.
        visible: int32 ``[B]``, keys the last query of each sequence sees.
        batch: B; a pass over N rows has query_len N / B.
        path: ``direct`` or ``gather``.
    """

    pool: Pool
    loc: WriteLoc
    table: BlockTable
    table_len: int
    visible: Array
    batch: int
    path: str


def rope_tables(config: ModelConfig, length: int) -> tuple[HostArray, HostArray]:
    """cos and sin float32 ``[length, D/2]`` of ``position * theta^(-2i/D)`` (Su et al. 2021).

    Computed in float32 as transformers does, so that angles at large positions round alike.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    inverse = (np.float32(1.0) / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse[None, :]
    return np.cos(angles), np.sin(angles)


@dataclass(frozen=True)
class Llama:
    """A Llama-family model whose weights are on a backend."""

    config: ModelConfig
    max_len: int
    embedding: Buffer
    layers: tuple[Layer, ...]
    final_norm: Buffer
    head: Buffer
    cos: Buffer
    sin: Buffer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Every Buffer a step reads."""
        weights = (b for layer in self.layers for b in vars(layer).values())
        return tuple(dict.fromkeys((self.embedding, *weights, self.final_norm, self.head, self.cos, self.sin)))

    def forward(self, backend: Backend, tokens: Array, positions: Array, kv: KVContext) -> Array:
        """Hidden state ``[N, hidden]`` after the last norm, of ``tokens`` int32 ``[N]`` at ``positions`` int32 ``[N]``.

        Writes the KV of every row through the pool's door before attention reads it (clause C13). Rows at position -1 are idle:
        they write nothing and see nothing.
        """
        xp = backend.xp
        bounded = xp.clip(positions, 0, self.max_len - 1)
        cos, sin = xp.take(self.cos.get(), bounded), xp.take(self.sin.get(), bounded)
        # A damaged token must not address memory outside the table; its receipt shows the token as it was consumed.
        x = xp.take(self.embedding.get(), xp.clip(tokens, 0, self.config.vocab_size - 1))
        for index, layer in enumerate(self.layers):
            h = xp.rms_norm(x, layer.input_norm.get(), self.config.rms_norm_eps)
            x = x + self._attention(backend, index, layer, h, cos, sin, kv)
            h = xp.rms_norm(x, layer.mlp_norm.get(), self.config.rms_norm_eps)
            x = x + self._feed_forward(backend, layer, h)
        return xp.rms_norm(x, self.final_norm.get(), self.config.rms_norm_eps)

    def logits(self, backend: Backend, hidden: Array) -> Array:
        """``[N, vocab]`` of ``hidden [N, hidden]``."""
        return backend.xp.linear(hidden, self.head.get())

    def _attention(
        self, backend: Backend, index: int, layer: Layer, h: Array, cos: Array, sin: Array, kv: KVContext
    ) -> Array:
        xp, c = backend.xp, self.config
        rows = xp.shape(h)[0]
        qkv = xp.linear(h, layer.qkv.get())
        heads = xp.reshape(qkv, (rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim))
        turned = xp.rope(heads[:, : c.num_heads + c.num_kv_heads], cos, sin)
        q, k, v = turned[:, : c.num_heads], turned[:, c.num_heads :], heads[:, c.num_heads + c.num_kv_heads :]
        kv.pool.write(index, kv.loc, k, v)
        out = backend.paged_decode(
            xp.reshape(q, (kv.batch, rows // kv.batch, c.num_heads, c.head_dim)),
            kv.pool,
            index,
            kv.table,
            kv.visible,
            table_len=kv.table_len,
            params=AttentionParams(),
            path=kv.path,
        )
        return xp.linear(xp.reshape(out, (rows, c.query_size)), layer.output.get())

    def _feed_forward(self, backend: Backend, layer: Layer, h: Array) -> Array:
        xp, inner = backend.xp, self.config.intermediate_size
        gate_up = xp.linear(h, layer.gate_up.get())
        return xp.linear(xp.silu_mul(gate_up[:, :inner], gate_up[:, inner:]), layer.down.get())


def bind_llama(
    backend: Backend,
    config: ModelConfig,
    weights: Weights,
    *,
    dtype: str,
    max_len: int,
    progress: LoadProgress | None = None,
) -> Llama:
    """Put the weights on a backend in ``dtype``, and the rotary tables for ``max_len`` positions.

    Raises:
        InvalidModel: a tensor is missing or misshapen.
    """
    shapes = expected_tensors(config)
    done = 0

    def tensor(*names: str) -> Buffer:
        nonlocal done
        parts = [weights.tensor(name, shapes[name], dtype) for name in names]
        made = backend.buffer(names[0], parts[0] if len(parts) == 1 else np.concatenate(parts), dtype)
        done += len(names)
        if progress is not None:
            progress(done, len(shapes))
        return made

    def layer(index: int) -> Layer:
        def part(*parts: str) -> Buffer:
            return tensor(*(layer_tensor(index, p) for p in parts))

        return Layer(
            input_norm=part("input_layernorm"),
            qkv=part("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            output=part("self_attn.o_proj"),
            mlp_norm=part("post_attention_layernorm"),
            gate_up=part("mlp.gate_proj", "mlp.up_proj"),
            down=part("mlp.down_proj"),
        )

    embedding = tensor(EMBEDDING)
    cos, sin = rope_tables(config, max_len)
    return Llama(
        config=config,
        max_len=max_len,
        embedding=embedding,
        layers=tuple(layer(i) for i in range(config.num_layers)),
        final_norm=tensor(FINAL_NORM),
        head=embedding if config.tie_word_embeddings else tensor(OUTPUT),
        cos=backend.buffer("rope.cos", cos, dtype),
        sin=backend.buffer("rope.sin", sin, dtype),
    )
