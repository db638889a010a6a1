"""Distributions whose metadata lead nowhere or cannot be read (clause B1)."""

from __future__ import annotations

import pytest

from forebay.runtime.plugins import PluginManager
from forebay.specs.errors import BackendUnavailable
from tests.selection.fakes import Site


@pytest.mark.clause("B1")
def test_an_entry_point_that_leads_nowhere_is_broken(site: Site) -> None:
    site.install("lost-chip", {}, metadata="[forebay.backends]\nlost = nowhere.plugin\nodd = not a module!\n")
    manager = PluginManager.discover()
    with pytest.raises(BackendUnavailable, match="No module named 'nowhere'"):
        manager.find("lost")
    with pytest.raises(BackendUnavailable, match="'odd' cannot be used"):
        manager.find("odd")
    assert manager.find("cpu")[1].name == "cpu"


@pytest.mark.clause("B1")
def test_damaged_metadata_of_one_distribution_spares_the_others(site: Site) -> None:
    site.install("torn-chip", {}, metadata="[forebay.backends]\nno equals sign here\n")
    site.install_good("good-chip", "good")
    manager = PluginManager.discover()
    assert manager.find("good")[0].distribution == "good-chip"
    with pytest.raises(BackendUnavailable, match="torn-chip"):
        manager.find("torn-chip")


@pytest.mark.clause("B1")
def test_entry_points_that_are_no_text_spare_the_others(site: Site) -> None:
    """Where the group stands in them the distribution is a broken plugin; where it does not they are nobody's concern here."""
    site.install("latin-chip", {}, metadata=b"[forebay.backends]\n# caf\xe9\nlatin = nowhere\n")
    site.install("latin-tool", {}, metadata=b"[console_scripts]\n# caf\xe9\ntool = nowhere:main\n")
    (site.path / "latin_name-1.0.dist-info").mkdir()
    (site.path / "latin_name-1.0.dist-info" / "METADATA").write_bytes(b"Metadata-Version: 2.1\nName: caf\xe9\n")
    (site.path / "latin_name-1.0.dist-info" / "entry_points.txt").write_text("[forebay.backends]\nodd = nowhere\n")
    site.install_good("good-chip", "good")
    manager = PluginManager.discover()
    assert manager.names == ("cpu", "cuda", "good", "latin-chip", "odd", "sim", "tpu")
    with pytest.raises(BackendUnavailable, match="UnicodeDecodeError"):
        manager.find("latin-chip")
