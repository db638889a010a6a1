"""Discovery: entry points, broken plugins, duplicates, descriptors (clauses B1, B5)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forebay.backends.cpu import plugin as cpu_plugin
from forebay.runtime.plugin_guard import message_of
from forebay.runtime.plugins import PluginManager, probe
from forebay.runtime.selection import select
from forebay.specs.descriptor import Availability, BackendDescriptor, ModeDescriptor
from forebay.specs.errors import BackendUnavailable, InvalidInput, UnknownBackend
from tests.selection.fakes import GOOD_HOOK, Loader, Site, cpu, descriptor, manager_of, mode

ROOT = Path(__file__).parents[2]

BROKEN: dict[str, tuple[str, str, str]] = {
    # kind: source of the plugin module, name of the exception, a part of its text
    "its import lacks a module": ("import stale_dep", "ModuleNotFoundError", "No module named 'stale_dep'"),
    "its import fails": ("raise ImportError('cannot import name x')", "ImportError", "cannot import name x"),
    "its library cannot be opened": (
        "raise OSError('libchip.so.1: cannot open')",
        "OSError",
        "libchip.so.1: cannot open",
    ),
    "its import ends the process": ("raise SystemExit('no licence')", "SystemExit", "no licence"),
    "its error has no text": (
        "class Mute(Exception):\n    def __str__(self):\n        raise ValueError('no text')\n\n\nraise Mute",
        "Mute",
        "(its message cannot be shown: ValueError)",
    ),
    "it raises what a Ctrl-C raises": (
        "raise KeyboardInterrupt('not by the user')",
        "KeyboardInterrupt",
        "not by the user",
    ),
    "it raises what cancels a task": (
        "import asyncio\nraise asyncio.CancelledError('not awaited')",
        "CancelledError",
        "not awaited",
    ),
    "it skips as a test does": ("import pytest\npytest.skip('no chip', allow_module_level=True)", "Skipped", "no chip"),
    "it raises a group": (
        "raise BaseExceptionGroup('several', [KeyboardInterrupt()])",
        "BaseExceptionGroup",
        "several",
    ),
    "it has no end": ("def again():\n    again()\n\n\nagain()", "RecursionError", "maximum recursion depth"),
    "it is no Python": ("def def", "SyntaxError", "invalid syntax"),
    "its hook raises": (
        "@hookimpl\ndef forebay_backend():\n    raise RuntimeError('driver 3.1 is too old')",
        "RuntimeError",
        "driver 3.1 is too old",
    ),
    "its hook returns a dict": (
        "@hookimpl\ndef forebay_backend():\n    return {'name': 'bad'}",
        "InvalidInput",
        "{'name': 'bad'}",
    ),
    "its hook returns a class": (
        "@hookimpl\ndef forebay_backend():\n    return BackendDescriptor",
        "InvalidInput",
        "expected a BackendDescriptor",
    ),
    "its hook returns nothing": (
        "@hookimpl\ndef forebay_backend():\n    return None",
        "InvalidInput",
        "gave 0 descriptors",
    ),
    "it has no hook": ("", "InvalidInput", "gave 0 descriptors"),
    "its hook is not marked": (
        "def forebay_backend():\n    return describe('bad')",
        "InvalidInput",
        "gave 0 descriptors",
    ),
    "its hook has another name": (
        "@hookimpl\ndef forebay_backends():\n    return describe('bad')",
        "PluginValidationError",
        "unknown hook 'forebay_backends'",
    ),
    "its hook wants an argument": (
        "@hookimpl\ndef forebay_backend(manager):\n    return describe('bad')",
        "PluginValidationError",
        "manager",
    ),
    "its descriptor has another name": (
        GOOD_HOOK.format(name="worse"),
        "InvalidInput",
        "named 'bad' and its descriptor 'worse'",
    ),
    "its descriptor takes auto": (GOOD_HOOK.format(name="auto"), "InvalidInput", "backend name is 'auto'"),
    "its modes are a list": (
        "@hookimpl\ndef forebay_backend():\n    return BackendDescriptor('bad', '', [], '')",
        "InvalidInput",
        "modes is []",
    ),
}

OF_ITS_SOURCE = ("InvalidInput", "PluginValidationError")
"""Errors of what a plugin registers: to install the same again mends nothing."""


@pytest.mark.clause("B1", "B3")
@pytest.mark.case("F01")
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_breaks_nothing_else_and_keeps_its_error(site: Site, kind: str) -> None:
    source, exception, text = BROKEN[kind]
    site.install_good("aaa-chip", "aaa")
    site.install("bad-chip", {"bad": source}, version="2.5")
    site.install_good("zzz-chip", "zzz")
    manager = PluginManager.discover()
    assert {"aaa", "bad", "zzz"} <= set(manager.names)
    assert select("zzz", "call", "", manager)[0].name == "zzz"

    record = next(plugin for plugin in manager if plugin.name == "bad")
    assert (record.distribution, record.version, record.descriptor) == ("bad-chip", "2.5", None)
    assert type(record.error).__name__ == exception
    assert text in message_of(record.error)
    assert "Traceback (most recent call last)" in record.traceback
    assert exception in record.traceback

    with pytest.raises(BackendUnavailable) as caught:
        select("bad", "call", "", manager)
    assert caught.value.__cause__ is record.error
    for part in (
        "'bad'",
        "bad-chip 2.5",
        exception,
        "known backends: aaa, bad, cpu, cuda, sim, tpu, zzz",
        "mend the source of bad-chip" if exception in OF_ITS_SOURCE else "pip install --force-reinstall bad-chip",
    ):
        assert part in str(caught.value)
    assert ("--force-reinstall" in str(caught.value)) == (exception not in OF_ITS_SOURCE)

    selection, _ = select("auto", "default", "", manager)
    assert selection.name == "aaa"
    reasons = {candidate.name: candidate.passed_over for candidate in selection.considered}
    assert exception in reasons["bad"]
    assert "its plugin is broken" in reasons["bad"]


@pytest.mark.clause("B1")
def test_one_broken_entry_point_spares_the_others_of_its_distribution(site: Site) -> None:
    site.install("two-chips", {"one": "raise OSError('gone')", "two": GOOD_HOOK.format(name="two")})
    manager = PluginManager.discover()
    assert select("two", "call", "", manager)[0].distribution == "two-chips"
    with pytest.raises(BackendUnavailable, match="OSError: gone"):
        manager.find("one")


@pytest.mark.clause("B1")
def test_a_registration_that_fails_half_way_is_undone(site: Site) -> None:
    site.install(
        "half-chip",
        {
            "half": """
            calls = []

            @hookimpl
            def forebay_backend():
                calls.append(1)
                return describe("half")

            @hookimpl
            def forebay_zzz():
                calls.append(2)
            """
        },
    )
    manager = PluginManager.discover()
    with pytest.raises(BackendUnavailable, match="unknown hook 'forebay_zzz'"):
        manager.find("half")
    assert sys.modules["half_chip_half_plugin"].calls == [], "no hook of a refused plugin is ever called"
    site.install_good("whole-chip", "whole")
    assert PluginManager.discover().find("whole")[0].error is None


@pytest.mark.clause("B1")
def test_the_entry_point_names_the_backend_of_the_configuration(site: Site) -> None:
    site.install_good("my-chip", "mychip", version="0.3")
    selection, chosen = select("mychip", "environment", "FOREBAY_BACKEND", PluginManager.discover())
    assert (selection.name, selection.distribution, selection.version) == ("mychip", "my-chip", "0.3")
    assert type(chosen.load()).__name__ == "NumpyDriver"


DISCOVERY = """
import json, sys
from forebay.runtime.plugins import PluginManager
from forebay.runtime.selection import select
manager = PluginManager.discover()
select("auto", "default", "", manager)
vendor = {"torch", "triton", "jax", "jaxlib", "numba", "llvmlite", "ttnn", "ttl", "transformers", "pydantic"}
print(json.dumps([manager.names, sorted(vendor & set(sys.modules))]))
"""


@pytest.mark.clause("B1")
def test_discovery_and_selection_import_no_vendor_library(site: Site, tmp_path: Path) -> None:
    site.install_good("chip", "chip")
    done = subprocess.run(
        [sys.executable, "-c", DISCOVERY],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{site.path}:{ROOT}"},
        check=True,
    )
    assert json.loads(done.stdout) == [["chip", "cpu", "cuda", "sim", "tpu"], []]


@pytest.mark.clause("B5")
def test_a_name_of_two_distributions_is_an_error_that_names_both(site: Site) -> None:
    site.install_good("first-chip", "chip", version="1.0")
    site.install_good("second-chip", "chip", version="2.0")
    manager = PluginManager.discover()
    for requested in ("chip", "auto"):
        with pytest.raises(BackendUnavailable) as caught:
            select(requested, "call", "", manager)
        assert "backend 'chip' is registered by 2 distributions, first-chip 1.0 and second-chip 2.0" in str(
            caught.value
        )
    assert select("cpu", "call", "", manager)[0].name == "cpu", "another name is not concerned"


@pytest.mark.clause("B5")
def test_a_broken_plugin_under_a_taken_name_is_a_duplicate_too(site: Site) -> None:
    site.install_good("first-chip", "chip")
    site.install("second-chip", {"chip": "raise OSError('gone')"})
    with pytest.raises(BackendUnavailable, match=r"first-chip 1\.0 and second-chip 1\.0"):
        PluginManager.discover().find("chip")


@pytest.mark.clause("B5")
def test_two_distributions_that_share_one_module_are_duplicates(site: Site) -> None:
    site.install_good("first-chip", "chip")
    site.install("second-chip", {}, metadata="[forebay.backends]\nchip = first_chip_chip_plugin\n")
    with pytest.raises(BackendUnavailable, match=r"first-chip 1\.0 and second-chip 1\.0"):
        PluginManager.discover().find("chip")


def test_one_distribution_that_is_on_the_path_twice_counts_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install_good("my.chip", "chip", version="1.0")
    older = Site(site.path / "older")
    older.path.mkdir()
    older.install_good("My-Chip", "chip", version="0.9")
    monkeypatch.syspath_prepend(str(older.path))
    monkeypatch.syspath_prepend(str(site.path))
    assert PluginManager.discover().find("chip")[0].version == "1.0", "the first on the path hides the other"


# -- registering in one process ----------------------------------------------------------------------------------------


def test_register_takes_a_descriptor_or_a_plugin() -> None:
    manager = PluginManager()
    manager.register(descriptor("one"), distribution="one-dist", version="1.2")
    manager.register(cpu_plugin)
    assert manager.names == ("cpu", "one")
    assert manager.find("one")[0].provider == "one-dist 1.2"
    assert manager.find("cpu")[0].distribution == "registered in this process"


def test_register_keeps_a_broken_plugin_as_broken() -> None:
    manager = PluginManager()
    record = manager.register(object(), name="odd", distribution="odd-dist")
    assert isinstance(record.error, InvalidInput)
    with pytest.raises(BackendUnavailable, match="mend the source of odd-dist"):
        manager.find("odd")
    manager.register(object(), name="strange")
    with pytest.raises(BackendUnavailable, match=r"mend what registers it$"):
        manager.find("strange")


@pytest.mark.clause("B3")
@pytest.mark.case("F01")
def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    manager = manager_of(cpu(), descriptor("cuda"), descriptor("tenstorrent"))
    with pytest.raises(UnknownBackend) as caught:
        manager.find("tenstorent")
    text = "no backend 'tenstorent' is installed; known backends: cpu, cuda, tenstorrent; did you mean 'tenstorrent'?"
    assert str(caught.value) == text
    with pytest.raises(UnknownBackend, match=r"known backends: none$"):
        PluginManager().find("cpu")


# -- probing and descriptors -------------------------------------------------------------------------------------------


def test_probe_checks_what_a_mode_requires_first() -> None:
    def never() -> Availability:
        raise AssertionError("probed without its modules")

    found = probe(mode(requires=("json", "no_such_module"), probe=never), "pip install the-extra")
    assert (found.usable, found.reason, found.hint) == (False, "not installed: no_such_module", "pip install the-extra")


def test_a_probe_that_raises_or_returns_something_else_keeps_its_error() -> None:
    error = OSError("libchip.so: cannot open")

    def fails() -> Availability:
        raise error

    found = probe(mode(probe=fails), "reinstall")
    assert (found.usable, found.cause, found.hint) == (False, error, "reinstall")
    assert "OSError: libchip.so: cannot open" in found.reason
    wrong: Any = lambda: True  # noqa: E731
    found = probe(ModeDescriptor("", "host", Loader(), wrong), "reinstall")
    assert not found.usable
    assert "returned True; expected an Availability" in found.reason


WRONG_MODES: list[tuple[Mapping[str, Any], str]] = [
    ({"name": "Fast"}, "mode name is 'Fast'"),
    ({"name": "a:b"}, "mode name is 'a:b'"),
    ({"name": None}, "mode name is None"),
    ({"kind": "gpu"}, "kind is 'gpu'; expected one of accelerator, host, reference, interpreted, simulated"),
    ({"load": "driver"}, "load is 'driver'"),
    ({"probe": None}, "probe is None"),
    ({"requires": ["torch"]}, r"requires is \['torch'\]; expected a tuple of str"),
    ({"requires": (1,)}, "expected a tuple of str"),
    ({"supports": ["x"]}, "supports is"),
    ({"supports": {"kv_dtype": "float32"}}, r"supports\['kv_dtype'\] is 'float32'; expected a tuple"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG_MODES)
def test_a_mode_checks_its_fields(fields: Mapping[str, Any], message: str) -> None:
    good: dict[str, Any] = {"name": "", "kind": "host", "load": Loader(), "probe": lambda: None}
    ModeDescriptor(**good)
    with pytest.raises(InvalidInput, match=message):
        ModeDescriptor(**{**good, **fields})


WRONG_BACKENDS: list[tuple[Mapping[str, Any], str]] = [
    ({"name": ""}, "backend name is ''"),
    ({"name": "auto"}, "backend name is 'auto'"),
    ({"name": "cuda:interpret"}, "backend name is 'cuda:interpret'"),
    ({"name": 3}, "backend name is 3"),
    ({"summary": None}, "summary is None"),
    ({"install_hint": None}, "install_hint is None"),
    ({"modes": ()}, "expected at least one mode"),
    ({"modes": ("",)}, "expected a tuple of ModeDescriptor"),
    ({"modes": (mode("a"), mode("a"))}, r"modes is \['a', 'a'\]; expected mode names that differ"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG_BACKENDS)
def test_a_descriptor_checks_its_fields(fields: Mapping[str, Any], message: str) -> None:
    good: dict[str, Any] = {"name": "chip", "summary": "", "modes": (mode(),), "install_hint": ""}
    BackendDescriptor(**good)
    with pytest.raises(InvalidInput, match=message):
        BackendDescriptor(**{**good, **fields})


# -- the plugin of the cpu backend -------------------------------------------------------------------------------------


def test_the_cpu_plugin_names_the_versions_it_found() -> None:
    found = cpu_plugin.probe()
    assert found.usable
    assert found.reason.startswith("torch ")
    assert ", numba " in found.reason


@pytest.mark.parametrize("missing", [("torch",), ("numba",), ("torch", "numba")])
def test_the_cpu_plugin_names_what_to_install(monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(cpu_plugin, "find_spec", lambda name: None if name in missing else real(name))
    manager = PluginManager()
    manager.register(cpu_plugin)
    with pytest.raises(BackendUnavailable) as caught:
        select("cpu", "call", "", manager)
    assert f"not installed: {', '.join(missing)}" in str(caught.value)
    assert "pip install 'forebay[cpu]'" in str(caught.value)
