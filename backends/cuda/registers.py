"""Launch options that a device needs so that every value of a kernel finds a register, by the kind of compiler.

The gate (:mod:`.compile_gate`) compiles with them, and a device launches with them. Nothing here depends on lengths, on the number of
rows or on strides: rows of one attention are always launched alike, so that their bits stay those of the row alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

MOST_REGISTERS: Final = 255
"""Registers that a thread of NVIDIA's can name."""
REGISTER_FILE: Final = 65536
"""Registers of one of NVIDIA's multiprocessors."""
WARP: Final = 32
MERGE_REGISTERS: Final = 128
"""More than the merging of splits takes, few enough for four programs a multiprocessor."""
WIDE_WARPS: Final = 8
"""Warps of a decode of several queries whose rows have more than 192 columns."""
K: Final = 1
"""Where the keys stand among the arguments of ``decode_kernel``."""


def launch_options(kernel: str, args: Sequence[Any], constants: Mapping[str, Any], compiler: str) -> dict[str, int]:
    """Options that replace those among ``constants`` where ``kernel`` is launched with ``args``.

    ``compiler`` is Triton's name of it: ``cuda`` or ``hip``.

    NVIDIA's assembler aims at several programs a multiprocessor, and for that spills a few bytes of most decodes, and of the merging
    of splits where two tiles cover a row; told how many registers there may be, it does not. Products in a type of two bytes for one
    query do well as they are, with fewer registers. Keys of two bytes beside float32 queries are held twice, as loaded and as
    float32, so that no second stage of them fits; nor does one of several queries in float32, or in two small tiles a row, and 256
    columns of these take 8 warps. On AMD the float32 accumulators of LATENT's 512 columns take the registers of 4 warps, of which a
    thread has twice as many as of 8.
    """
    if kernel == "reduce_kernel":
        return {"maxnreg": MERGE_REGISTERS} if compiler == "cuda" and constants["V_REST"] else {}
    if kernel != "decode_kernel":
        return {}
    width = constants["D_MAIN"] + constants["D_REST"]
    if compiler == "hip":
        return {"num_warps": 4} if constants["IN_FLOAT32"] and width > 256 else {}
    narrow = constants["USE_DOT"] and not constants["IN_FLOAT32"]
    if narrow and constants["SINGLE_QUERY"] and width <= 192:
        return {}
    several = not constants["SINGLE_QUERY"] and constants["USE_DOT"]
    warps = WIDE_WARPS if several and narrow and width > 192 else constants["num_warps"]
    options = {"num_warps": warps, "maxnreg": min(MOST_REGISTERS, REGISTER_FILE // (WARP * warps))}
    mixed = constants["IN_FLOAT32"] and args[K].dtype != torch.float32
    if mixed or (several and 64 < width <= 128 and (constants["IN_FLOAT32"] or constants["D_REST"])):
        options["num_stages"] = 1
    return options
