"""``forebay doctor``: runs a real operation on every backend that is available, and says what the others need."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated, Any

import typer

from forebay.runtime.cli.backends import plugin_status, selection_status
from forebay.runtime.cli.console import print_json, progress_bars, resolve_settings, setting_option
from forebay.runtime.plugins import PluginManager


def doctor(
    context: typer.Context,
    backend: Annotated[str | None, setting_option("backend", "NAME[:MODE]")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds each backend may take.")] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a real operation on each backend.

    The exit code is 0 if the selected backend works, else 1.
    """
    settings = resolve_settings(context, backend=backend)
    manager = PluginManager.discover()
    plugins = [plugin_status(plugin, manager) for plugin in manager]
    checks = {mode["label"]: mode for plugin in plugins if not plugin["cause"] for mode in plugin["modes"]}
    with progress_bars(context) as bars:
        report = bars.for_count("checking backends")
        for done, (label, mode) in enumerate(checks.items()):
            report(done, len(checks))
            mode["check"] = check_backend(label, timeout) if mode["status"] == "usable" else None
    selection = selection_status(settings, manager)
    chosen = checks.get(selection["selected"] or "")
    works = chosen is not None and chosen["check"] is not None and chosen["check"]["ok"]
    if as_json:
        print_json({"backends": plugins, "selection": selection, "works": works})
    else:
        _print_report(plugins, selection, works=works)
    if not works:
        raise typer.Exit(1)


def check_backend(label: str, timeout: float) -> dict[str, Any]:
    """The outcome of ``forebay.runtime.cli.self_test`` for one backend, run in a process of its own.

    ``timeout`` in seconds. A process that crashes, hangs or says nothing gives ``{"ok": False, "error": ...}``.
    """
    command = [sys.executable, "-m", "forebay.runtime.cli.self_test", label]
    try:
        done = subprocess.run(  # noqa: S603  # this interpreter, a module of this package, a registered name
            command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"no outcome after {timeout:g} s"}
    try:
        outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"ok": False, "error": f"its process ended with code {done.returncode}: {last}"}
    return outcome


def _print_report(plugins: list[dict[str, Any]], selection: dict[str, Any], *, works: bool) -> None:
    for plugin in plugins:
        if plugin["cause"]:
            print(f"{plugin['name']:<20} {plugin['status']:<12} {plugin['cause']}")
            continue
        for mode in plugin["modes"]:
            print(f"{mode['label']:<20} {_describe_mode(mode)}")
    if selection["selected"] is None:
        print(f"selected: none, {selection['error']}")
        return
    asked = f"{selection['requested']}, {selection['source']} {selection['origin']}".rstrip()
    print(f"selected: {selection['selected']} ({asked}): {'works' if works else 'does not work'}")


def _describe_mode(mode: dict[str, Any]) -> str:
    check = mode["check"]
    if check is None:
        hint = f"; to make it usable: {mode['hint']}" if mode["hint"] else ""
        return f"{mode['status']:<12} {mode['reason']}{hint}"
    if not check["ok"]:
        return f"{'fails':<12} {check['error']}"
    steps = ", ".join(
        f"{step['name']} {step['again_s'] * 1e3:.2f} ms (first {step['first_s'] * 1e3:.1f} ms)"
        for step in check["steps"]
    )
    return f"{'works':<12} {steps}"
