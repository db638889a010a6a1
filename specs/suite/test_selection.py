"""Finding and choosing a backend: one broken plugin breaks nothing else, an explicit choice runs or fails (clauses B1 to B3, B5)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pluggy
import pytest

from forebay.specs import Backend, BackendUnavailable, InvalidInput, UnknownBackend, Unsupported
from forebay.specs.descriptor import HOOK_PROJECT, Availability, BackendDescriptor, ModeDescriptor
from forebay.specs.driver import Driver
from forebay.specs.suite.fixtures import OpenBackend

FOUND = Availability(usable=True, reason="a device")
ABSENT = Availability(usable=False, reason="no device found", hint="plug one in")
VENDORS = ("torch", "numba", "triton", "jax", "ttnn", "ttl")


class Broken:
    """A plugin whose import fails."""

    @pluggy.HookimplMarker(HOOK_PROJECT)
    def forebay_backend(self) -> BackendDescriptor:
        raise ModuleNotFoundError("No module named 'stale_dep'")


def forbidden(**_: Any) -> Any:
    raise RuntimeError("the driver was loaded")


def described(
    name: str, *, kind: Any = "accelerator", found: Availability = FOUND, load: Any = forbidden, **mode: Any
) -> BackendDescriptor:
    return BackendDescriptor(
        name, name, (ModeDescriptor("", kind, load, lambda: found, **mode),), f"pip install {name}"
    )


@pytest.fixture
def manager(internals: ModuleType) -> Any:
    """The installed plugins and one that is broken, under a name that nobody has installed."""
    made = internals.PluginManager.discover()
    made.register(Broken(), name="suite_broken", distribution="suite-broken-dist")
    return made


@pytest.mark.clause("B1")
@pytest.mark.refuses("B1", "B3")
@pytest.mark.case("F01")
def test_one_broken_plugin_breaks_nothing_else(
    open_backend: OpenBackend, backend_name: str, manager: Any, backend: Backend
) -> None:
    with open_backend(backend_name, manager=manager) as other:
        assert (other.name, other.mode) == (backend.name, backend.mode)
        assert other.to_host(other.to_device(np.arange(4))).tolist() == [0, 1, 2, 3]
    with pytest.raises(BackendUnavailable, match=r"suite-broken-dist.*stale_dep") as caught:
        open_backend("suite_broken", manager=manager)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.clause("B1")
def test_discovery_imports_no_vendor_library() -> None:
    """In a process of its own, for this one has opened a device."""
    code = (
        "import sys; from forebay.runtime.plugins import PluginManager; n = PluginManager.discover().names; "
        f"print(n, [v for v in {VENDORS} if v in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert found.strip().endswith(") []"), found


@pytest.mark.refuses("B3")
@pytest.mark.case("F01", "F03")
def test_an_explicit_choice_runs_or_fails(open_backend: OpenBackend, manager: Any) -> None:
    """An unknown name lists the known ones; an unusable one says why and what to do; nothing is taken in its place."""
    manager.register(described("suite_absent", found=ABSENT), distribution="suite-absent-dist")
    with pytest.raises(UnknownBackend, match=r"nosuch.*known backends:.*cpu"):
        open_backend("nosuch", manager=manager)
    with pytest.raises(BackendUnavailable, match=r"no device found.*plug one in|plug one in.*no device found"):
        open_backend("suite_absent", manager=manager)


@pytest.mark.refuses("B3")
@pytest.mark.case("F02")
def test_what_device_or_backend_lack_is_refused_before_anything_is_loaded(
    open_backend: OpenBackend, internals: ModuleType, manager: Any
) -> None:
    """The option, the need and what was found are named, for the device as for what the backend supports."""
    lacking = Availability.lacking("compute capability", need="9.0 or newer", found="8.9", hint="use backend 'cpu'")
    manager.register(described("suite_hopper", found=lacking), distribution="suite-hopper-dist")
    says = r"'suite_hopper'.*compute capability: needs 9.0 or newer, found 8.9.*use backend 'cpu'"
    with pytest.raises(BackendUnavailable, match=says):
        open_backend("suite_hopper", manager=manager)
    supports = {"kv_dtype": ("float32",), "head_dim": (64, 128), "features": ("lse",)}
    manager.register(described("suite_fast", supports=supports), distribution="suite-fast-dist")
    for needs, says in (
        ({"kv_dtype": "bfloat16"}, r"kv_dtype: needs 'bfloat16' \(call\), found 'float32'"),
        ({"head_dim": 96}, r"head_dim: needs 96 \(call\), found 64, 128"),
        ({"features": ("lse", "unified")}, r"features: needs 'unified' \(call\), found 'lse'"),
    ):
        with pytest.raises(Unsupported, match=says):
            open_backend("suite_fast", require=internals.Requirements.of(**needs), manager=manager)
    with pytest.raises(BackendUnavailable, match="the driver was loaded"):
        open_backend("suite_fast", require=internals.Requirements.of(head_dim=64), manager=manager)


@pytest.fixture
def two(internals: ModuleType, backend: Backend) -> Any:
    """Plugins ``preferred`` and ``second``, which ``auto`` takes in this order, each the judged backend's own driver; the first lacks
    ``head_dim`` 96. With them, in ``loaded``, the names of those whose driver was loaded."""
    _, judged = internals.PluginManager.discover().find(backend.name)
    load = next(mode.load for mode in judged.modes if mode.name == backend.mode)
    made, loaded = internals.PluginManager(), list[str]()

    def loads(name: str) -> Any:
        def loading() -> Any:
            loaded.append(name)
            return load()

        return loading

    for name, sizes in (("second", (64, 96)), ("preferred", (64, 128))):
        made.register(described(name, load=loads(name), supports={"head_dim": sizes}))
    return SimpleNamespace(manager=made, loaded=loaded)


def asking(runtime: ModuleType, folder: Path, source: str, name: str) -> tuple[Any, str]:
    """Settings in which ``source`` (none for ``default``) asks for the backend ``name``, and where they say that it stands."""
    file = folder / "forebay.toml"
    file.write_text(f'slots = 2\nbackend = "{name}"\n' if source == "file" else "slots = 2\n", encoding="utf-8")
    environ = {"FOREBAY_BACKEND": name} if source == "environment" else {}
    call = {"backend": name} if source == "call" else {}
    origin = {"file": f"{file}:2", "environment": "FOREBAY_BACKEND"}.get(source, "")
    return runtime.Settings.resolve(config=file, environ=environ, **call), origin


@pytest.mark.clause("B3", "B2")
@pytest.mark.case("F04")
@pytest.mark.parametrize("source", ["default", "file", "environment", "call"])
def test_auto_gives_way_to_a_need_and_says_so(
    open_backend: OpenBackend, runtime: ModuleType, internals: ModuleType, tmp_path: Path, two: Any, source: str
) -> None:
    """A platform's preference is nobody's order: where it lacks a need another is taken, with a note and the choice's source."""
    settings, origin = asking(runtime, tmp_path, source, "auto")
    for needs, name, notes in (
        ({}, "preferred", [("preferred", "")]),
        ({"head_dim": 64}, "preferred", [("preferred", "")]),
        (
            {"head_dim": 96},
            "second",
            [("preferred", "head_dim: needs 96 (call), found 64, 128"), ("second", "")],
        ),
    ):
        require = internals.Requirements.of(**needs)
        with open_backend(None, settings=settings, require=require, manager=two.manager) as chosen:
            told = chosen.selection
            assert (chosen.name, told.name, two.loaded.pop(), two.loaded) == (name, name, name, [])
            assert (told.requested, told.source, told.origin) == ("auto", source, origin)
            assert [(candidate.name, candidate.passed_over) for candidate in told.considered] == notes
            assert chosen.to_host(chosen.to_device(np.arange(4))).tolist() == [0, 1, 2, 3]


@pytest.mark.clause("B2")
@pytest.mark.refuses("B3")
@pytest.mark.case("F04")
@pytest.mark.parametrize("source", ["file", "environment", "call"])
def test_a_named_choice_does_not_give_way(
    open_backend: OpenBackend, runtime: ModuleType, internals: ModuleType, tmp_path: Path, two: Any, source: str
) -> None:
    """The same backend, named: it runs where it can, and what it lacks is an error that says who named it; nothing is loaded."""
    settings, origin = asking(runtime, tmp_path, source, "preferred")
    with pytest.raises(Unsupported) as caught:
        open_backend(None, settings=settings, require=internals.Requirements.of(head_dim=96), manager=two.manager)
    where = f"{source} {origin}".rstrip()
    assert f"backend 'preferred' ({where}) does not support what is required: head_dim: needs 96 (call)" in str(
        caught.value
    )
    assert two.loaded == []
    require = internals.Requirements.of(head_dim=64)
    with open_backend(None, settings=settings, require=require, manager=two.manager) as chosen:
        assert (chosen.name, chosen.selection.requested, chosen.selection.source) == ("preferred", "preferred", source)


@pytest.mark.clause("B3")
@pytest.mark.refuses("B3")
def test_auto_takes_no_simulated_device_and_says_why(open_backend: OpenBackend, internals: ModuleType) -> None:
    """``auto`` passes over what is absent, simulated or interpreted, and its error names each with its reason."""
    made = internals.PluginManager()
    made.register(described("absent", found=ABSENT))
    for kind in ("simulated", "interpreted", "reference"):
        made.register(described(kind, kind=kind))
    with pytest.raises(BackendUnavailable) as caught:
        open_backend("auto", manager=made)
    said = str(caught.value)
    assert "no device found" in said
    for kind in ("simulated", "interpreted", "reference"):
        assert f"its kind is {kind}" in said
    made.register(described("real"))
    with pytest.raises(BackendUnavailable, match="the driver was loaded"):
        open_backend("real", manager=made)


@pytest.mark.refuses("B5")
def test_a_name_registered_twice_is_an_error_that_names_both(open_backend: OpenBackend, internals: ModuleType) -> None:
    made = internals.PluginManager()
    for distribution in ("first-dist", "second-dist"):
        made.register(described("twice"), distribution=distribution)
    with pytest.raises(BackendUnavailable, match=r"first-dist.*second-dist"):
        open_backend("twice", manager=made)


@pytest.mark.clause("B2")
def test_the_call_goes_before_the_settings_and_the_choice_is_reported(
    open_backend: OpenBackend, backend_name: str, runtime: ModuleType, manager: Any
) -> None:
    """Settings that name another backend lose against the call, and what was chosen says where it came from."""
    settings = runtime.Settings().override(backend="nosuch")
    with open_backend(backend_name, settings=settings, manager=manager) as chosen:
        assert chosen.selection.source == "call"
        assert chosen.selection.requested == backend_name
    with pytest.raises(UnknownBackend, match="nosuch"):
        open_backend(None, settings=settings, manager=manager)


@pytest.mark.clause("B1")
@pytest.mark.parametrize("error", ["ImportError", "OSError", "SystemExit"])
def test_whatever_a_plugin_raises_breaks_nothing_else(
    internals: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """Installed beside the others, it raises on import: they are found as before, and its error is kept."""
    others = set(internals.PluginManager.discover().names)
    info = tmp_path / "suite_odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: suite-odd\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[forebay.backends]\nsuite_odd = suite_odd_plugin\n", encoding="utf-8")
    (tmp_path / "suite_odd_plugin.py").write_text(f"raise {error}('libodd.so cannot be opened')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = internals.PluginManager.discover()
    assert set(found.names) == others | {"suite_odd"}
    with pytest.raises(BackendUnavailable, match=rf"suite-odd 1\.0.*{error}: libodd") as caught:
        found.find("suite_odd")
    assert type(caught.value.__cause__).__name__ == error


@pytest.mark.refuses("B1")
def test_a_descriptor_of_another_name_is_broken(internals: ModuleType) -> None:
    manager = internals.PluginManager()
    manager.register(described("inner", load=lambda: None), name="outer")
    with pytest.raises(BackendUnavailable, match="'outer' and its descriptor 'inner'") as caught:
        manager.find("outer")
    assert isinstance(caught.value.__cause__, InvalidInput)


@pytest.mark.clause("B2")
def test_the_nearest_source_wins_and_is_the_one_reported(runtime: ModuleType, tmp_path: Path) -> None:
    """Default, then file, then environment, then call; each value says which of them set it."""
    file = tmp_path / "forebay.toml"
    file.write_text("slots = 2\nblock_size = 32\nmax_rewarm = 5\n", encoding="utf-8")
    environ = {"FOREBAY_SLOTS": "3", "FOREBAY_BLOCK_SIZE": "64"}
    settings = runtime.Settings.resolve(config=file, environ=environ, slots=4)
    won = {key: (getattr(settings, key), settings.source(key)) for key in ("slots", "block_size", "max_rewarm", "seed")}
    assert won == {
        "slots": (4, "call"),
        "block_size": (64, "environment"),
        "max_rewarm": (5, "file"),
        "seed": (0, "default"),
    }
    assert settings.origin("block_size") == "FOREBAY_BLOCK_SIZE"
    assert settings.origin("max_rewarm") == f"{file}:3"


@pytest.mark.refuses("B3")
def test_a_refusal_is_caused_by_what_the_probe_met(open_backend: OpenBackend, internals: ModuleType) -> None:
    cause = OSError("libchip.so.1: cannot open")
    manager = internals.PluginManager()
    manager.register(described("chip", found=replace(ABSENT, cause=cause)))
    with pytest.raises(BackendUnavailable, match="no device found") as caught:
        open_backend("chip", manager=manager)
    assert caught.value.__cause__ is cause


@pytest.mark.clause("B3")
def test_auto_asks_accelerators_before_the_host(open_backend: OpenBackend, internals: ModuleType) -> None:
    """Names come in order, ``cpu`` last although its name is first; each that fails to load is passed over with its reason."""
    asked: list[str] = []

    def loads(name: str) -> Any:
        def load() -> Any:
            asked.append(name)
            raise RuntimeError(f"{name} does not start")

        return load

    manager = internals.PluginManager()
    manager.register(described("cpu", load=loads("cpu"), kind="host"))
    for name in ("zeta", "delta"):
        manager.register(described(name, load=loads(name)))
    with pytest.raises(BackendUnavailable, match="cpu does not start"):
        open_backend("auto", manager=manager)
    assert asked == ["delta", "zeta", "cpu"]


@pytest.mark.clause("B5")
def test_a_driver_that_cannot_become_a_backend_is_closed(
    open_backend: OpenBackend, internals: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = create_autospec(Driver, instance=True)

    def fail(*_: Any, **__: Any) -> None:
        raise InvalidInput("its capabilities contradict each other")

    monkeypatch.setattr(Backend, "__init__", fail)
    manager = internals.PluginManager()
    manager.register(described("chip", load=lambda: driver))
    with pytest.raises(InvalidInput, match="contradict"):
        open_backend("chip", manager=manager)
    driver.close.assert_called_once_with()
