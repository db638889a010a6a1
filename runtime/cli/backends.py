"""``forebay backends``: what is installed, what can run here, and why the rest cannot."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import typer

from forebay.runtime.cli.console import print_json, resolve_settings
from forebay.runtime.plugins import Plugin, PluginManager, describe_error, probe
from forebay.runtime.selection import Requirements, mode_label, select
from forebay.runtime.settings import Settings
from forebay.specs.descriptor import ModeDescriptor
from forebay.specs.errors import ForebayError

Status = Literal["usable", "unavailable", "broken"]


@dataclass(frozen=True)
class ModeStatus:
    """One mode: ``reason`` names the device or says why it cannot run, ``hint`` what to do about it."""

    label: str
    kind: str
    status: Status
    reason: str
    hint: str = ""


def mode_status(plugin: Plugin, mode: ModeDescriptor, install_hint: str) -> ModeStatus:
    """Probe one mode; a probe that raised makes it broken."""
    available = probe(mode, install_hint)
    status: Status = "usable" if available.usable else "unavailable" if available.cause is None else "broken"
    hint = "" if available.usable else available.hint or install_hint
    return ModeStatus(mode_label(plugin.name, mode), mode.kind, status, available.reason, hint)


def plugin_status(plugin: Plugin, manager: PluginManager) -> dict[str, Any]:
    """One plugin and its modes as plain data; ``cause`` and ``traceback`` are there when it is broken."""
    others = [other.provider for other in manager if other.name == plugin.name and other is not plugin]
    report: dict[str, Any] = {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.target,
        "status": "broken",
        "modes": [],
        "cause": "",
        "traceback": plugin.traceback,
    }
    if plugin.descriptor is None:
        report["cause"] = describe_error(plugin.error)
        return report
    modes = [mode_status(plugin, mode, plugin.descriptor.install_hint) for mode in plugin.descriptor.modes]
    report |= {"summary": plugin.descriptor.summary, "modes": [asdict(mode) for mode in modes]}
    if others:
        report["cause"] = f"the name is registered by {' and '.join(others)} too; uninstall all but one"
        return report
    statuses = {mode.status for mode in modes}
    report["status"] = next(status for status in ("usable", "unavailable", "broken") if status in statuses)
    return report


def selection_status(settings: Settings, manager: PluginManager) -> dict[str, Any]:
    """The backend these settings select, as plain data; ``error`` says why there is none."""
    trace = settings.trace("backend")
    report: dict[str, Any] = {"requested": settings.backend, "source": trace.source, "origin": trace.origin}
    try:
        needs = Requirements.from_settings(settings)
        selection, mode = select(settings.backend, trace.source, trace.origin, manager, needs)
    except ForebayError as error:
        return report | {"selected": None, "error": str(error)}
    return report | {
        "selected": mode_label(selection.name, mode),
        "considered": list(map(asdict, selection.considered)),
    }


def backends(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the backends, their modes and states."""
    settings = resolve_settings(context)
    manager = PluginManager.discover()
    plugins = [plugin_status(plugin, manager) for plugin in manager]
    selection = selection_status(settings, manager)
    if as_json:
        print_json({"backends": plugins, "selection": selection})
        return
    for plugin in plugins:
        _print_plugin(plugin, show_traceback=settings.traceback)
    if not plugins:
        print("no backend is installed; try: pip install 'forebay[cpu]'")
    asked = f"{selection['requested']}, {selection['source']} {selection['origin']}".rstrip()
    print(f"selected: {selection['selected'] or 'none, ' + selection['error']} ({asked})")


def _print_plugin(plugin: dict[str, Any], *, show_traceback: bool) -> None:
    print(
        f"{plugin['name']} ({plugin['distribution']} {plugin['version']}): {plugin.get('summary', plugin['entry_point'])}"
    )
    if plugin["cause"]:
        print(f"  {plugin['name']:<20} {plugin['status']:<12} {plugin['cause']}")
        if show_traceback and plugin["traceback"]:
            print(plugin["traceback"])
    for mode in plugin["modes"]:
        hint = f"; to make it usable: {mode['hint']}" if mode["hint"] else ""
        print(f"  {mode['label']:<20} {mode['status']:<12} {mode['kind']}: {mode['reason']}{hint}")
