"""For tests: backends that claim something else than their drivers do, decline captures, or act otherwise, within a block.

The one module outside :class:`Backend` that reaches its driver.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from .backend import Backend
from .driver import DELEGABLE, Driver, is_delegated
from .errors import CaptureDeclined


@contextmanager
def claiming(backend: Backend, **claims: Any) -> Iterator[None]:
    """The backend with other claims, by field of Capabilities: the checks in front of the driver let more, or less, through."""
    driver = backend._driver  # noqa: SLF001
    with _holding(driver, "capabilities", replace(driver.capabilities, **claims)):
        yield


@dataclass
class Declines:
    """Captures that a device declines: how many are ``left`` to be, and how many captures were ``tried`` in all."""

    left: float
    tried: int = 0


@contextmanager
def declining(backend: Backend, left: float = math.inf) -> Iterator[Declines]:
    """The backend whose device declines the next ``left`` captures; what it yields may be changed meanwhile."""
    declines = Declines(left)
    capture = backend._driver.capture  # noqa: SLF001

    def sometimes(step: Any) -> Any:
        declines.tried += 1
        if declines.left > 0:
            declines.left -= 1
            raise CaptureDeclined("no room for a trace")
        return capture(step)

    with doing(backend, capture=sometimes):
        yield declines


@contextmanager
def doing(backend: Backend, **operations: Callable[..., Any]) -> Iterator[None]:
    """The backend whose driver does something else where these operations of it are called."""
    driver = backend._driver  # noqa: SLF001
    with ExitStack() as stack:
        for name, operation in operations.items():
            stack.enter_context(_holding(driver, name, operation))
        yield


def own_operations(backend: Backend) -> frozenset[str]:
    """Of the operations that a driver may leave to numpy, those that it does itself."""
    driver = backend._driver  # noqa: SLF001
    return frozenset(name for name in DELEGABLE if not is_delegated(driver, name))


@contextmanager
def _holding(driver: Driver, name: str, value: Any) -> Iterator[None]:
    """The driver with another value of an attribute, also where its class computes it (a property)."""
    before = type(driver)
    if inspect.isdatadescriptor(inspect.getattr_static(before, name, None)):
        driver.__class__ = type(before.__name__, (before,), {"__slots__": (), name: property(lambda _: value)})
        try:
            yield
        finally:
            driver.__class__ = before
        return
    own = vars(driver)
    held, was_own = own.get(name), name in own
    setattr(driver, name, value)
    try:
        yield
    finally:
        if was_own:
            setattr(driver, name, held)
        else:
            delattr(driver, name)
