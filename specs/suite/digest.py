"""Digests that tie a record to the suite that made it, and a record to its own content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any


def suite_hash() -> str:
    """SHA-256 over the names and bytes of the suite's modules and of the contract, in the order of their names."""
    sources = {path.name: path.read_bytes() for path in Path(__file__).parent.glob("*.py")}
    sources["clauses.toml"] = resources.files("forebay.specs").joinpath("clauses.toml").read_bytes()
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(f"{name} {len(sources[name])}\n".encode())
        digest.update(sources[name])
    return digest.hexdigest()


def digest_of(record: Mapping[str, Any]) -> str:
    """SHA-256 over a record's content without its own ``digest``: JSON with sorted keys and no blanks."""
    content = {key: value for key, value in record.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
