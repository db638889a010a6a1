"""A backend that declares few sizes and then refuses windows, which are of the core, by naming a size that nobody asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from forebay.backends.sim.arrays import SimArray
from forebay.backends.sim.driver import SimDriver
from forebay.specs import AttentionParams, Unsupported
from forebay.specs.attention import DecodeCall, check_decode_support

Way = Callable[[SimDriver, DecodeCall], object]


def by_itself(driver: SimDriver, call: DecodeCall) -> None:
    raise Unsupported("no windows of 96", capability="head_dims", value=96)


def by_a_borrowed_check(driver: SimDriver, call: DecodeCall) -> None:
    """The contract's own check raises, asked by the driver about a call that nobody made."""
    check_decode_support(
        driver.capabilities, call.pool, group=16, query_len=1, params=AttentionParams(), return_lse=False
    )


def by_a_kept_error(driver: SimDriver, call: DecodeCall) -> None:
    try:
        by_a_borrowed_check(driver, call)
    except Unsupported as error:
        kept = error
    raise kept


def by_a_quirk(driver: SimDriver, call: DecodeCall) -> None:
    raise Unsupported("not at a boundary", capability="recapture_at_boundary", value=True)


def by_a_text(driver: SimDriver, call: DecodeCall) -> None:
    raise Unsupported("too long", capability="max_query_len", value="long")


WAYS: Final[dict[str, Way]] = {
    way.__name__: way for way in (by_itself, by_a_borrowed_check, by_a_kept_error, by_a_quirk, by_a_text)
}


class DodgingDriver(SimDriver):
    """Sim with the head sizes and groups of the core, and a way out of windows."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self._way = WAYS[way]
        self.capabilities = replace(self.capabilities, head_dims=(8, 64, 128), max_group=8, max_query_len=1)

    def paged_decode(self, call: DecodeCall) -> tuple[SimArray, SimArray | None]:
        """Refuses a window in its way."""
        if call.window is not None:
            self._way(self, call)
        return super().paged_decode(call)
