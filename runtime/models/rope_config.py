"""Reading a model's rotary embedding from ``config.json``.

The parameters stand in ``rope_parameters`` (transformers 5) or ``rope_scaling`` (before); some of them may stand at the top level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeVar

from forebay.specs.errors import InvalidModel, Unsupported

from .json_fields import Fields, show
from .rope import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    Rope,
    YarnRope,
    longrope_scale,
    yarn_scale,
)

T = TypeVar("T")

_MAX_POSITIONS: Final = 2**31 - 1
_MAX_FACTOR: Final = 1e6
"""Beyond any published scaling: a factor above it is a damaged file."""


@dataclass(frozen=True, slots=True)
class _Source:
    """What a kind is read from: its section, the top level, and what is already known of the model."""

    top: Fields
    section: Fields
    theta: float
    head_dim: int
    max_positions: int

    @property
    def factor(self) -> float:
        return self.section.number_from("factor", minimum=1.0, maximum=_MAX_FACTOR)

    @property
    def original(self) -> int:
        """Positions before scaling. Phi-3 style files have them at the top level."""
        key = "original_max_position_embeddings"
        value = _agreed((self.top, self.section), key, lambda place: place.integer(key, maximum=_MAX_POSITIONS))
        if value is None:
            raise self.section.invalid(key, "the number of positions the model had before scaling")
        return value


def read_rope(fields: Fields, *, head_dim: int, max_positions: int) -> Rope:
    """The rotary embedding that a configuration describes.

    Args:
        fields: the top level of ``config.json``.
        head_dim: D.
        max_positions: the configuration's ``max_position_embeddings``.

    Raises:
        InvalidModel: a value is missing, mistyped, out of range or given twice and differently.
        Unsupported: a kind that is not implemented, or a part of each head left unturned by a kind that turns all of it.
    """
    section = _section(fields)
    kind = _kind(section)
    read = _KINDS.get(kind)
    if read is None:
        raise Unsupported(f"{section.source}: rope_type is {show(kind)}; supported: {', '.join(sorted(_KINDS))}")
    share = _share((fields, section))
    if share != 1.0 and kind != "proportional":
        raise Unsupported(f"{fields.source}: partial_rotary_factor is {share:g} with rope_type {kind}; supported: 1.0")
    theta = _agreed((fields, section), "rope_theta", lambda place: place.number("rope_theta", above=1.0, below=1e15))
    return read(_Source(fields, section, 10_000.0 if theta is None else theta, head_dim, max_positions))


def _section(fields: Fields) -> Fields:
    given = [key for key in ("rope_scaling", "rope_parameters") if fields.raw(key)]
    if len(given) > 1 and fields.raw(given[0]) != fields.raw(given[1]):
        raise InvalidModel(f"{fields.source}: rope_scaling and rope_parameters differ; expected only one of them")
    section = fields.section(given[0] if given else "rope_parameters")
    for label in ("full_attention", "sliding_attention"):
        if section.has(label):
            raise Unsupported(f"{section.source}: has an entry {label}; supported: one rotary embedding for all layers")
    return section


def _kind(section: Fields) -> str:
    names = {section.text(key) for key in ("rope_type", "type") if section.has(key)}
    if len(names) > 1:
        raise InvalidModel(f"{section.source}: rope_type and type are {sorted(names)}; expected only one of them")
    return names.pop() if names else "default"


def _share(places: tuple[Fields, Fields]) -> float:
    key = "partial_rotary_factor"
    value = _agreed(places, key, lambda place: place.number_from(key, minimum=0.0, maximum=1.0))
    return 1.0 if value is None else value


def _agreed(places: tuple[Fields, Fields], key: str, read: Callable[[Fields], T]) -> T | None:
    """The value of ``key`` at the top level or in the section, None where neither has it; refused where they differ."""
    values = [read(place) for place in places if place.has(key)]
    if len(values) > 1 and values[0] != values[1]:
        top, section = places
        raise InvalidModel(
            f"{top.source}: {key} is {values[0]} at the top level and {values[1]} in "
            f"{section.source.rpartition(': ')[2]}; expected the same value or only one of them"
        )
    return values[0] if values else None


def _read_default(source: _Source) -> Rope:
    return DefaultRope(source.theta)


def _read_linear(source: _Source) -> Rope:
    return LinearRope(source.theta, source.factor)


def _read_dynamic(source: _Source) -> Rope:
    if source.head_dim <= 2:
        raise InvalidModel(
            f"{source.section.source}: rope_type is dynamic with head_dim {source.head_dim}; expected more than 2"
        )
    return DynamicRope(source.theta, source.factor, source.max_positions)


def _read_yarn(source: _Source) -> Rope:
    section, original = source.section, source.original
    factor = source.factor if section.has("factor") else source.max_positions / original
    fast, slow = (_optional(section, key, default) for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if fast < slow:
        raise InvalidModel(
            f"{section.source}: beta_fast is {fast:g} and beta_slow {slow:g}; expected beta_fast to be the larger"
        )
    mscale, all_dim = (_optional(section, key, 0.0) for key in ("mscale", "mscale_all_dim"))
    scale = _attention_factor(section, yarn_scale(factor, mscale, all_dim))
    truncate = section.flag("truncate", default=True)
    return YarnRope(source.theta, factor, original, scale, beta_fast=fast, beta_slow=slow, truncate=truncate)


def _read_longrope(source: _Source) -> Rope:
    section, original = source.section, source.original
    if original < 2:
        raise section.invalid("original_max_position_embeddings", "at least 2: its logarithm divides")
    factor = source.factor if section.has("factor") else source.max_positions / original
    short, long = (
        section.numbers(key, length=source.head_dim // 2, above=0.0, below=_MAX_FACTOR)
        for key in ("short_factor", "long_factor")
    )
    scale = _attention_factor(section, longrope_scale(factor, original))
    return LongRope(source.theta, original, scale, short_factor=short, long_factor=long)


def _read_llama3(source: _Source) -> Rope:
    section = source.section
    low, high = (section.number(key, above=0.0, below=_MAX_FACTOR) for key in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise InvalidModel(
            f"{section.source}: low_freq_factor is {low:g} and high_freq_factor {high:g}; expected the second to be larger"
        )
    return Llama3Rope(source.theta, source.factor, source.original, low_freq_factor=low, high_freq_factor=high)


def _read_proportional(source: _Source) -> Rope:
    factor = source.factor if source.section.has("factor") else 1.0
    return ProportionalRope(source.theta, factor, _share((source.top, source.section)))


def _attention_factor(section: Fields, default: float) -> float:
    return section.number("attention_factor", above=0.0, below=_MAX_FACTOR, default=default)


def _optional(section: Fields, key: str, default: float) -> float:
    """A number of YaRN's where it is given; 0 stands for the default, as in transformers."""
    return section.number_from(key, minimum=0.0, maximum=_MAX_FACTOR, default=default) or default


_KINDS: Final[Mapping[str, Callable[[_Source], Rope]]] = MappingProxyType(
    {
        "default": _read_default,
        "linear": _read_linear,
        "dynamic": _read_dynamic,
        "yarn": _read_yarn,
        "longrope": _read_longrope,
        "llama3": _read_llama3,
        "proportional": _read_proportional,
    }
)
"""How to read each ``rope_type`` of transformers' ``ROPE_INIT_FUNCTIONS``, and the default."""
