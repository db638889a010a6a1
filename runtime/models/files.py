"""Small file work shared by the store: checksums, durable writes, checked copies."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Final

CHUNK_BYTES: Final = 2**20


def copy_stream(source: IO[bytes], target: IO[bytes], on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Copy ``source`` to ``target`` from where they stand; returns the SHA-256 of what was copied.

    ``on_bytes`` is called with the number of bytes copied so far.
    """
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(CHUNK_BYTES):
        target.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        on_bytes(done)
    return digest.hexdigest()


def sha256_of(file: Path) -> str:
    """The SHA-256 of ``file`` in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` as indented UTF-8 JSON."""
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def flush_to_disk(file: Path) -> None:
    """Wait until the content of ``file`` would survive a power cut, so that a rename after it publishes no empty file."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
