"""The contract's shared tests, over the simulated device: every one that reaches the device through a fixture."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import tests.contract
from tests.contract import (
    test_addresses,
    test_decode,
    test_decode_bits,
    test_decode_inputs,
    test_door_rows,
    test_doors,
    test_host_values,
    test_invalid_blocks,
    test_layouts,
    test_lifetime,
    test_replay,
    test_row_operations,
    test_shadows,
    test_staging,
    test_traces,
    test_updates,
    test_violations,
    test_wrapped_memory,
    test_write_loc,
)
from tests.contract.test_violations import desk  # noqa: F401  (a fixture of the shared tests)

MODULES = (
    test_addresses,
    test_decode,
    test_decode_bits,
    test_decode_inputs,
    test_door_rows,
    test_doors,
    test_host_values,
    test_invalid_blocks,
    test_layouts,
    test_lifetime,
    test_replay,
    test_row_operations,
    test_shadows,
    test_staging,
    test_traces,
    test_updates,
    test_violations,
    test_wrapped_memory,
    test_write_loc,
)
ELSEWHERE = {
    "test_driver_surface": "is about ports and their defaults; it brings drivers of its own",
    "test_numpy_port": "collects these tests over the numpy port",
}
"""Files of the contract's tests that do not belong here, and why."""
DEVICE = {"backend", "desk", "pair", "shadow"}
"""Fixtures through which a test reaches the device."""


def shared_tests(module: ModuleType) -> dict[str, object]:
    """Tests of a module by a name of their own, those that take no device left out."""
    names = [name for name in vars(module) if name.startswith("test_") and callable(getattr(module, name))]
    found = {name: getattr(module, name) for name in names}
    prefix = module.__name__.rpartition(".")[2]
    return {
        f"{prefix}__{name.removeprefix('test_')}": test
        for name, test in found.items()
        if DEVICE & set(inspect.signature(test).parameters)
    }


for _module in MODULES:
    globals().update(shared_tests(_module))  # pytest collects them here a second time, over this folder's backend


def test_every_file_of_the_contracts_tests_is_here_or_said_not_to_be() -> None:
    files = {path.stem for folder in tests.contract.__path__ for path in Path(folder).glob("test_*.py")}
    assert files == {module.__name__.rpartition(".")[2] for module in MODULES} | ELSEWHERE.keys()
    assert all(shared_tests(module) for module in MODULES)
