"""The one error of this package that is about the outside world rather than about a model's content."""

from __future__ import annotations

from forebay.specs.errors import ForebayError


class ModelUnavailable(ForebayError):
    """A known model cannot be fetched here (network, index, disk); the original error is chained and the message says what to do."""
