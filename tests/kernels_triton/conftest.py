"""These tests interpret Triton, which has to be settled before triton is imported."""

from __future__ import annotations

import os
import sys

import pytest

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(
        "triton was imported before TRITON_INTERPRET=1 was set, so its kernels cannot be interpreted in this process; "
        "run tests/kernels_triton in a process of its own, or set the variable for the whole run"
    )
os.environ["TRITON_INTERPRET"] = "1"

from forebay.kernels.triton.interpreter import mend  # the variable comes first

mend()
