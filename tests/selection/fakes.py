"""Descriptors, plugins and installed distributions for the tests of settings, selection and the command line."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.runtime.plugins import PluginManager
from forebay.specs.descriptor import Availability, BackendDescriptor, ModeDescriptor, ModeKind
from forebay.specs.driver import Driver
from tests.selection.numpy_driver import NumpyDriver

USABLE = Availability(usable=True, reason="a fake device")
ABSENT = Availability(usable=False, reason="no device found", hint="plug one in")


@dataclass
class Loader:
    """A ``load`` that remembers every driver it made and the options it got."""

    drivers: list[NumpyDriver] = field(default_factory=list)

    def __call__(self, *, threads: int | None = None, queue: int = 1) -> Driver:
        self.drivers.append(NumpyDriver(threads=threads, queue=queue))
        return self.drivers[-1]


class Forbidden:
    """A ``load`` that must not be reached: a refusal comes before anything is allocated."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Driver:
        self.calls += 1
        raise AssertionError("load was called")


def mode(
    name: str = "",
    *,
    kind: ModeKind = "accelerator",
    load: Callable[..., Driver] | None = None,
    probe: Callable[[], Availability] | Availability = USABLE,
    supports: Mapping[str, tuple[Any, ...]] | None = None,
    requires: tuple[str, ...] = (),
) -> ModeDescriptor:
    found = probe if callable(probe) else lambda: probe
    return ModeDescriptor(name, kind, load or Loader(), found, requires, supports or {})


def descriptor(name: str, *modes: ModeDescriptor, hint: str = "pip install it") -> BackendDescriptor:
    return BackendDescriptor(name, f"the fake {name}", modes or (mode(),), hint)


def manager_of(*descriptors: BackendDescriptor) -> PluginManager:
    manager = PluginManager()
    for one in descriptors:
        manager.register(one, distribution=f"{one.name}-dist", version="1.0")
    return manager


def cpu(**options: Any) -> BackendDescriptor:
    return descriptor("cpu", mode(kind="host", **options))


PLUGIN_SOURCE = """
import pluggy
from forebay.specs.descriptor import HOOK_PROJECT, Availability, BackendDescriptor, ModeDescriptor

hookimpl = pluggy.HookimplMarker(HOOK_PROJECT)


def load():
    from tests.selection.numpy_driver import NumpyDriver

    return NumpyDriver()


def probe():
    return Availability(usable=True, reason="a fake device")


def describe(name, load=load, probe=probe, kind="accelerator"):
    return BackendDescriptor(name, "a fake", (ModeDescriptor("", kind, load, probe),), "pip install it")
"""
"""What plugin modules of the tests start with; ``describe(name)`` is a descriptor that works."""

GOOD_HOOK = """
@hookimpl
def forebay_backend():
    return describe("{name}")
"""

AWAY_HOOK = """
@hookimpl
def forebay_backend():
    absent = Availability(usable=False, reason="no device found", hint="{hint}")
    return describe("away", probe=lambda: absent)
"""


@dataclass
class Site:
    """A folder on the import path into which tests install distributions."""

    path: Path
    modules: list[str] = field(default_factory=list)

    def install(
        self,
        distribution: str,
        entries: Mapping[str, str],
        *,
        version: str = "1.0",
        metadata: str | bytes | None = None,
    ) -> None:
        """``entries``: entry point name → source of its plugin module, after :data:`PLUGIN_SOURCE`."""
        lines = []
        for name, source in entries.items():
            module = re.sub(r"\W", "_", f"{distribution}_{name}_plugin")
            (self.path / f"{module}.py").write_text(PLUGIN_SOURCE + textwrap.dedent(source))
            lines.append(f"{name} = {module}")
            self.modules.append(module)
        info = self.path / f"{re.sub(r'[-_.]+', '_', distribution)}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        text = "[forebay.backends]\n" + "\n".join(lines) + "\n" if metadata is None else metadata
        (info / "entry_points.txt").write_bytes(text if isinstance(text, bytes) else text.encode())

    def install_good(self, distribution: str, name: str, *, version: str = "1.0") -> None:
        self.install(distribution, {name: GOOD_HOOK.format(name=name)}, version=version)
