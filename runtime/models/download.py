"""Downloading one file over HTTP so that a cut costs only what was not yet received."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import requests

from forebay.specs.errors import ModelUnavailable

from .package_index import without_credentials
from .progress import ProgressCallback

_ATTEMPTS: Final = 4
_TIMEOUT_S: Final = (20.0, 60.0)
_FIRST_PAUSE_S: Final = 0.5
_CHUNK_BYTES: Final = 2**15
"""What a cut may lose: the HTTP library keeps back nothing but a chunk that was not filled."""


class NotServed(ModelUnavailable):
    """The server could not be reached or did not answer with the file: another way of getting it may still work."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a response carries: ``start`` is the offset of its first byte, ``total`` the size of the whole file, if known."""

    start: int
    total: int | None


def download(url: str, part: Path, progress: ProgressCallback) -> None:
    """Complete the file ``part`` with what it lacks of ``url``; its present bytes are kept if the server can continue there.

    A connection that breaks is taken up again a few times, each time after a longer pause; bytes received count as a
    new start.

    Raises:
        NotServed: no byte was received by this call.
        ModelUnavailable: it broke off again and again; ``part`` holds what was received, and a later call continues
            there.
    """
    received_before, failures = _size(part), 0
    while True:
        size_before = _size(part)
        try:
            _transfer(url, part, progress)
        except requests.RequestException as error:
            failures = 1 if _size(part) > size_before else failures + 1
            refused = isinstance(
                error, (requests.HTTPError, requests.exceptions.SSLError, requests.exceptions.InvalidURL)
            )
            if refused or failures >= _ATTEMPTS:
                raise _failure(url, part, error, nothing_new=_size(part) <= received_before) from error
            time.sleep(_FIRST_PAUSE_S * 2 ** (failures - 1))
        else:
            return


def _failure(url: str, part: Path, error: Exception, *, nothing_new: bool) -> ModelUnavailable:
    # requests wraps the errors of its layers in one another; the innermost says what happened.
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
    reason = without_credentials(f"download of {url} failed: {error}")
    if nothing_new:
        return NotServed(f"{reason}; check the network")
    return ModelUnavailable(f"{reason}; {_size(part)} bytes are kept: run the same command again to continue")


def _transfer(url: str, part: Path, progress: ProgressCallback) -> None:
    have = _size(part)
    # Without "identity" a server may compress, and ranges would count compressed bytes.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT_S) as response:
        if response.status_code == requests.codes.requested_range_not_satisfiable:
            _settle_unsatisfiable(part, response)
            return
        response.raise_for_status()
        answer = _read_answer(response, have)
        with part.open("r+b" if part.exists() else "wb") as stream:
            stream.seek(answer.start)
            stream.truncate()
            _receive(response, stream, answer, progress)


def _read_answer(response: requests.Response, have: int) -> _Answer:
    """Where the body starts: after the bytes we have if the server obeyed the range, else at the beginning."""
    length = response.headers.get("Content-Length", "")
    size = int(length) if length.isdecimal() else None
    if response.status_code != requests.codes.partial_content:
        return _Answer(0, size)
    span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
    if span is None or int(span[1]) != have:
        given = response.headers.get("Content-Range")
        raise requests.exceptions.InvalidHeader(f"asked for bytes from {have}, answered with Content-Range {given!r}")
    return _Answer(have, int(span[2]) if span[2] != "*" else None)


def _receive(response: requests.Response, stream: IO[bytes], answer: _Answer, progress: ProgressCallback) -> None:
    done = answer.start
    progress(done, answer.total, "download")
    for chunk in response.iter_content(_CHUNK_BYTES):
        stream.write(chunk)
        done += len(chunk)
        progress(done, answer.total, "download")
    if answer.total is not None and done < answer.total:
        raise requests.ConnectionError(f"the connection ended after {done} of {answer.total} bytes")


def _settle_unsatisfiable(part: Path, response: requests.Response) -> None:
    """No bytes lie behind ours: the part is complete, or is not a part of this file and must be started anew."""
    if response.headers.get("Content-Range", "").strip() == f"bytes */{_size(part)}":
        return
    part.unlink()
    raise requests.ConnectionError("the part on disk does not fit the file served; starting again")


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
