"""The Llama families (Llama, Mistral, Qwen2, Qwen3), written once against a backend's array namespace.

``forward`` is the only definition of the model: prefill, eager decode and the captured step all call it. It creates no arrays;
constants are Buffers made by :func:`bind_llama` before any capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forebay.specs.array_namespace import ArrayNamespace
from forebay.specs.attention import AttentionParams
from forebay.specs.backend import Backend
from forebay.specs.dtypes import Array, HostArray
from forebay.specs.pool import Pool
from forebay.specs.segment import Buffer
from forebay.specs.write_loc import BlockTable, WriteLoc

from .config import ModelConfig
from .llama_tensors import EMBEDDING, FINAL_NORM, OUTPUT, expected_tensors, layer_bias, layer_tensor
from .weights import Weights

LoadProgress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all) while weights go to the device."""


@dataclass(frozen=True)
class Projection:
    """A product of a layer: weight ``[out, in]``, bias ``[out]`` or None."""

    weight: Buffer
    bias: Buffer | None

    def __call__(self, xp: ArrayNamespace, x: Array) -> Array:
        """``x @ weight.T + bias`` of ``x [N, in]``."""
        return xp.linear(x, self.weight.get(), None if self.bias is None else self.bias.get())


@dataclass(frozen=True)
class Layer:
    """Weights of one layer. Query, key and value share one product, gate and up another.

    ``q_norm`` and ``k_norm`` ``[D]`` are None in families that do not norm their heads; ``attention`` has the layer's window.
    """

    input_norm: Buffer
    qkv: Projection
    q_norm: Buffer | None
    k_norm: Buffer | None
    output: Projection
    mlp_norm: Buffer
    gate_up: Projection
    down: Projection
    attention: AttentionParams

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Every Buffer of the layer."""
        products = (self.qkv, self.output, self.gate_up, self.down)
        optional = (self.q_norm, self.k_norm, *(product.bias for product in products))
        held = (buffer for buffer in optional if buffer is not None)
        return (self.input_norm, self.mlp_norm, *(product.weight for product in products), *held)


@dataclass(frozen=True)
class KVContext:
    """Where one forward pass writes its KV and what each sequence sees.

    Attributes:
        loc: where the rows of the pass go.
        table: block table ``[B, width]``, ``table_len`` of its columns are blocks.
        visible: int32 ``[B]``, keys the last query of each sequence sees.
        batch: B; a pass over N rows has query_len N / B.
        path: ``direct`` or ``gather``.
        rope: cos and sin ``[N, D/2]`` of the rows, as :meth:`Llama.prompt_rope` gives them; None takes them from the tables.
    """

    pool: Pool
    loc: WriteLoc
    table: BlockTable
    table_len: int
    visible: Array
    batch: int
    path: str
    rope: tuple[Array, Array] | None = None


@dataclass(frozen=True)
class Llama:
    """A Llama-family model whose weights are on a backend.

    Row p of the tables ``cos, sin [max_len, D/2]`` holds the angles of position p in a sequence of p + 1 tokens.
    """

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
        weights = (buffer for layer in self.layers for buffer in layer.buffers)
        return tuple(dict.fromkeys((self.embedding, *weights, self.final_norm, self.head, self.cos, self.sin)))

    def prompt_rope(self, positions: HostArray, prompt_len: int) -> tuple[HostArray, HostArray] | None:
        """cos and sin float32 ``[N, D/2]`` for rows at ``positions [N]`` of a sequence whose prompt has ``prompt_len`` tokens.

        Where the rotary embedding depends on length, the rows of a prompt are turned as if it were seen all at once, however it
        is cut into passes; later rows are turned as they were when they were decoded. None where the tables serve.
        """
        rope = self.config.rope
        if rope.regime(prompt_len) == rope.regime(1):
            return None
        return rope.cos_sin(self.config.head_dim, positions, np.maximum(positions + 1, prompt_len))

    def forward(self, backend: Backend, tokens: Array, positions: Array, kv: KVContext) -> Array:
        """Hidden state ``[N, hidden]`` after the last norm, of ``tokens`` int32 ``[N]`` at ``positions`` int32 ``[N]``.

        Writes the KV of every row through the pool's door before attention reads it (clause C13). Rows at position -1 are idle:
        they write nothing and see nothing.
        """
        xp = backend.xp
        cos, sin = self._table_rows(xp, positions) if kv.rope is None else kv.rope
        # A damaged token must not address memory outside the table; its receipt shows the token as it was consumed.
        x = xp.take(self.embedding.get(), xp.clip(tokens, 0, self.config.vocab_size - 1))
        for index, layer in enumerate(self.layers):
            h = xp.rms_norm(x, layer.input_norm.get(), self.config.rms_norm_eps)
            x = x + self._attention(backend, index, layer, h, cos, sin, kv)
            h = xp.rms_norm(x, layer.mlp_norm.get(), self.config.rms_norm_eps)
            x = x + self._feed_forward(xp, layer, h)
        return xp.rms_norm(x, self.final_norm.get(), self.config.rms_norm_eps)

    def logits(self, backend: Backend, hidden: Array) -> Array:
        """``[N, vocab]`` of ``hidden [N, hidden]``."""
        return backend.xp.linear(hidden, self.head.get())

    def _table_rows(self, xp: ArrayNamespace, positions: Array) -> tuple[Array, Array]:
        bounded = xp.clip(positions, 0, self.max_len - 1)
        return xp.take(self.cos.get(), bounded), xp.take(self.sin.get(), bounded)

    def _attention(
        self, backend: Backend, index: int, layer: Layer, h: Array, cos: Array, sin: Array, kv: KVContext
    ) -> Array:
        xp, c = backend.xp, self.config
        rows = xp.shape(h)[0]
        heads = xp.reshape(layer.qkv(xp, h), (rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim))
        q, k = self._turned(xp, layer, heads, cos, sin)
        kv.pool.write(index, kv.loc, k, heads[:, c.num_heads + c.num_kv_heads :])
        out = backend.paged_decode(
            xp.reshape(q, (kv.batch, rows // kv.batch, c.num_heads, c.head_dim)),
            kv.pool,
            index,
            kv.table,
            kv.visible,
            table_len=kv.table_len,
            params=layer.attention,
            path=kv.path,
        )
        return layer.output(xp, xp.reshape(out, (rows, c.query_size)))

    def _turned(self, xp: ArrayNamespace, layer: Layer, heads: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        """Query ``[N, Hq, D]`` and key ``[N, Hkv, D]`` of ``heads [N, Hq + 2 Hkv, D]``, normed where the family does, and turned."""
        c, eps = self.config, self.config.rms_norm_eps
        both = heads[:, : c.num_heads + c.num_kv_heads]
        if layer.q_norm is None or layer.k_norm is None:
            turned = xp.rope(both, cos, sin)
            return turned[:, : c.num_heads], turned[:, c.num_heads :]
        q = xp.rms_norm(both[:, : c.num_heads], layer.q_norm.get(), eps)
        k = xp.rms_norm(both[:, c.num_heads :], layer.k_norm.get(), eps)
        return xp.rope(q, cos, sin), xp.rope(k, cos, sin)

    def _feed_forward(self, xp: ArrayNamespace, layer: Layer, h: Array) -> Array:
        inner = self.config.intermediate_size
        gate_up = layer.gate_up(xp, h)
        return layer.down(xp, xp.silu_mul(gate_up[:, :inner], gate_up[:, inner:]))


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
    if _has_own_head(config, weights):
        shapes[OUTPUT] = shapes[EMBEDDING]
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
        def norm(part: str) -> Buffer:
            return tensor(layer_tensor(index, part))

        def product(*parts: str, bias: bool) -> Projection:
            return Projection(
                weight=tensor(*(layer_tensor(index, part) for part in parts)),
                bias=tensor(*(layer_bias(index, part) for part in parts)) if bias else None,
            )

        return Layer(
            input_norm=norm("input_layernorm"),
            qkv=product("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.qkv_bias),
            q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
            output=product("self_attn.o_proj", bias=config.output_bias),
            mlp_norm=norm("post_attention_layernorm"),
            gate_up=product("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias),
            down=product("mlp.down_proj", bias=config.mlp_bias),
            attention=AttentionParams(window=config.window(index, max_len)),
        )

    embedding = tensor(EMBEDDING)
    positions = np.arange(max_len, dtype=np.int32)
    cos, sin = config.rope.cos_sin(config.head_dim, positions, positions + 1)
    return Llama(
        config=config,
        max_len=max_len,
        embedding=embedding,
        layers=tuple(layer(i) for i in range(config.num_layers)),
        final_norm=tensor(FINAL_NORM),
        head=tensor(OUTPUT) if OUTPUT in shapes else embedding,
        cos=backend.buffer("rope.cos", cos, dtype),
        sin=backend.buffer("rope.sin", sin, dtype),
    )


def _has_own_head(config: ModelConfig, weights: Weights) -> bool:
    """Whether an output product is stored that is not the embedding, though the configuration ties them: transformers takes it."""
    if not config.tie_word_embeddings or OUTPUT not in weights.names:
        return False
    shape = (config.vocab_size, config.hidden_size)
    return not np.array_equal(weights.tensor(EMBEDDING, shape), weights.tensor(OUTPUT, shape))
