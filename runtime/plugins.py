"""Finds the backend plugins that are installed, and keeps what went wrong with those that are broken.

Discovery goes through the entry-point group ``forebay.backends`` one entry point at a time, so one broken plugin breaks
nothing else (clause B1). No vendor library is imported here. pluggy serves discovery alone: afterwards a choice is a
look-up by name.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Final

import pluggy

from forebay.runtime import hookspec
from forebay.runtime.plugin_guard import PluginGuard, message_of
from forebay.specs.descriptor import ENTRY_POINT_GROUP, HOOK_PROJECT, Availability, BackendDescriptor, ModeDescriptor
from forebay.specs.errors import BackendUnavailable, InvalidInput, UnknownBackend

IN_PROCESS: Final = "registered in this process"
UNNAMED: Final = "unnamed distribution"


@dataclass(frozen=True)
class Plugin:
    """One registered backend name: a descriptor, or the error that kept it from giving one.

    ``name`` is the entry point's name, ``target`` the object it names. Exactly one of ``descriptor`` and ``error`` is
    set; ``traceback`` is the text of the error's traceback, kept for reports.
    """

    name: str
    distribution: str
    version: str
    target: str = ""
    descriptor: BackendDescriptor | None = None
    error: BaseException | None = field(default=None, compare=False)
    traceback: str = field(default="", repr=False, compare=False)

    @property
    def provider(self) -> str:
        """The distribution and its version, as errors name it."""
        return f"{self.distribution} {self.version}".rstrip()


class PluginManager:
    """The backend plugins known to one process, broken ones included.

    ``PluginManager.discover()`` reads the installed distributions. ``PluginManager()`` is empty until :meth:`register`.
    """

    def __init__(self) -> None:
        self._plugins: list[Plugin] = []

    @classmethod
    def discover(cls) -> PluginManager:
        """A manager that holds every entry point of the group ``forebay.backends``; no plugin can make this raise."""
        manager = cls()
        for distribution in _installed():
            manager._plugins += _read_entry_points(distribution)
        return manager

    def register(
        self, plugin: object, *, name: str | None = None, distribution: str = IN_PROCESS, version: str = ""
    ) -> Plugin:
        """Add a descriptor, or an object that implements the hook ``forebay_backend``, without an entry point.

        ``name`` is the name to register under (the descriptor's own when None). A plugin that is broken is kept as
        broken, as one found by discovery is.
        """
        found = BackendDescriptor.__name__ if isinstance(plugin, BackendDescriptor) else type(plugin).__name__
        record = None
        with PluginGuard() as guard:
            descriptor = plugin if isinstance(plugin, BackendDescriptor) else describe(plugin)
            record = _described(descriptor, name or descriptor.name, distribution, version, found)
        record = record or _broken(guard.error, name or found, distribution, version, found)
        self._plugins.append(record)
        return record

    def __iter__(self) -> Iterator[Plugin]:
        """The plugins in name order, then distribution order: the order in which ``auto`` looks at them."""
        return iter(sorted(self._plugins, key=lambda plugin: (plugin.name, plugin.distribution, plugin.version)))

    @property
    def names(self) -> tuple[str, ...]:
        """Every registered name once, in order; broken ones included."""
        return tuple(dict.fromkeys(plugin.name for plugin in self))

    def check_duplicates(self, name: str | None = None) -> None:
        """Raise if two distributions registered the same name (clause B5); looks at all names when ``name`` is None.

        Raises:
            BackendUnavailable: naming both distributions and what to uninstall.
        """
        for candidate in self.names if name is None else (name,):
            providers = [plugin.provider for plugin in self if plugin.name == candidate]
            if len(providers) > 1:
                raise BackendUnavailable(
                    f"backend '{candidate}' is registered by {len(providers)} distributions, "
                    f"{' and '.join(providers)}; uninstall all but one of them"
                )

    def find(self, name: str) -> tuple[Plugin, BackendDescriptor]:
        """The plugin registered as ``name`` and its descriptor: a look-up, nothing is probed.

        Raises:
            UnknownBackend: nothing of that name; lists the known names and the nearest one.
            BackendUnavailable: the name is registered twice, or its plugin is broken (its original error is chained).
        """
        self.check_duplicates(name)
        plugin = next((plugin for plugin in self if plugin.name == name), None)
        if plugin is None:
            raise UnknownBackend(f"no backend '{name}' is installed; {self.describe_known(name)}")
        if plugin.descriptor is None:
            raise BackendUnavailable(
                f"backend '{name}' cannot be used, its plugin ({plugin.provider}) is broken: "
                f"{describe_error(plugin.error)}; {self.describe_known()}; {_advice(plugin)}"
            ) from plugin.error
        return plugin, plugin.descriptor

    def describe_known(self, given: str | None = None) -> str:
        """The known names as errors list them, with the one nearest to ``given``."""
        known = ", ".join(self.names) or "none"
        nearest = difflib.get_close_matches(given, self.names, n=1) if given is not None else []
        return f"known backends: {known}" + "".join(f"; did you mean '{name}'?" for name in nearest)


def describe(plugin: object) -> BackendDescriptor:
    """Ask one plugin for its descriptor.

    Each plugin is registered with a pluggy manager of its own: undoing a registration that fails half way is dropping
    that manager, ``check_pending`` can name the plugin at fault, and two entry points may share one module.

    Raises:
        pluggy.PluginValidationError: a hook of the plugin has the wrong signature or an unknown name.
        InvalidInput: it implements no hook, or returned something else than one descriptor.
        Exception: whatever the plugin raises.
    """
    manager = pluggy.PluginManager(HOOK_PROJECT)
    manager.add_hookspecs(hookspec)
    manager.register(plugin)
    manager.check_pending()
    results = manager.hook.forebay_backend()
    if len(results) != 1:
        raise InvalidInput(
            f"{plugin!r} gave {len(results)} descriptors; expected a function forebay_backend, marked with "
            f"pluggy.HookimplMarker('{HOOK_PROJECT}'), that returns one BackendDescriptor"
        )
    descriptor = results[0]
    if not isinstance(descriptor, BackendDescriptor):
        raise InvalidInput(f"the hook forebay_backend returned {descriptor!r}; expected a BackendDescriptor")
    return descriptor


def probe(mode: ModeDescriptor, install_hint: str) -> Availability:
    """Whether ``mode`` can run on this machine; never raises on account of the plugin.

    A module of ``mode.requires`` that is missing makes it unusable, with ``install_hint``. A probe that raises makes it
    unusable too, with the original exception as ``cause``.
    """
    availability: object = None
    with PluginGuard() as guard:
        missing = [name for name in mode.requires if importlib.util.find_spec(name) is None]
        if missing:
            return Availability(usable=False, reason=f"not installed: {', '.join(missing)}", hint=install_hint)
        availability = mode.probe()
        if not isinstance(availability, Availability):
            raise InvalidInput(f"the probe returned {availability!r}; expected an Availability")
    if isinstance(availability, Availability):
        return availability
    return Availability(
        usable=False,
        reason=f"its probe failed: {describe_error(guard.error)}",
        hint=install_hint,
        cause=guard.error,
    )


def describe_error(error: BaseException | None) -> str:
    """``Type: first line of the message``, as one line of a report."""
    lines = message_of(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _installed() -> Iterator[Distribution]:
    """The distributions that declare backends, each name once: the first on the import path hides others."""
    seen = set()
    for distribution in distributions():
        if not _declares_backends(distribution):
            continue
        name, _ = _identity(distribution)
        normalized = re.sub(r"[-_.]+", "-", name).lower()
        if normalized not in seen:
            seen.add(normalized)
            yield distribution


def _declares_backends(distribution: Distribution) -> bool:
    """Whether the group stands in its entry points, also where these are not UTF-8 and reading them as text fails."""
    text: str | None = None
    with PluginGuard() as guard:
        text = distribution.read_text("entry_points.txt")
    if isinstance(guard.error, UnicodeDecodeError):
        return ENTRY_POINT_GROUP.encode() in guard.error.object
    return ENTRY_POINT_GROUP in (text or "")


def _identity(distribution: Distribution) -> tuple[str, str]:
    """Its name and version; stand-ins where its metadata cannot be read."""
    with PluginGuard():
        return distribution.metadata["Name"] or UNNAMED, distribution.version or ""
    return UNNAMED, ""


def _read_entry_points(distribution: Distribution) -> list[Plugin]:
    """The plugins of one distribution; metadata that cannot be parsed gives one broken plugin of that name."""
    name, version = _identity(distribution)
    entries: tuple[EntryPoint, ...] = ()
    with PluginGuard() as guard:  # damaged metadata fails in many ways
        entries = tuple(distribution.entry_points.select(group=ENTRY_POINT_GROUP))
    if guard.error is not None:
        return [_broken(guard.error, name, name, version, "entry_points.txt")]
    return [_load_entry_point(entry, name, version) for entry in entries]


def _load_entry_point(entry: EntryPoint, distribution: str, version: str) -> Plugin:
    """Import one entry point's plugin and ask it for its descriptor, or record why that failed."""
    with PluginGuard() as guard:
        return _described(describe(entry.load()), entry.name, distribution, version, entry.value)
    return _broken(guard.error, entry.name, distribution, version, entry.value)


def _described(descriptor: BackendDescriptor, name: str, distribution: str, version: str, target: str) -> Plugin:
    if descriptor.name != name:
        raise InvalidInput(
            f"the entry point is named '{name}' and its descriptor '{descriptor.name}'; expected one name in both: in "
            f'[project.entry-points."{ENTRY_POINT_GROUP}"] of pyproject.toml and in BackendDescriptor(name, ...)'
        )
    return Plugin(name=name, distribution=distribution, version=version, target=target, descriptor=descriptor)


def _advice(plugin: Plugin) -> str:
    """What mends a broken plugin: a fault of what it registers is in its source, anything else may be a damaged installation."""
    if plugin.distribution in (IN_PROCESS, UNNAMED):
        return "mend what registers it"
    if isinstance(plugin.error, (InvalidInput, pluggy.PluginValidationError)):
        return (
            f"mend the source of {plugin.distribution} and install that; the same source, installed again, is as broken"
        )
    return f"to repair it: pip install --force-reinstall {plugin.distribution}"


def _broken(error: BaseException | None, name: str, distribution: str, version: str, target: str) -> Plugin:
    text = ""
    with PluginGuard():  # a traceback shows the exception's own texts
        text = "".join(traceback.format_exception(error))
    return Plugin(name=name, distribution=distribution, version=version, target=target, error=error, traceback=text)
