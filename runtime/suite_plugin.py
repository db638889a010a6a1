"""The runtime's pytest plugin: gives the shared suite the objects of this runtime, as fixtures.

The suite imports nothing of the runtime. Vendor libraries and the runtime itself are imported once a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from forebay.specs import Backend


@pytest.fixture(scope="session")
def open_backend() -> Callable[..., Backend]:
    """``open_backend(NAME[:MODE], **options)``, free of the machine's own settings."""
    from forebay.runtime import Settings
    from forebay.runtime import open_backend as opened

    def open_plainly(name: str, **options: Any) -> Backend:
        return opened(name, settings=Settings(), **options)

    return open_plainly
