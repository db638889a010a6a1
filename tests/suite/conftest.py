"""Fixtures of the tests of the suite: small suites, and backends that were installed from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.selection.fakes import Site
from tests.suite.small import Small, every_clause, make_small

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


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """A small suite that sim passes."""
    made = make_small(tmp_path / "small")
    made.add("test_every.py", every_clause())
    return made


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed distributions: sim under other names, with limits it declares, one absent and one broken."""
    folder = tmp_path_factory.mktemp("site")
    site = Site(folder)
    for name, declared in (
        ("limited", "head_dims=(8, 64, 128), sinks=False"),
        ("narrow", "head_dims=(8, 32)"),
        ("silent", "head_dims=(64, 128)"),
    ):
        site.install(f"forebay-{name}", {name: LIMITED.format(name=name, declared=declared)}, version="2.5")
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
    site.install("core-dist", {"core": core_only})
    site.install("away-dist", {"away": absent})
    site.install("broken-dist", {"broken": broken})
    site.install("plain-dist", {"plain": numpy_alone})
    (folder / "tests").symlink_to(Path(__file__).parents[1])
    return folder
