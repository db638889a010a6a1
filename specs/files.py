"""Files that a user names: what may be written to, how it is written, and how much is read of one.

A name may be anything: a folder, a pipe, a device. Only regular files are read, replaced and deleted, and symlinks to such.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from forebay.specs.errors import InvalidInput

_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def output_at(path: Path, what: str) -> Path:
    """Where a text for ``path`` is to be written, absolute: a symlink's target. Nothing is touched.

    Args:
        path: as the user gave it; a regular file, a symlink to one, or a name that nothing has.
        what: how errors name it.

    Raises:
        InvalidInput: it is something else, its folder does not exist, or it cannot be written there.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    except OSError as error:
        raise InvalidInput(f"{what}: {error.strerror}; name another file") from error
    if mode is not None and not stat.S_ISREG(mode):
        raise InvalidInput(f"{what}: is {_kind(mode)}, expected a regular file, or a name that is free; name another")
    if not target.parent.is_dir():
        folder = target.parent if path.is_symlink() else path.parent
        raise InvalidInput(f"{what}: no folder {folder}; make it first")
    if not os.access(target.parent, os.W_OK) or not (mode is None or os.access(target, os.W_OK)):
        raise InvalidInput(f"{what}: cannot be written here; change its permissions, or name another file")
    return target


def write_text(path: Path, text: str) -> None:
    """Make or replace a file at once, so that nobody reads half of it; what has no form in UTF-8 is escaped.

    The file keeps its permissions. ``path`` is one that :func:`output_at` gave.

    Raises:
        OSError: it cannot be written; then the old file is as it was.
    """
    beside = path.with_name(f".forebay-{secrets.token_hex(8)}")
    try:
        with beside.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        if path.exists():
            beside.chmod(stat.S_IMODE(path.stat().st_mode))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_regular(path: Path, limit: int, what: str) -> bytes:
    """The bytes of a regular file, or of one that a symlink leads to; neither a pipe nor a device is opened.

    Args:
        path: the file.
        limit: bytes that it may have at most.
        what: how errors name it.

    Raises:
        InvalidInput: it is something else, is larger, or cannot be read.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise InvalidInput(f"{what}: is {_kind(found.st_mode)}, expected a regular file; copy it into one")
        data = b""
        if found.st_size <= limit:
            with path.open("rb") as file:
                data = file.read(limit + 1)  # its size may have been less than there is to read
    except OSError as error:
        raise InvalidInput(f"{what}: {error}") from error
    size = max(found.st_size, len(data))
    if size > limit:
        raise InvalidInput(f"{what}: has {size} bytes or more, expected {limit} at most; is it the right file?")
    return data


def _kind(mode: int) -> str:
    return next((name for holds, name in _KINDS if holds(mode)), "no regular file")
