"""What a model folder says about its model: ``config.json``, and the end-of-text ids of ``generation_config.json``.

The key names, and the defaults of the keys that may be absent, are those of transformers' configuration classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.specs.errors import InvalidModel, Unsupported

from .families import FAMILIES, Family, Windows
from .json_fields import Fields, read_json_object, show
from .rope import Rope
from .rope_config import read_rope

CONFIG_FILE: Final = "config.json"
GENERATION_CONFIG_FILE: Final = "generation_config.json"

# Upper bounds far beyond any published model: a size above them is a damaged file, and no allocation should be tried.
_MAX_VOCAB: Final = 2**24
_MAX_WIDTH: Final = 2**22
_MAX_LAYERS: Final = 4096
_MAX_HEADS: Final = 2**16
_MAX_POSITIONS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape and the constants of a decoder-only model; checked when made, so one in hand is consistent.

    Attributes:
        rope: the rotary embedding of every layer.
        windows: sliding window of each layer, None where it attends to the whole context.
        qkv_bias, output_bias, mlp_bias: whether the products of query, key and value, the product after attention, and those of
            the feed-forward have a bias.
        qk_norm: whether each query and key head is normed before it is turned.

    Raises :class:`InvalidModel` where the numbers do not go together (heads that do not divide, an odd head size, …).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    windows: Windows
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    source: str = "ModelConfig"
    """The file the values came from: what an error about them names first."""

    def __post_init__(self) -> None:
        """Check what no single value shows."""
        if self.num_heads % self.num_kv_heads:
            raise InvalidModel(
                f"{self.source}: {self.num_heads} attention heads do not divide into {self.num_kv_heads} key/value "
                "heads; expected num_attention_heads to be a multiple of num_key_value_heads"
            )
        if self.head_dim % 2:
            raise InvalidModel(
                f"{self.source}: head_dim is {self.head_dim}; expected an even number, rotary embedding turns pairs"
            )

        if len(self.windows) != self.num_layers:
            raise InvalidModel(
                f"{self.source}: {len(self.windows)} sliding windows for {self.num_layers} layers; expected one a layer"
            )

    @property
    def max_positions(self) -> int:
        """Longest sequence the rotary embedding is made for, its scaling included."""
        return min(self.rope.positions(self.max_position_embeddings), _MAX_POSITIONS)

    def window(self, layer: int, max_len: int) -> int | None:
        """Sliding window of ``layer``; None where no sequence of at most ``max_len`` tokens is longer than it."""
        window = self.windows[layer]
        return None if window is None or window >= max_len else window

    @property
    def group_size(self) -> int:
        """Query heads per KV head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_size(self) -> int:
        """Width of all query heads together: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together: num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def matrix_elements(self) -> int:
        """Elements of all weight matrices; norms and biases are left out."""
        attention = self.hidden_size * 2 * (self.query_size + self.kv_size)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``config.json`` and, where it is there, ``generation_config.json`` of ``folder``.

        Raises:
            InvalidModel: a file is missing or not JSON, or a value is missing, mistyped, out of range or inconsistent.
            Unsupported: the model is well described, and of a kind that is not implemented; the message names the key.
        """
        config_file, generation_file = folder / CONFIG_FILE, folder / GENERATION_CONFIG_FILE
        fields = Fields(str(config_file), read_json_object(config_file))
        generation = read_json_object(generation_file) if generation_file.exists() else {}
        return cls.from_fields(fields, Fields(str(generation_file), generation))

    @classmethod
    def from_fields(cls, fields: Fields, generation: Fields) -> ModelConfig:
        """The configuration that the two parsed files describe; raises as :meth:`from_folder` does."""
        model_type = fields.text("model_type")
        family = FAMILIES.get(model_type)
        if family is None:
            raise Unsupported(
                f"{fields.source}: model_type is {show(model_type)}; supported: {', '.join(sorted(FAMILIES))}"
            )
        return _read(fields, generation, family)


def _read(fields: Fields, generation: Fields, family: Family) -> ModelConfig:
    _refuse_unsupported(fields)
    vocab_size = fields.integer("vocab_size", maximum=_MAX_VOCAB)
    hidden_size = fields.integer("hidden_size", maximum=_MAX_WIDTH)
    num_layers = fields.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", maximum=_MAX_HEADS)
    head_dim = _head_dim(fields, family, hidden_size, num_heads)
    max_positions = fields.integer(
        "max_position_embeddings", maximum=_MAX_POSITIONS, default=family.max_position_embeddings
    )
    qkv_bias, output_bias, mlp_bias = family.biases(fields)
    bos = fields.token_ids("bos_token_id", vocab_size=vocab_size)
    return ModelConfig(
        model_type=fields.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", maximum=_MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, family, num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", above=0.0, below=1.0, default=1e-6),
        rope=read_rope(fields, head_dim=head_dim, max_positions=max_positions),
        windows=family.windows(fields, num_layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        hidden_act=fields.text("hidden_act", default="silu"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos_token_ids(fields, generation, vocab_size),
        source=fields.source,
    )


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse what would be computed wrongly if it were ignored."""
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise Unsupported(f"{fields.source}: hidden_act is {show(activation)}; supported: 'silu'")
    if fields.has("quantization_config"):
        raise Unsupported(
            f"{fields.source}: quantization_config is given; supported: float32, bfloat16 and float16 weights"
        )


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    if fields.has("head_dim") or family.head_dim is not None:
        return fields.integer("head_dim", maximum=_MAX_WIDTH, default=family.head_dim)
    if hidden_size % num_heads:
        raise InvalidModel(
            f"{fields.source}: hidden_size {hidden_size} does not divide by num_attention_heads {num_heads}, "
            "and head_dim is not given; expected one or the other"
        )
    return hidden_size // num_heads


def _num_kv_heads(fields: Fields, family: Family, num_heads: int) -> int:
    """As many as query heads where the key is null, or absent in a family that has no default of its own."""
    own = None if fields.is_null("num_key_value_heads") else family.num_kv_heads
    return fields.integer("num_key_value_heads", maximum=_MAX_HEADS, default=own or num_heads)


def _eos_token_ids(fields: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    """Generation's own list wins: chat models name their end-of-turn token only there."""
    own = generation.token_ids("eos_token_id", vocab_size=vocab_size)
    return own or fields.token_ids("eos_token_id", vocab_size=vocab_size)
