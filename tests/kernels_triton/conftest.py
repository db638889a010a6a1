"""These tests run in Triton's interpreter, which a process chooses before it first imports triton."""

from __future__ import annotations

import os
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError(
        "triton was imported without TRITON_INTERPRET=1: run tests/kernels_triton in a process of its own"
    )
os.environ["TRITON_INTERPRET"] = "1"
