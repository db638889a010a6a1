"""Panics of libraries written in Rust, which Python sees beside ``Exception``, as errors that can be handled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Panic(Exception):
    """A library found itself in a state it holds impossible; damaged files bring it there."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise a panic of the block as :class:`Panic`, anything else as it is.

    pyo3 derives its ``PanicException`` from ``BaseException`` and exports it nowhere, so it is known by its name.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise Panic(f"panic: {error}") from error
