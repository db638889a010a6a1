"""Models by their id on a hub (``org/name``), through ``huggingface_hub``: its protocol, its credentials, its cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from forebay.specs.errors import InvalidModel, ModelUnavailable

from .progress import ProgressCallback, no_progress

HUB_FOLDER: Final = "hub"
FILES: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""What a model folder has. Nothing else is fetched: no pickled weights, no code."""

_ID: Final = re.compile(
    r"(?P<repository>\w[\w.-]{0,95}/\w[\w.-]{0,95})(?:@(?P<revision>[\w.][\w./-]{0,254}))?", re.ASCII
)


def is_hub_id(name: str) -> bool:
    """Whether ``name`` can be a model's id on a hub: ``org/name``, with a revision as ``org/name@revision``."""
    return _ID.fullmatch(name) is not None


def fetch_from_hub(
    name: str,
    *,
    cache_dir: Path,
    endpoint: str | None = None,
    progress: ProgressCallback | None = None,
    force: bool = False,
) -> Path:
    """The folder of the model ``name`` in ``cache_dir``; only what is not there yet is downloaded.

    Where the hub cannot be reached, a model that is whole in ``cache_dir`` is taken as it is. ``endpoint``: the hub's
    address; None is the library's own choice. ``force`` downloads everything anew.

    Raises:
        InvalidModel: ``name`` is no hub id.
        ModelUnavailable: no library, no such model, no permission, or no connection and nothing in the cache.
    """
    parts = _ID.fullmatch(name)
    if parts is None:
        raise InvalidModel(f"{name!r} is no hub id; expected org/name or org/name@revision")
    # Imported here because it takes long, and only an installation with transformers has it.
    try:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import tqdm
    except ImportError as error:
        raise ModelUnavailable(
            f"{name!r} is neither a folder here nor a known model, and to ask a hub for it huggingface_hub must be "
            "installed: pip install 'forebay[hf]'"
        ) from error
    report = progress or no_progress
    report(0, None, "locate")
    try:
        folder = huggingface_hub.snapshot_download(
            parts["repository"],
            revision=parts["revision"],
            cache_dir=cache_dir / HUB_FOLDER,
            endpoint=endpoint,
            allow_patterns=list(FILES),
            force_download=force,
            tqdm_class=_silent_bar(tqdm, report),
        )
    # The library raises its own errors, those of its HTTP library, of its transfer library and the system's.
    except Exception as error:
        raise ModelUnavailable(_reason(name, cache_dir, endpoint, error)) from error
    return Path(folder)


def _reason(name: str, cache_dir: Path, endpoint: str | None, error: Exception) -> str:
    """One line on what was tried and what to do."""
    from huggingface_hub import errors

    hub = f"the hub at {endpoint}" if endpoint else "the hub"
    what = f"{name!r} is neither a folder here nor a known model"
    if isinstance(error, errors.GatedRepoError):
        return f"{name!r} is gated: ask for access on its page of {hub}, then log in with 'hf auth login'"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{hub} has the model of {name!r} without that revision; leave @revision out for the newest"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{what}, and {hub} does not have it; check the name, or log in with 'hf auth login' if it is private"
    # What went wrong first is what the user can do something about.
    first = error.__cause__ or error
    reason = f"{type(first).__name__}: {' '.join(str(first).split())[:200]}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{what}; {hub} could not be reached or failed, and {cache_dir / HUB_FOLDER} does not hold it whole "
            f"({reason}); check the network, or give a folder"
        )
    return f"{name!r} could not be fetched from {hub} ({reason}); try again, or give a folder"


def _silent_bar(base: Callable[..., Any], report: ProgressCallback) -> Any:
    """The library's progress bar without its display: bytes go to ``report``, other counts nowhere."""

    class Bar(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            # There are bars of files, of bytes received and of bytes written; the last one has this name.
            self._counts = options.get("unit") == "B" and options.get("name") == "huggingface_hub.snapshot_download"
            self._done = int(options.get("initial") or 0)
            super().__init__(*args, **(options | {"disable": True}))

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and n:
                self._done += int(n)
                report(self._done, int(self.total) if self.total else None, "download")
            return None

    return Bar
