"""How the simulated device is found, opened and described (clauses B1, B3, B4, B5)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.backends.sim import plugin
from forebay.runtime import open_backend
from forebay.runtime.plugins import PluginManager
from forebay.runtime.selection import select
from forebay.specs import InvalidInput, KVGeometry
from forebay.specs.driver import DELEGABLE, is_delegated
from forebay.specs.errors import BackendUnavailable, InvalidSetting
from tests.backends_sim.opened import open_sim

IMPORTS = """
import json, sys
from forebay.runtime import open_backend
import numpy as np
with open_backend("sim") as b:
    b.to_host(b.to_device(np.ones(2, np.float32)) + 1)
print(json.dumps(sorted({"torch", "numba", "jax", "triton"} & set(sys.modules))))
"""


@pytest.mark.clause("B1")
def test_it_is_found_as_every_backend_is() -> None:
    found = PluginManager.discover().find("sim")
    assert found[0].target == "forebay.backends.sim.plugin"
    assert [(mode.name, mode.kind) for mode in found[1].modes] == [("", "simulated")]
    with open_backend("sim") as b:
        assert (b.name, b.info["device"]) == ("sim", "simulated accelerator")


@pytest.mark.clause("B1")
def test_it_imports_no_vendor_library(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "HOME": str(tmp_path)},
        check=True,
    )
    assert json.loads(done.stdout) == []


@pytest.mark.clause("B3")
def test_auto_never_takes_it() -> None:
    """Not even where there is nothing else."""
    manager = PluginManager()
    manager.register(plugin)
    with pytest.raises(BackendUnavailable, match=r"sim: its kind is simulated: auto takes an accelerator"):
        select("auto", "call", "", manager)
    selection, _ = select("auto", "call", "", PluginManager.discover())
    passed_over = {candidate.name: candidate.passed_over for candidate in selection.considered}
    assert selection.name != "sim"
    assert passed_over["sim"] == "its kind is simulated: auto takes an accelerator, else cpu"


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"recapture": True}, InvalidSetting, "takes no option 'recapture'.*did you mean 'recapture_at_boundary'"),
    ({"recapture_at_boundary": 1}, InvalidInput, "recapture_at_boundary: got 1"),
    ({"memory_limit": 0}, InvalidInput, "memory_limit: got 0"),
    ({"memory_limit": 1.5}, InvalidInput, "memory_limit: got 1.5"),
    ({"queue_limit": None}, InvalidInput, "queue_limit: got None"),
    ({"stuck_timeout": -1}, InvalidInput, "stuck_timeout: got -1"),
    ({"stuck_timeout": float("nan")}, InvalidInput, "stuck_timeout: got nan"),
    ({"inject": {"kind": "lost", "at_launch": 1}}, InvalidInput, "inject: got .*expected a list of mappings"),
    ({"inject": ["lost"]}, InvalidInput, "inject: got 'lost', expected mappings"),
    (
        {"inject": [{"kind": "burnt", "at_launch": 1}]},
        InvalidInput,
        "got kind 'burnt', expected one of lost, stuck, mem",
    ),
    ({"inject": [{"kind": "lost"}]}, InvalidInput, r"lost got \[\], expected one of at_launch"),
    (
        {"inject": [{"kind": "torn", "at_launch": 1}]},
        InvalidInput,
        r"torn got \['at_launch'\], expected one of at_upload",
    ),
    ({"inject": [{"kind": "lost", "at_launch": 1, "for": 2}]}, InvalidInput, r"lost got \['at_launch', 'for'\]"),
    (
        {"inject": [{"kind": "memory", "at_capture": 0}]},
        InvalidInput,
        "memory at_capture got 0, expected an int from 1",
    ),
    ({"inject": [{"kind": "lost", "at_launch": True}]}, InvalidInput, "lost at_launch got True"),
]


@pytest.mark.clause("B3")
@pytest.mark.parametrize(("options", "error", "says"), BAD_OPTIONS, ids=lambda x: str(x)[:40])
def test_options_it_does_not_take_are_refused_by_name(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        open_sim(**options)


@pytest.mark.clause("B4", "B6")
def test_its_capabilities_are_those_it_has() -> None:
    """It delegates nothing, and makes every pool it claims."""
    for recapture in (False, True):
        with open_sim(recapture_at_boundary=recapture) as b:
            cap = b.capabilities
            assert (cap.deferred, cap.capture, cap.addressable, cap.traces_run) == (True, True, True, False)
            assert cap.recapture_at_boundary is recapture
            assert not [name for name in DELEGABLE if is_delegated(b._driver, name)]
            for layout in cap.layouts:
                value_dim = 4 if layout == "LATENT" else None
                for dtype in cap.kv_dtypes:
                    b.release(b.create_pool(KVGeometry(3, 2, 1, 6, dtype=dtype, value_head_dim=value_dim), layout))


@pytest.mark.clause("B5")
def test_closing_gives_back_every_byte() -> None:
    """Also what an array that is still held names, a trace's arena, and what is queued and never done."""
    b = open_sim()
    driver = b._driver
    x = b.buffer("x", np.ones(4, np.float32))
    pool = b.create_pool(KVGeometry(3, 2, 1, 6))
    held = b.to_device(np.ones(4, np.float32)) + 1
    shown = held.allocation
    assert driver.info["live_bytes"] >= 4 * 4 * 2 + 2 * 3 * 2 * 6 * 4
    b.close()
    assert driver.info["live_bytes"] == 0
    assert driver.info["allocations"] == driver.info["frees"]
    assert not x.live
    assert not any(buffer.live for buffer in pool.buffers)
    assert np.isnan(shown.data.view(np.float32)).all()
