"""The digest that ties a record to its own content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest_of(record: Mapping[str, Any]) -> str:
    """SHA-256 over a record's content without its own ``digest``: JSON with sorted keys and no blanks."""
    content = {key: value for key, value in record.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
