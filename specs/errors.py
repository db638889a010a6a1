"""Every error Forebay raises on purpose. All derive from :class:`ForebayError`; messages say given, expected and what to do."""

from __future__ import annotations


class ForebayError(Exception):
    """Base of all errors raised on purpose; the command line prints it as one line and exits with 2."""


class InvalidInput(ForebayError, ValueError):
    """An argument has the wrong type, dtype, shape or value. Nothing was changed on the device."""


class InvalidLayout(InvalidInput):
    """A KV layout, its strides or its geometry does not describe the memory it was given with."""


class UnmarkedWriteLoc(ForebayError, ValueError):
    """A pool that translates ids was handed ids that are not marked physical (clause W3). Nothing was changed."""


class Unsupported(ForebayError):
    """A legal request that this backend, mode or geometry does not support; the message says what is supported.

    Attributes:
        capability: the field of ``Capabilities`` that declares the limit, ``""`` if none does.
        value: what was asked for, in terms of that field.
    """

    def __init__(self, message: str = "", *, capability: str = "", value: object = None) -> None:
        super().__init__(message)
        self.capability = capability
        self.value = value


class UnknownBackend(ForebayError, LookupError):
    """No backend of that name is registered; the message lists the known names."""


class BackendUnavailable(ForebayError):
    """A known backend cannot run here; the original error is chained and the message has an install hint."""


class InvalidSetting(ForebayError, ValueError):
    """A configuration key or value is not known; the message names its source and the nearest known key."""


class ColdCapture(ForebayError):
    """A Segment was captured before ``run`` made it warm (clause C1)."""


class CaptureViolation(ForebayError):
    """A Segment did something a captured step may not do (clause C2); the message names the act."""


class CaptureDeclined(ForebayError):
    """``capture = "required"`` and the device declined to capture (clause C11)."""


class StaleTrace(ForebayError):
    """A released, empty or outdated Trace was replayed, or a receipt does not match the ledger (clauses C5, C10)."""


class StaleShadow(ForebayError):
    """Rows of a shadow block that is not staged at the shadow's present version were asked for (clause S6)."""


class OutOfBlocks(ForebayError):
    """The pool has fewer free blocks than were asked for; nothing was handed out."""


class QueueFull(ForebayError):
    """As many requests wait as the engine lets wait; nothing was queued, and the caller should come back later."""


class DoubleFree(ForebayError):
    """A block was freed that its caller does not hold; nothing was freed."""


class DeviceLost(ForebayError):
    """The device stopped answering or kept answering with stale state."""


class Cancelled(ForebayError):
    """The request was cancelled before it ended."""


class InvalidModel(ForebayError, ValueError):
    """A model folder or file is missing, truncated, corrupt or does not match its configuration."""


class ModelUnavailable(ForebayError):
    """A known model cannot be fetched here (network, index, disk); the original error is chained, the message says what to do."""
