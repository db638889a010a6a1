"""Chooses a backend and opens it: an explicit choice runs or fails, ``auto`` says why it passed over the others.

``auto`` looks at the modes of kind ``accelerator`` in name order, takes the first that is usable and has what is
required, else ``cpu``; never a reference, an interpreter or a simulator (clause B3). All of this happens before a
driver is loaded, so a refusal allocates nothing.

"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from forebay.runtime.plugin_guard import PluginGuard
from forebay.runtime.plugins import Plugin, PluginManager, describe_error, probe
from forebay.runtime.settings import Settings, Source
from forebay.specs.descriptor import AUTO, BackendDescriptor, Candidate, ModeDescriptor, Selection
from forebay.specs.errors import BackendUnavailable, ForebayError, InvalidSetting, UnknownBackend, Unsupported

if TYPE_CHECKING:
    from forebay.specs.backend import Backend
    from forebay.specs.driver import Driver

HOST_FALLBACK: Final = "cpu"
NEEDS_FROM_SETTINGS: Final = ("dtype", "kv_dtype", "attention", "capture", "arm")
"""Settings that become requirements of the backend once somebody sets them; a default is a preference, no demand."""


@dataclass(frozen=True)
class Requirements:
    """What the chosen mode must support.

    ``needs`` maps a feature of ``ModeDescriptor.supports`` to the value needed, or to a tuple of values all of which
    are needed. ``origins`` says, for reports, who asked for a feature.
    """

    needs: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, **needs: Any) -> Requirements:
        """Requirements of a call: ``Requirements.of(kv_dtype="bfloat16", features=("unified", "lse"))``."""
        return cls(needs, dict.fromkeys(needs, "call"))

    @classmethod
    def from_settings(cls, settings: Settings) -> Requirements:
        """The settings that somebody set and that a backend may lack."""
        keys = [key for key in NEEDS_FROM_SETTINGS if settings.source(key) != "default"]
        needs = {key: getattr(settings, key) for key in keys if getattr(settings, key) is not None}
        return cls(needs, {key: str(settings.trace(key)) for key in needs})

    def __or__(self, other: Requirements) -> Requirements:
        """Both; where they name one feature, ``other``'s value replaces this one's."""
        return Requirements({**self.needs, **other.needs}, {**self.origins, **other.origins})

    def unmet(self, mode: ModeDescriptor) -> str:
        """The first need that ``mode`` does not meet, with what was found; ``""`` if it meets all."""
        for name, value in self.needs.items():
            supported = mode.supports.get(name)
            if supported is None:
                continue
            lacking = [one for one in (value if isinstance(value, tuple) else (value,)) if one not in supported]
            if lacking:
                found = ", ".join(map(repr, supported)) or "none"
                return f"{name}: needs {lacking[0]!r} ({self.origins.get(name, 'call')}), found {found}"
        return ""


def parse_choice(requested: str, source: str) -> tuple[str, str | None]:
    """``"NAME"`` to ``(NAME, None)``, ``"NAME:MODE"`` to ``(NAME, MODE)``.

    Raises:
        InvalidSetting: neither form, or a mode of ``auto``.
    """
    name, colon, mode = requested.partition(":")
    if not name or (colon and not mode) or ":" in mode:
        raise InvalidSetting(f"backend = '{requested}' ({source}); expected NAME, NAME:MODE or auto")
    if name == AUTO and colon:
        raise InvalidSetting(f"backend = '{requested}' ({source}); auto takes no mode: name the backend, or write auto")
    return name, mode if colon else None


def select(
    requested: str,
    source: Source,
    origin: str,
    manager: PluginManager,
    require: Requirements | None = None,
    *,
    failed: Mapping[str, str] | None = None,
) -> tuple[Selection, ModeDescriptor]:
    """Choose a backend and a mode; nothing is loaded or allocated.

    ``source`` and ``origin`` say where ``requested`` came from. ``failed`` maps names, as :func:`mode_label` writes
    them, to the reason why ``auto`` is to pass them over.

    Raises:
        InvalidSetting: ``requested`` is not NAME, NAME:MODE or auto.
        UnknownBackend: no such backend, or no such mode of it; lists what there is.
        BackendUnavailable: it cannot run here; the stored cause is chained, and the message has an install hint.
        Unsupported: it can run but lacks something required; names the option, the need and what was found.
    """
    where = f"{source} {origin}".rstrip()
    name, mode_name = parse_choice(requested, where)
    needs = require or Requirements()
    if name == AUTO:
        manager.check_duplicates()
        plugin, mode, considered = _take_first(manager, needs, failed or {})
    else:
        plugin, mode = _take_named(name, mode_name, where, manager, needs)
        considered = (Candidate(mode_label(plugin.name, mode), ""),)
    selection = Selection(
        name=plugin.name,
        mode=mode.name,
        requested=requested,
        source=source,
        origin=origin,
        distribution=plugin.distribution,
        version=plugin.version,
        considered=considered,
        kind=mode.kind,
    )
    return selection, mode


def check_known(requested: str, source: str, manager: PluginManager) -> None:
    """Check that there are such a backend and such a mode, or that the choice is ``auto``'s; whether it can run here is not asked.

    Raises:
        InvalidSetting, UnknownBackend: as :func:`select`.
        BackendUnavailable: its plugin is broken or its name taken twice, so that nobody knows its modes.
    """
    try:
        name, mode_name = parse_choice(requested, source)
    except InvalidSetting as error:
        name = requested.partition(":")[0]
        known = _modes_of(manager.find(name)[1]) if name in manager.names else manager.describe_known()
        raise InvalidSetting(f"{error}; {known}") from error
    if name != AUTO:
        _, descriptor = manager.find(name)
        _find_mode(descriptor, mode_name)


def mode_label(name: str, mode: ModeDescriptor) -> str:
    """``NAME`` for a backend's default mode, ``NAME:MODE`` for another."""
    return f"{name}:{mode.name}" if mode.name else name


def open_backend(
    name: str | None = None,
    *,
    settings: Settings | None = None,
    require: Requirements | None = None,
    manager: PluginManager | None = None,
    **options: Any,
) -> Backend:
    """Open the backend ``name`` (``NAME[:MODE]`` or ``auto``); None takes the configured one. Close it when done.

    ``settings`` replaces the resolved configuration, ``require`` adds to the requirements that configuration makes,
    ``manager`` replaces the installed plugins. ``options`` go to the mode's driver.

    Raises:
        InvalidSetting: an option that the driver does not take, or a fault of the configuration.
        UnknownBackend, BackendUnavailable, Unsupported: as :func:`select`; BackendUnavailable also when the driver
            fails while it is loaded (with ``auto``, the next candidate is tried and the report says why).
    """
    settings = settings if settings is not None else Settings.resolve()
    if name is not None:
        settings = settings.override(backend=name)
    manager = manager if manager is not None else PluginManager.discover()
    needs = Requirements.from_settings(settings) | (require or Requirements())
    trace = settings.trace("backend")
    failed: dict[str, str] = {}
    while True:
        selection, mode = select(settings.backend, trace.source, trace.origin, manager, needs, failed=failed)
        try:
            driver = _load_driver(selection, mode, manager, _driver_options(selection, mode, settings, options))
        except BackendUnavailable as error:
            if settings.backend != AUTO or selection.name == HOST_FALLBACK:
                raise
            failed[mode_label(selection.name, mode)] = f"its driver failed to load: {describe_error(error.__cause__)}"
            continue
        return _as_backend(driver, selection)


# -- the two ways of choosing ------------------------------------------------------------------------------------------


def _take_named(
    name: str, mode_name: str | None, where: str, manager: PluginManager, needs: Requirements
) -> tuple[Plugin, ModeDescriptor]:
    try:
        plugin, descriptor = manager.find(name)
    except UnknownBackend as error:
        asked = "" if where == "call" else f" (asked for by {where})"  # whoever calls knows what for
        raise UnknownBackend(f"{error}{asked}") from error
    mode = _find_mode(descriptor, mode_name)
    label = mode_label(name, mode)
    unmet = needs.unmet(mode)
    if unmet:
        raise Unsupported(f"backend '{label}' ({where}) does not support what is required: {unmet}")
    available = probe(mode, descriptor.install_hint)
    if not available.usable:
        hint = available.hint or descriptor.install_hint
        raise BackendUnavailable(
            f"backend '{label}' ({where}) cannot run here: {available.reason}; {manager.describe_known()}; "
            f"to make it usable: {hint}"
        ) from available.cause
    return plugin, mode


def _find_mode(descriptor: BackendDescriptor, mode_name: str | None) -> ModeDescriptor:
    if mode_name is None:
        return descriptor.modes[0]
    for mode in descriptor.modes:
        if mode.name == mode_name:
            return mode
    names = [mode.name for mode in descriptor.modes if mode.name]
    nearest = difflib.get_close_matches(mode_name, names, n=1)
    raise UnknownBackend(
        f"backend '{descriptor.name}' has no mode '{mode_name}'; {_modes_of(descriptor)}"
        + "".join(f"; did you mean '{descriptor.name}:{name}'?" for name in nearest)
    )


def _modes_of(descriptor: BackendDescriptor) -> str:
    return f"its modes: {', '.join(mode_label(descriptor.name, mode) for mode in descriptor.modes)}"


def _take_first(
    manager: PluginManager, needs: Requirements, failed: Mapping[str, str]
) -> tuple[Plugin, ModeDescriptor, tuple[Candidate, ...]]:
    """The first accelerator that will do, else ``cpu``, with a verdict on everything looked at before it."""
    broken = [plugin for plugin in manager if plugin.descriptor is None]
    passed_over = [Candidate(plugin.name, f"its plugin is broken: {describe_error(plugin.error)}") for plugin in broken]
    lacking = False
    for plugin, descriptor, mode in _auto_order(manager):
        label = mode_label(plugin.name, mode)
        reason = failed.get(label) or _not_for_auto(plugin, mode)
        if not reason and (reason := needs.unmet(mode)):
            lacking = True
        reason = reason or _why_unusable(mode, descriptor)
        if not reason:
            return plugin, mode, (*passed_over, Candidate(label, ""))
        passed_over.append(Candidate(label, reason))
    listed = "; ".join(f"{candidate.name}: {candidate.passed_over}" for candidate in passed_over) or "none is installed"
    if lacking:
        raise Unsupported(f"backend 'auto' found no backend that supports what is required: {listed}")
    cause = broken[0].error if broken else None
    raise BackendUnavailable(
        f"backend 'auto' found no usable backend: {listed}; to get one: pip install 'forebay[cpu]'"
    ) from cause


def _auto_order(manager: PluginManager) -> list[tuple[Plugin, BackendDescriptor, ModeDescriptor]]:
    """Every mode of every sound plugin in name order, those of the fallback last."""
    modes = [
        (plugin, plugin.descriptor, mode) for plugin in manager if plugin.descriptor for mode in plugin.descriptor.modes
    ]
    return sorted(modes, key=lambda entry: entry[0].name == HOST_FALLBACK)


def _not_for_auto(plugin: Plugin, mode: ModeDescriptor) -> str:
    if mode.kind == "accelerator" or (mode.kind == "host" and plugin.name == HOST_FALLBACK):
        return ""
    return f"its kind is {mode.kind}: auto takes an accelerator, else {HOST_FALLBACK}"


def _why_unusable(mode: ModeDescriptor, descriptor: BackendDescriptor) -> str:
    available = probe(mode, descriptor.install_hint)
    if available.usable:
        return ""
    return f"{available.reason} ({available.hint})" if available.hint else available.reason


# -- opening -----------------------------------------------------------------------------------------------------------


def _driver_options(
    selection: Selection, mode: ModeDescriptor, settings: Settings, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The options for ``mode.load``, with ``threads`` of the settings, checked against its signature."""
    given = dict(options)
    origins = dict.fromkeys(options, "call")
    if settings.threads is not None and "threads" not in given:
        given["threads"] = settings.threads
        origins["threads"] = str(settings.trace("threads"))
    try:
        parameters = list(inspect.signature(mode.load).parameters.values())
    except ValueError:  # a callable without a signature, written in C: it checks for itself
        return given
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return given
    accepted = [p.name for p in parameters if p.kind is not inspect.Parameter.POSITIONAL_ONLY]
    for option in given:
        if option not in accepted:
            nearest = difflib.get_close_matches(option, accepted, n=1)
            raise InvalidSetting(
                f"backend '{mode_label(selection.name, mode)}' takes no option '{option}' ({origins[option]}); "
                f"its options: {', '.join(accepted) or 'none'}" + "".join(f"; did you mean '{n}'?" for n in nearest)
            )
    return given


def _load_driver(
    selection: Selection, mode: ModeDescriptor, manager: PluginManager, options: Mapping[str, Any]
) -> Driver:
    """Import the vendor library and make the driver. The project's own errors (a wrong option value) pass unchanged."""
    from forebay.specs.driver import Driver

    label = mode_label(selection.name, mode)
    driver: object = None
    # A vendor library may be set up by variables for as long as it lives.
    with PluginGuard(keep_environment=True) as guard:
        driver = mode.load(**options)
    if isinstance(guard.error, ForebayError):
        raise guard.error
    if guard.error is not None:
        _, descriptor = manager.find(selection.name)
        raise BackendUnavailable(
            f"backend '{label}' failed while its driver was loaded: {describe_error(guard.error)}; "
            f"{manager.describe_known()}; to make it usable: {descriptor.install_hint}"
        ) from guard.error
    if not isinstance(driver, Driver):
        raise BackendUnavailable(
            f"backend '{label}' ({selection.distribution}) loaded {driver!r}; expected a forebay.specs.driver.Driver"
        )
    return driver


def _as_backend(driver: Driver, selection: Selection) -> Backend:
    """Put the host checks in front of the driver; the driver is closed if that fails."""
    from forebay.specs.backend import Backend

    try:
        return Backend(driver, selection)
    except BaseException:
        driver.close()
        raise
