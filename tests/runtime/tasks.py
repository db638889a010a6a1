"""What the tests of the asyncio face share: requests of some lengths, and ways to wait that do not hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from forebay.runtime import AsyncEngine, SamplingParams

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=480, ignore_eos=True)
"""So many tokens that a test is done with the request long before they are made."""

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
PATIENCE = 60.0
"""Seconds after which a test that hangs fails."""


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE))


async def until(happened: Callable[[], bool]) -> None:
    while not happened():
        await asyncio.sleep(0.001)


async def tokens_of(engine: AsyncEngine, ids: list[int], params: SamplingParams, **options: Any) -> tuple[int, ...]:
    return tuple([t async for piece in engine.stream(ids, params, **options) for t in piece.token_ids])
