"""Attention in float64 over a paged pool, a query at a time, and how near a kernel has to come to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kernels_pallas.cases import FIRST_BLOCK, Call

Array = npt.NDArray[Any]

HALF_UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""What rounding a result of the type adds, relative to it (bfloat16 has 8 bits, float16 has 11)."""


def attention(call: Call) -> tuple[Array, Array]:
    """Output ``[B, T, Hq, Dv]`` and LSE ``[B, T, Hq]``, float64; a key that is not finite spoils the queries that see it alone."""
    batch, query_len, query_heads, _ = call.q.shape
    out = np.zeros((batch, query_len, query_heads, call.case.format.value_dim))
    lse = np.full((batch, query_len, query_heads), -np.inf)
    for b in range(batch):
        for t in range(query_len):
            end = max(int(call.visible[b]) - (query_len - 1 - t), 0)
            if end > 0:
                out[b, t], lse[b, t] = _one(call, b, t, max(end - call.case.window, 0), end)
    return out, lse


def _one(call: Call, b: int, t: int, start: int, end: int) -> tuple[Array, Array]:
    case, form = call.case, call.case.format
    blocks, heads, block_size, _ = call.pages.shape
    most = case.table_len * block_size
    keys = np.zeros((max(min(end, most) - start, 0), heads, form.key_dim))
    values = np.zeros((len(keys), heads, form.value_dim))
    for i in range(len(keys)):
        block, offset = int(call.table[b, (start + i) // block_size]), (start + i) % block_size
        if FIRST_BLOCK <= block < blocks:
            row = call.pages[block, :, offset].astype(np.float64)
            keys[i] = row[:, : form.key_dim]
            values[i] = row[:, form.value_offset : form.value_offset + form.value_dim]
    missing = end - max(start, most)  # zeros, with a logit of 0
    q = call.q[b, t].astype(np.float64).reshape(heads, -1, form.key_dim)
    logits = np.einsum("hgd,khd->hgk", q, keys) * case.scale
    if case.softcap is not None:
        logits = case.softcap * np.tanh(logits / case.softcap)
    first = np.full((*logits.shape[:2], 1), 0.0 if missing > 0 else -np.inf)
    sink = np.full_like(first, -np.inf) if call.sinks is None else call.sinks.reshape(first.shape).astype(np.float64)
    peak = np.concatenate((logits, first, sink), -1).max(-1, keepdims=True)
    weights = np.exp(logits - peak)
    total = weights.sum(-1, keepdims=True) + max(missing, 0) * np.exp(first - peak) + np.exp(sink - peak)
    out = np.einsum("hgk,khd->hgd", weights, values) / total
    return out.reshape(-1, form.value_dim), (peak + np.log(total)).reshape(-1)


def complaint(call: Call, out: Array, lse: Array) -> str:
    """What is wrong with a result, in words; "" if it is right.

    Weights are float32 whatever the pages are, so the bound is tight: weights rounded to bfloat16 would be off by 1e-3.
    """
    want_out, want_lse = attention(call)
    if out.shape != want_out.shape or lse.shape != want_lse.shape:
        return f"shapes {out.shape} and {lse.shape}, not {want_out.shape} and {want_lse.shape}"
    out, lse = out.astype(np.float64), lse.astype(np.float64)
    if (wrong := np.argwhere(np.isnan(out) != np.isnan(want_out))).size:
        return f"NaN at {len(wrong)} elements of the output where there is none, or none where there is: {wrong[0]}"
    if (wrong := np.argwhere(np.isnan(lse) != np.isnan(want_lse))).size:
        return f"NaN at {len(wrong)} elements of the LSE where there is none, or none where there is: {wrong[0]}"
    if (wrong := np.argwhere(np.isneginf(lse) != np.isneginf(want_lse))).size:
        return f"LSE -inf at {len(wrong)} elements where it is not, or not where it is: {wrong[0]}"
    largest = np.abs(call.pages[np.isfinite(call.pages)]).max(initial=1.0)
    near = 5e-5 * largest if call.case.dtype == "bfloat16" else 5e-6 * largest
    allowed = near + HALF_UNIT[call.case.q_dtype] * np.abs(want_out)
    if (wrong := np.argwhere(np.abs(out - want_out) > allowed)).size:
        worst = float(np.nanmax(np.abs(out - want_out)))
        return f"{len(wrong)} elements of the output are off, by up to {worst:.2e}; the first is {wrong[0]}"
    with np.errstate(invalid="ignore"):
        off = np.abs(lse - want_lse) > 1e-5 * (1 + np.abs(want_lse))
    if (wrong := np.argwhere(off & np.isfinite(want_lse))).size:
        return f"{len(wrong)} elements of the LSE are off; the first is {wrong[0]}"
    return ""
