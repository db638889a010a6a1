"""The whole cross product of families, rope kinds, prompts, block sizes, arms and ways of attention, against transformers.

``python -m tests.families.full`` takes about a quarter of an hour on one core, lists every divergence and fails where one is not
allowed. Words after it pick the cases whose names contain one of them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from transformers.utils import logging

from forebay.runtime import load_model, open_backend
from tests.families.comparison import ALLOWED_GAP, ALLOWED_SHARE, Divergence, divergences, every_plan
from tests.families.zoo import build, every_case, prompts, references


def main(words: list[str]) -> int:
    """Compare every case; returns the exit status."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    cases = [case for case in every_case() if not words or any(word in str(case) for word in words)]
    found: list[Divergence] = []
    with open_backend("cpu", threads=1) as backend, tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            folder = build(case, Path(scratch) / str(case))
            wrong = list(divergences(case, load_model(folder), references(folder, prompts()), every_plan(), backend))
            print(f"{case}: {len(wrong)} of {len(every_plan()) * len(prompts())} sequences diverge", flush=True)
            for divergence in wrong:
                print(f"  {divergence}", flush=True)
            found += wrong
    sequences = len(cases) * len(every_plan()) * len(prompts())
    refused = sum(divergence.gap >= ALLOWED_GAP for divergence in found)
    print(f"{sequences} sequences, {len(found)} diverge, {refused} of them where the choice was clear")
    return int(not sequences or refused > 0 or len(found) > ALLOWED_SHARE * sequences)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
