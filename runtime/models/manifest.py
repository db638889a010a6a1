"""The provenance record of a fetched model folder, which also tells a complete folder from any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from forebay.specs.errors import InvalidModel

from .files import flush_to_disk, sha256_of, write_json
from .json_fields import read_json_object
from .registry import KnownModel

MANIFEST_FILE: Final = "MANIFEST.json"
_FORMAT: Final = 1
"""Raised whenever the conversion would write something else, so that folders of an older one are made anew."""


def write_manifest(folder: Path, model: KnownModel) -> None:
    """Write the record of ``model`` over all files of ``folder``: source and licence, and size and SHA-256 of each file."""
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST_FILE)
    for file in files:
        flush_to_disk(file)
    record = _identity(model) | {
        "licence": model.licence,
        "summary": model.summary,
        "conversion": "GGUF dequantised to float32 safetensors",
        "files": {file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in files},
    }
    write_json(folder / MANIFEST_FILE, record)
    flush_to_disk(folder / MANIFEST_FILE)


def is_complete(folder: Path, model: KnownModel) -> bool:
    """Whether ``folder`` is what a fetch of ``model`` leaves. Compares the record and the files' sizes, not their content."""
    try:
        record = read_json_object(folder / MANIFEST_FILE)
        identity = _identity(model)
        if {key: record.get(key) for key in identity} != identity:
            return False
        files: dict[str, dict[str, Any]] = record["files"]
        return bool(files) and all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (InvalidModel, OSError, LookupError, TypeError, AttributeError, ValueError):
        return False


def _identity(model: KnownModel) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "name": model.name,
        "source": {
            "package": model.requirement,
            "wheel_sha256": model.wheel_sha256,
            "member": model.gguf_member,
            "member_sha256": model.gguf_sha256,
        },
    }
