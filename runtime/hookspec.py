"""The one hook of a backend plugin.

A backend ships a small module and names it in the entry-point group ``forebay.backends``::

    [project.entry-points."forebay.backends"]
    mychip = "mychip_forebay.plugin"

    # mychip_forebay/plugin.py
    import pluggy
    from forebay.specs.descriptor import HOOK_PROJECT, BackendDescriptor

    hookimpl = pluggy.HookimplMarker(HOOK_PROJECT)

    @hookimpl
    def forebay_backend() -> BackendDescriptor: ...
"""

from __future__ import annotations

from typing import Final

import pluggy

from forebay.specs.descriptor import HOOK_PROJECT, BackendDescriptor

hookspec: Final = pluggy.HookspecMarker(HOOK_PROJECT)


@hookspec
def forebay_backend() -> BackendDescriptor:  # type: ignore[empty-body]  # pluggy reads the signature, nothing calls it
    """Describe one backend without importing its vendor library.

    The descriptor's name must be the entry point's name: it is what a user writes in ``backend = "..."``.
    """
