"""The check of a TPU host."""

from __future__ import annotations

from typing import Final

from forebay.hardware.checking.plan import Check

CHECK: Final = Check(
    machine="a TPU host",
    package="forebay.hardware.tpu",
    backend="tpu",
    dry_backend="tpu:xla",
    dry="DRY RUN on the host, by XLA or with Pallas interpreted: nothing here was measured on, or says anything of, a device.",
    parts=("facts", "kernels", "tokens", "suite", "faults", "suite-full", "bandwidth", "overhead"),
    timing=("bandwidth", "overhead"),
    must_pass=("facts", "kernels", "tokens", "suite", "faults"),
    may_lack={"tokens": "a host without tokenizers and safetensors can open no model"},
    shares={"bandwidth": 0.27, "overhead": 0.12},
    caps={"facts": 0.1, "kernels": 0.12, "tokens": 0.2, "suite": 0.25, "faults": 0.25},
    beside=1,  # a TPU belongs to one process
)
