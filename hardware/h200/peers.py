"""Attention of others on contiguous or paged KV of the same sizes, where it can be imported; for a device alone."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

FLASH_BLOCK: Final = 256
"""Tokens of a block of flash-attention's paged KV: it takes multiples of this."""

Calls = dict[str, Callable[[], object]]


def peers(batch: int, context: int, kv_heads: int, group: int, dim: int) -> tuple[Calls, dict[str, str]]:
    """Calls by name, and why others are absent; one query a row, ``[batch, kv_heads * group, 1, dim]``, bfloat16."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q = torch.randn(batch, kv_heads * group, 1, dim, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(batch, context, kv_heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    heads_first = (k.transpose(1, 2), v.transpose(1, 2))
    # Never the plain one, which would repeat the KV for every query head.
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]

    def sdpa() -> object:
        with sdpa_kernel(fused):
            return scaled_dot_product_attention(q, *heads_first, enable_gqa=True)

    ready: Calls = {"torch SDPA, contiguous KV": sdpa}
    absent: dict[str, str] = {}
    if find_spec("torch.nn.attention.flex_attention") is None:
        absent["FlexAttention, contiguous KV"] = "not present"
    else:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention)
        ready["FlexAttention, contiguous KV"] = lambda: compiled(q, *heads_first, enable_gqa=True)
    if find_spec("flash_attn") is None:
        absent["flash-attention, paged KV"] = "not present"
    else:
        from flash_attn import flash_attn_with_kvcache

        shape = (batch * context // FLASH_BLOCK, FLASH_BLOCK, kv_heads, dim)
        table = torch.randperm(shape[0], dtype=torch.int32, device="cuda").reshape(batch, context // FLASH_BLOCK)
        lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        ready["flash-attention, paged KV"] = lambda: flash_attn_with_kvcache(
            q.transpose(1, 2), k.view(shape), v.view(shape), cache_seqlens=lengths, block_table=table
        )
    return ready, absent
