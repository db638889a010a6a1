"""The check of an H200 machine."""

from __future__ import annotations

from typing import Final

from forebay.hardware.checking.plan import Check

CHECK: Final = Check(
    machine="an H200 machine",
    package="forebay.hardware.h200",
    backend="cuda",
    dry_backend="cuda:interpret",
    dry="DRY RUN in Triton's interpreter: nothing here was measured on, or says anything of, a device.",
    parts=("facts", "suite", "suite-full", "tokens", "faults", "memory", "bandwidth", "steps"),
    timing=("bandwidth", "steps"),
    must_pass=("facts", "suite", "tokens", "faults", "memory"),
    may_lack={"memory": "a machine without the memory checker compares values all the same"},
    shares={"bandwidth": 0.2, "steps": 0.14},
    beside=4,
)
