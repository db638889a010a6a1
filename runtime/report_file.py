"""A report as a file: JSON, or Prometheus text where the name ends in ``.prom``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from forebay.specs.errors import InvalidInput

METRICS_SUFFIX: Final = ".prom"


@dataclass(frozen=True)
class ReportFile:
    """Where a report goes; made by :meth:`at`."""

    path: Path

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Self:
        """A file that can be written, as far as can be known before it is; nothing is written yet.

        Raises:
            InvalidInput: a folder, or a file in a folder that is not there or not writable.
            Unsupported: a ``.prom`` file without ``prometheus_client``.
        """
        file = Path(path)
        folder = file.parent
        if file.is_dir() or not file.name:
            raise InvalidInput(f"the report file '{path}' is a folder; give the name of a file")
        if not folder.is_dir():
            raise InvalidInput(f"the report file '{path}': there is no folder '{folder}'; make it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InvalidInput(f"the report file '{path}': the folder '{folder}' is not writable")
        if file.suffix == METRICS_SUFFIX:
            from .metrics import metrics_text  # noqa: F401  # needs a package that may be missing: better known before the work
        return cls(file)

    def write(self, report: Mapping[str, Any]) -> None:
        """Write it, or leave what is there as it was.

        Raises:
            InvalidInput: it cannot be written.
        """
        if self.path.suffix == METRICS_SUFFIX:
            from .metrics import metrics_text

            text = metrics_text(report)
        else:
            text = json.dumps(report, indent=2, default=str, ensure_ascii=False) + "\n"
        # Beside its place, so that the move is one act of one file system; a name of its own, so that two writers do not mix.
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(self.path)
        except OSError as error:
            raise InvalidInput(f"the report file '{self.path}' cannot be written: {error}") from error
        finally:
            part.unlink(missing_ok=True)
