"""Fixtures of the tests of the suite: small suites, and backends that were installed from elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.selection.fakes import Site
from tests.suite.small import CAPTURED, Outcome, Small, every_clause, make_small

LIMITED = """
from dataclasses import replace


def limited(**declared):
    from forebay.backends.sim.driver import SimDriver

    driver = SimDriver()
    driver.capabilities = replace(driver.capabilities, **declared)
    return driver


@hookimpl
def forebay_backend():
    return describe("{name}", load=lambda: limited({declared}), kind="simulated")
"""


DYING = """
import os


def dying():
    from forebay.backends.sim.driver import SimDriver

    class Dying(SimDriver):
        def stage(self, *arguments, **options):
            {act}

    return Dying()


@hookimpl
def forebay_backend():
    return describe("{name}", load=dying, kind="simulated")
"""


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """A small suite that sim passes."""
    made = make_small(tmp_path / "small")
    made.add("test_every.py", every_clause())
    return made


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed distributions: sim under other names, with limits, or dying; one absent, one broken."""
    folder = tmp_path_factory.mktemp("site")
    site = Site(folder)
    for name, declared in (
        ("limited", "head_dims=(8, 64, 128), sinks=False, max_query_len=2"),
        ("narrow", "head_dims=(8, 32)"),
        ("silent", "head_dims=(64, 128)"),
        ("rounding", "tf32=True"),
    ):
        site.install(f"forebay-{name}", {name: LIMITED.format(name=name, declared=declared)}, version="2.5")
    for name, act in (("dying", "os._exit(7)"), ("killed", "os.kill(os.getpid(), 9)")):
        site.install(f"forebay-{name}", {name: DYING.format(name=name, act=act)})
    absent = """
    @hookimpl
    def forebay_backend():
        absent = Availability(usable=False, reason="no device found", hint="plug one in")
        return describe("away", probe=lambda: absent)
    """
    broken = """
    def explode():
        raise OSError("libdevice.so: no such file")


    @hookimpl
    def forebay_backend():
        return describe("broken", load=explode)
    """
    numpy_alone = """
    @hookimpl
    def forebay_backend():
        from tests.contract.numpy_port import NumpyPort

        return describe("plain", load=NumpyPort, kind="reference")
    """
    core_only = """
    @hookimpl
    def forebay_backend():
        from tests.suite.core_only import CoreDriver

        return describe("core", load=CoreDriver)
    """
    dodging = """
    from functools import partial


    @hookimpl
    def forebay_backend():
        from tests.suite.dodging import WAYS, DodgingDriver

        modes = tuple(ModeDescriptor(way, "simulated", partial(DodgingDriver, way), probe) for way in WAYS)
        return BackendDescriptor("dodging", "a fake", modes, "pip install it")
    """
    site.install("dodging-dist", {"dodging": dodging})
    site.install("core-dist", {"core": core_only})
    site.install("away-dist", {"away": absent})
    site.install("broken-dist", {"broken": broken})
    site.install("plain-dist", {"plain": numpy_alone})
    (folder / "tests").symlink_to(Path(__file__).parents[1])
    return folder


RICH = """
@pytest.mark.clause("D8")
@pytest.mark.case("Z1")
def test_head_size(backend: Backend) -> None:
    with scene(backend, (5,), head_dim=16) as s:
        s.check()


@pytest.mark.clause("D9")
def test_sinks(backend: Backend) -> None:
    with scene(backend, (5,)) as s:
        s.check(sinks=np.zeros(4, np.float32))


@pytest.mark.clause("D4")
def test_long_query(backend: Backend) -> None:
    with scene(backend, (5, 3), query_len=3) as s:
        s.check()


@pytest.mark.beyond_core  # so that smoke asks another
@pytest.mark.clause("D5")
@pytest.mark.parametrize("n", [1, 2])
def test_wrong(backend: Backend, n: int) -> None:
    assert n == 2
"""
WAIVERS = """
[[waiver]]
test = "test_rich.py::test_wrong[1]"
clause = "D5"
device = "simulated accelerator"
reason = "it splits by <batch> & co"
expiry = {expiry}
"""


@dataclass(frozen=True)
class Records:
    """A small suite, and records of runs of it that ended differently, by name; ``said`` is what each run printed."""

    small: Small
    record: dict[str, dict[str, Any]]
    said: dict[str, Outcome]


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory, elsewhere: Path) -> Records:
    """``good`` (refusals and a used waiver), ``bad`` (the same failure without the waiver), ``crashed`` (its process died), ``away``
    (its backend cannot start) and ``smoke``."""
    small = make_small(tmp_path_factory.mktemp("records") / "small")
    shown = re.sub(
        r"@pytest.mark.clause(.+)\n(?=def )", r"@pytest.mark.clause\1\n@pytest.mark.smoke\1\n", every_clause(), count=1
    )
    small.add("test_every.py", shown)
    small.add("test_captured.py", CAPTURED)
    small.add("test_rich.py", RICH)
    expiry = datetime.now(UTC).date() + timedelta(days=2)
    (small.work / "waivers.toml").write_text(WAIVERS.format(expiry=expiry), encoding="utf-8")
    waived = ("--waivers", "waivers.toml")
    runs: dict[str, tuple[str, tuple[str, ...]]] = {
        "good": ("limited", waived),
        "smoke": ("limited", ("--profile", "smoke")),
        "bad": ("limited", ()),
        "crashed": ("dying", waived),
        "away": ("away", ()),
    }
    made = {
        name: small.record(*arguments, backend=backend, path=elsewhere) for name, (backend, arguments) in runs.items()
    }
    return Records(
        small, {name: record for name, (_, record) in made.items()}, {n: said for n, (said, _) in made.items()}
    )
