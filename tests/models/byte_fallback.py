"""A tokenizer of the SentencePiece kind: what it has no piece for falls back to tokens of one byte."""

from __future__ import annotations

from typing import Final

import tokenizers
from tokenizers import decoders, models, normalizers

from forebay.runtime.models.tokenizer import Tokenizer

PIECES: Final = ("<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁hi", "</s>")
BYTES: Final = [1 + byte for byte in (0x0A, 0x41, 0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0xFF)] + [257, 258, 260, 261, 262]
"""Ids whose random sequences hold whole, cut and broken characters, and pieces between them."""


def byte_fallback_tokenizer() -> Tokenizer:
    """With the decoder of Llama 2's ``tokenizer.json``; id 262 is in the model's vocabulary only."""
    vocabulary = {piece: i for i, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token=PIECES[0], fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, vocab_size=len(PIECES) + 1)
