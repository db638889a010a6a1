"""What a model folder says about its model: ``config.json``, and the end-of-text ids of ``generation_config.json``.

The key names, and the defaults of the keys that may be absent, are those of transformers' ``LlamaConfig``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from forebay.specs.errors import InvalidModel, Unsupported

from .json_fields import Fields, read_json_object, show

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
    rope_theta: float
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
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
        read = _READERS.get(model_type)
        if read is None:
            raise Unsupported(
                f"{fields.source}: model_type is {show(model_type)}; supported: {', '.join(sorted(_READERS))}"
            )
        return read(fields, generation)


def _read_llama(fields: Fields, generation: Fields) -> ModelConfig:
    _refuse_unsupported(fields)
    vocab_size = fields.integer("vocab_size", maximum=_MAX_VOCAB)
    hidden_size = fields.integer("hidden_size", maximum=_MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", maximum=_MAX_HEADS)
    bos = fields.token_ids("bos_token_id", vocab_size=vocab_size)
    return ModelConfig(
        model_type=fields.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", maximum=_MAX_WIDTH),
        num_layers=fields.integer("num_hidden_layers", maximum=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", maximum=_MAX_HEADS, default=num_heads),
        head_dim=_head_dim(fields, hidden_size, num_heads),
        max_position_embeddings=fields.integer("max_position_embeddings", maximum=_MAX_POSITIONS, default=2048),
        rms_norm_eps=fields.number("rms_norm_eps", above=0.0, below=1.0, default=1e-6),
        rope_theta=_rope_theta(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        hidden_act=fields.text("hidden_act", default="silu"),
        attention_bias=fields.flag("attention_bias", default=False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos_token_ids(fields, generation, vocab_size),
        source=fields.source,
    )


_READERS: Final[Mapping[str, Callable[[Fields, Fields], ModelConfig]]] = MappingProxyType({"llama": _read_llama})
"""How to read the configuration of each supported ``model_type``."""


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse what would be computed wrongly if it were ignored."""
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise Unsupported(f"{fields.source}: hidden_act is {show(activation)}; supported: 'silu'")
    for key in ("attention_bias", "mlp_bias"):
        if fields.flag(key, default=False):
            raise Unsupported(f"{fields.source}: {key} is true; supported: products without bias")
    if fields.has("sliding_window") and fields.flag("use_sliding_window", default=True):
        given = show(fields.raw("sliding_window"))
        raise Unsupported(f"{fields.source}: sliding_window is {given}; supported: attention to the whole context")
    if fields.has("quantization_config"):
        raise Unsupported(
            f"{fields.source}: quantization_config is given; supported: float32, bfloat16 and float16 weights"
        )


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if fields.has("head_dim"):
        return fields.integer("head_dim", maximum=_MAX_WIDTH)
    if hidden_size % num_heads:
        raise InvalidModel(
            f"{fields.source}: hidden_size {hidden_size} does not divide by num_attention_heads {num_heads}, "
            "and head_dim is not given; expected one or the other"
        )
    return hidden_size // num_heads


def _rope_theta(fields: Fields) -> float:
    """The base of the rotary frequencies, from the top level (older files) or ``rope_parameters`` (newer ones)."""
    places = [fields, fields.section("rope_parameters"), fields.section("rope_scaling")]
    for place in places[1:]:
        kind = place.text("rope_type", default=place.text("type", default="default"))
        if kind != "default":
            raise Unsupported(f"{place.source}: rope_type is {show(kind)}; supported: 'default'")
    for place in places:
        if place.number("partial_rotary_factor", above=0.0, below=1.000001, default=1.0) != 1.0:
            given = show(place.raw("partial_rotary_factor"))
            raise Unsupported(f"{place.source}: partial_rotary_factor is {given}; supported: 1.0")
    given_in = [place for place in places if place.has("rope_theta")]
    thetas = [place.number("rope_theta", above=1.0, below=1e15) for place in given_in]
    if len(set(thetas)) > 1:
        raise InvalidModel(
            f"{fields.source}: rope_theta is {thetas[0]:g} at the top level and {thetas[-1]:g} in "
            f"{given_in[-1].source.rpartition(': ')[2]}; expected the same value or only one of them"
        )
    return thetas[0] if thetas else 10_000.0


def _eos_token_ids(fields: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    """Generation's own list wins: chat models name their end-of-turn token only there."""
    own = generation.token_ids("eos_token_id", vocab_size=vocab_size)
    return own or fields.token_ids("eos_token_id", vocab_size=vocab_size)
