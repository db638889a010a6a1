"""The model types that can be read, as data: what their configurations leave to a default, and what their layers have.

Defaults and rules are those of transformers' configuration and model classes of the same ``model_type``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from forebay.specs.errors import InvalidModel, Unsupported

from .json_fields import Fields, show

Windows = tuple[int | None, ...]
"""Sliding window of each layer, counting the current token; None where a layer attends to the whole context."""

_MAX_WINDOW: Final = 2**31 - 1
_MAX_LAYERS: Final = 4096
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """One ``model_type``.

    Attributes:
        num_kv_heads, head_dim, max_position_embeddings: what an absent key means; None follows from the other keys.
        windows: reads the window of each layer from the configuration and the number of layers.
        qkv_bias: whether the products of query, key and value have a bias; None where ``attention_bias`` says so.
        output_bias: the same for the product after attention.
        mlp_bias: the same for the feed-forward, which the key ``mlp_bias`` decides.
        qk_norm: whether each query and key head is normed before it is turned.
    """

    num_kv_heads: int | None
    head_dim: int | None
    max_position_embeddings: int
    windows: Callable[[Fields, int], Windows]
    qkv_bias: bool | None
    output_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        """Whether (query/key/value, output, feed-forward) products have a bias.

        Raises :class:`Unsupported` where a key asks for a bias that no product of the family has.
        """
        attention, mlp = (fields.flag(key, default=False) for key in ("attention_bias", "mlp_bias"))
        qkv, output = (attention if bias is None else bias for bias in (self.qkv_bias, self.output_bias))
        inner = mlp if self.mlp_bias is None else self.mlp_bias
        for key, given, has in (("attention_bias", attention, qkv), ("mlp_bias", mlp, inner)):
            if given and not has:
                kind = fields.text("model_type")
                raise Unsupported(f"{fields.source}: {key} is true; supported for {kind}: products without this bias")
        return qkv, output, inner


def _llama_windows(fields: Fields, num_layers: int) -> Windows:
    if fields.has("sliding_window") and fields.flag("use_sliding_window", default=True):
        given = show(fields.raw("sliding_window"))
        raise Unsupported(
            f"{fields.source}: sliding_window is {given}; supported for llama: attention to the whole context"
        )
    _refuse_other_types(fields, num_layers, _FULL)
    return (None,) * num_layers


def _mistral_windows(fields: Fields, num_layers: int) -> Windows:
    window = None if fields.is_null("sliding_window") else _window(fields)
    _refuse_other_types(fields, num_layers, _FULL if window is None else _SLIDING)
    return (window,) * num_layers


def _qwen_windows(fields: Fields, num_layers: int) -> Windows:
    """The layers from ``max_window_layers`` on slide, or those that ``layer_types`` names; none unless it is switched on."""
    slides = fields.flag("use_sliding_window", default=False)
    if slides and fields.is_null("sliding_window"):
        raise fields.invalid("sliding_window", "a number of tokens, as use_sliding_window is true")
    window = _window(fields) if slides else None
    types = _layer_types(fields, num_layers)
    if types is None:
        first = fields.integer("max_window_layers", minimum=0, maximum=_MAX_LAYERS, default=28)
        return tuple(window if index >= first else None for index in range(num_layers))
    if window is None and _SLIDING in types:
        raise InvalidModel(
            f"{fields.source}: layer_types has {_SLIDING} and use_sliding_window is not true; expected both or neither"
        )
    return tuple(window if kind == _SLIDING else None for kind in types)


def _window(fields: Fields) -> int:
    return fields.integer("sliding_window", maximum=_MAX_WINDOW, default=4096)


def _layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    types = fields.raw("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.invalid("layer_types", f"a list of {num_layers} names, one a layer")
    for kind in types:
        if kind not in (_FULL, _SLIDING):
            raise Unsupported(f"{fields.source}: layer_types has {show(kind)}; supported: {_FULL}, {_SLIDING}")
    return types


def _refuse_other_types(fields: Fields, num_layers: int, expected: str) -> None:
    """Families whose layers are all alike do not read ``layer_types``: it must not say otherwise."""
    types = _layer_types(fields, num_layers)
    if types is not None and set(types) != {expected}:
        raise Unsupported(
            f"{fields.source}: layer_types is {show(types)}; supported for {fields.text('model_type')} with this "
            f"sliding_window: {expected} in every layer"
        )


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": Family(
            num_kv_heads=None,
            head_dim=None,
            max_position_embeddings=2048,
            windows=_llama_windows,
            qkv_bias=None,
            output_bias=None,
            mlp_bias=None,
            qk_norm=False,
        ),
        "mistral": Family(
            num_kv_heads=8,
            head_dim=None,
            max_position_embeddings=131_072,
            windows=_mistral_windows,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
        ),
        "qwen2": Family(
            num_kv_heads=32,
            head_dim=None,
            max_position_embeddings=32_768,
            windows=_qwen_windows,
            qkv_bias=True,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
        ),
        "qwen3": Family(
            num_kv_heads=32,
            head_dim=128,
            max_position_embeddings=32_768,
            windows=_qwen_windows,
            qkv_bias=None,
            output_bias=None,
            mlp_bias=False,
            qk_norm=True,
        ),
    }
)
"""The family of each supported ``model_type``."""
