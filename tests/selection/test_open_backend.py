"""Opening a backend: its report, its options, its end (clauses B2, B5)."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime.selection import open_backend, select
from forebay.runtime.settings import Settings
from forebay.specs.descriptor import Availability
from forebay.specs.driver import Driver
from forebay.specs.errors import BackendUnavailable, InvalidInput, InvalidSetting
from tests.selection.fakes import USABLE, Loader, cpu, descriptor, manager_of, mode


def considered(selection: Any) -> dict[str, str]:
    return {candidate.name: candidate.passed_over for candidate in selection.considered}


# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("B2")
@pytest.mark.parametrize("source", ["call", "environment", "file", "default"])
def test_the_backend_says_what_was_asked_and_where(tmp_path: Path, source: str) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text('backend = "cpu"\n' if source == "file" else "")
    settings = Settings.resolve(
        start_dir=tmp_path, environ={"FOREBAY_BACKEND": "cpu"} if source == "environment" else {}
    )
    with open_backend("cpu" if source == "call" else None, settings=settings, manager=manager_of(cpu())) as backend:
        found = backend.selection
    assert (found.requested, found.source) == ("auto" if source == "default" else "cpu", source)
    assert found.origin == {"environment": "FOREBAY_BACKEND", "file": f"{file}:1"}.get(source, "")
    assert (found.name, found.mode, found.distribution, found.version) == ("cpu", "", "cpu-dist", "1.0")


@pytest.mark.clause("B2")
@pytest.mark.case("F03")
def test_the_later_of_two_choices_is_the_one_that_runs(tmp_path: Path) -> None:
    manager = manager_of(cpu(), descriptor("other"))
    settings = Settings.resolve(start_dir=tmp_path, environ={}, backend="cpu").override(backend="other")
    with open_backend(settings=settings, manager=manager) as backend:
        assert (backend.name, backend.selection.requested) == ("other", "other")
    with open_backend("cpu", settings=settings, manager=manager) as backend:
        assert backend.name == "cpu"


def test_open_backend_finds_the_configuration_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forebay.toml").write_text('backend = "filed"\n')
    manager = manager_of(cpu(), descriptor("filed"), descriptor("exported"))
    with open_backend(manager=manager) as backend:
        assert (backend.name, backend.selection.source) == ("filed", "file")
    monkeypatch.setenv("FOREBAY_BACKEND", "exported")
    with open_backend(manager=manager) as backend:
        assert (backend.name, backend.selection.source) == ("exported", "environment")
    with open_backend("cpu", manager=manager) as backend:
        assert (backend.name, backend.selection.source) == ("cpu", "call")


# -- opening and closing -----------------------------------------------------------------------------------------------


def test_options_reach_the_driver(tmp_path: Path) -> None:
    loader = Loader()
    open_backend("cpu", manager=manager_of(cpu(load=loader)), threads=3, queue=2).close()
    assert loader.drivers[0].options == {"threads": 3, "queue": 2}


def test_the_threads_setting_reaches_the_driver_and_a_call_replaces_it(tmp_path: Path) -> None:
    loader = Loader()
    manager = manager_of(cpu(load=loader), descriptor("bare", mode(load=lambda: Loader()())))
    settings = Settings.resolve(start_dir=tmp_path, environ={"FOREBAY_THREADS": "2"})
    open_backend("cpu", settings=settings, manager=manager).close()
    open_backend("cpu", settings=settings, manager=manager, threads=1).close()
    assert [driver.options["threads"] for driver in loader.drivers] == [2, 1]
    with pytest.raises(InvalidSetting) as caught:
        open_backend("bare", settings=settings, manager=manager)
    assert str(caught.value) == (
        "backend 'bare' takes no option 'threads' (environment FOREBAY_THREADS); its options: none"
    )


def test_an_unknown_option_lists_the_accepted_ones() -> None:
    loader = Loader()
    with pytest.raises(InvalidSetting) as caught:
        open_backend("cpu", manager=manager_of(cpu(load=loader)), thread=3)
    assert str(caught.value) == (
        "backend 'cpu' takes no option 'thread' (call); its options: threads, queue; did you mean 'threads'?"
    )
    assert loader.drivers == []


def test_a_loader_that_takes_anything_gets_anything() -> None:
    taken: dict[str, Any] = {}

    def load(**options: Any) -> Driver:
        taken.update(options)
        return Loader()()

    open_backend("cpu", manager=manager_of(cpu(load=load)), anything=1).close()
    assert taken == {"anything": 1}


def test_an_option_value_the_driver_refuses_is_its_own_error() -> None:
    def load(*, threads: int) -> Driver:
        raise InvalidInput(f"threads is {threads}; expected at least 1")

    with pytest.raises(InvalidInput, match="threads is 0"):
        open_backend("cpu", manager=manager_of(cpu(load=load)), threads=0)


@pytest.mark.clause("B5")
def test_close_closes_the_driver_once() -> None:
    loader = Loader()
    with open_backend("cpu", manager=manager_of(cpu(load=loader))) as backend:
        assert loader.drivers[0].closed == 0
    assert loader.drivers[0].closed == 1
    backend.close()
    assert loader.drivers[0].closed == 1


@pytest.mark.clause("B5")
@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_a_driver_is_closed_when_it_cannot_become_a_backend(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(driver: Driver, selection: Any) -> None:
        raise error

    monkeypatch.setattr("forebay.specs.backend.Backend", fails)
    loader = Loader()
    with pytest.raises(type(error)):
        open_backend("cpu", manager=manager_of(cpu(load=loader)))
    assert loader.drivers[0].closed == 1


@pytest.mark.clause("B5")
def test_nothing_keeps_what_a_failing_load_had_made() -> None:
    class Memory:
        pass

    held: list[weakref.ref[Memory]] = []

    def fails() -> Driver:
        memory = Memory()
        held.append(weakref.ref(memory))
        raise OSError("device fell off the bus")

    manager = manager_of(cpu(load=fails))
    with pytest.raises(BackendUnavailable):
        open_backend("cpu", manager=manager)
    gc.collect()
    assert held[0]() is None


def test_something_else_than_a_driver_is_refused() -> None:
    wrong: Any = lambda: "driver"  # noqa: E731
    with pytest.raises(
        BackendUnavailable, match=r"'cpu' \(cpu-dist\) loaded 'driver'; expected a forebay.specs.driver.Driver"
    ):
        open_backend("cpu", manager=manager_of(cpu(load=wrong)))


def test_selecting_probes_only_what_was_asked_for() -> None:
    def never() -> Availability:
        raise AssertionError("probed a backend nobody asked for")

    manager = manager_of(cpu(probe=USABLE), descriptor("cuda", mode(probe=never)))
    assert select("cpu", "call", "", manager)[0].name == "cpu"
