"""Typed settings with a known source: call > environment > file > default (clause B2).

The one module that reads environment variables, and the one that imports pydantic. pydantic is imported only when a
value has to be checked, so a host without it can still pass everything as explicit arguments.

Files: ``forebay.toml`` (top-level keys) and the table ``[tool.forebay]`` of ``pyproject.toml``, in the working
directory or the nearest folder above that has either. Where both are in one folder they are read together, and
``forebay.toml`` wins key by key. ``FOREBAY_CONFIG`` (or ``config=``) names one file to read instead.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, cast, get_args, get_type_hints

from forebay.specs.errors import InvalidSetting

Source = Literal["call", "environment", "file", "default"]

ENVIRONMENT_PREFIX: Final = "FOREBAY_"
CONFIG_VARIABLE: Final = "FOREBAY_CONFIG"
CONFIG_FILE: Final = "forebay.toml"
PROJECT_FILE: Final = "pyproject.toml"
TRUE_WORDS: Final = ("1", "true", "t", "yes", "y", "on")


def isolated_environment(folder: Path) -> dict[str, str]:
    """This process's environment for a child that runs pytest over the suite: without pytest's own variables, with assertions, without
    plugins found by themselves, and with the fixtures that hand the suite this runtime; hypothesis keeps its files in ``folder``."""
    dropped = ("PYTEST_", "HYPOTHESIS_", "PYTHONOPTIMIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "forebay.runtime.suite_plugin",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
    }


@contextmanager
def restored_environment() -> Iterator[None]:
    """Undo, at the end of the ``with`` block, every change that was made to this process's environment in it."""
    before = dict(os.environ)
    try:
        yield
    finally:
        _replace_environment(before)


@contextmanager
def isolated(folder: Path) -> Iterator[None]:
    """As :func:`isolated_environment` in this process, for children that are copies of it; undone at the end of the ``with`` block."""
    with restored_environment():
        _replace_environment(isolated_environment(folder))
        yield


def _replace_environment(variables: Mapping[str, str]) -> None:
    """Set what differs and no more: a variable that stays as it is must not be missing for a moment in another thread."""
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update({name: value for name, value in variables.items() if os.environ.get(name) != value})


@dataclass(frozen=True)
class Provenance:
    """Where a value came from; ``origin`` is the variable's name or ``path:line``, empty for a call or a default."""

    source: Source = "default"
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.source} {self.origin}".rstrip()


def user_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The platform's folder for a user's cached files, with ``forebay`` appended (XDG base directories on Linux)."""
    env = os.environ if environ is None else environ
    if sys.platform == "win32":
        base = env.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = env.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "forebay"


@dataclass(frozen=True)
class About:
    """What a setting means, and the smallest integer it takes."""

    doc: str
    at_least: int | None = None


KVType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Settings:
    """The resolved settings. Make them with :meth:`resolve`; ``Settings()`` alone holds the defaults."""

    backend: Annotated[str, About("backend and mode, NAME[:MODE], or auto")] = "auto"
    model: Annotated[str | None, About("model folder, GGUF file, known name, or a hub's org/name")] = None
    dtype: Annotated[KVType, About("element type of weights and activations")] = "float32"
    kv_dtype: Annotated[KVType | None, About("element type of the KV pool; none: that of dtype")] = None
    attention: Annotated[Literal["direct", "gather"], About("read KV in place, or gather it first")] = "direct"
    capture: Annotated[Literal["off", "auto", "required"], About("whether decode steps are replayed")] = "auto"
    arm: Annotated[Literal["eager", "hostfree", "captured"] | None, About("force one arm, over capture")] = None
    slots: Annotated[int, About("sequences decoded at once", at_least=1)] = 8
    block_size: Annotated[int, About("tokens per KV block", at_least=1)] = 16
    num_blocks: Annotated[int | None, About("KV blocks with the sink; none: enough for all slots", at_least=2)] = None
    max_len: Annotated[
        int | None, About("longest sequence in tokens; none: the model's limit, 32768 at most", at_least=1)
    ] = None
    threads: Annotated[int | None, About("worker threads of host kernels; none: one a core", at_least=1)] = None
    read_behind: Annotated[int, About("steps a result may be read behind the device", at_least=0)] = 0
    max_rewarm: Annotated[int, About("attempts to capture anew at one boundary (clause C8)", at_least=0)] = 3
    max_waiting: Annotated[int, About("requests that may wait before new ones are refused", at_least=1)] = 1024
    max_step_tokens: Annotated[int, About("tokens a step computes: decoding rows and prompt chunks", at_least=1)] = 512
    priority_steps: Annotated[int, About("engine steps that one step of priority is worth", at_least=1)] = 256
    prefix_reuse: Annotated[bool, About("reuse the KV of equal prompt beginnings")] = True
    preempt: Annotated[
        Literal["recompute", "offload"], About("KV of a preempted request: computed anew, or kept in host memory")
    ] = "recompute"
    offload_blocks: Annotated[
        int | None, About("KV blocks of host memory for preempted requests; none: as many as the pool has", at_least=0)
    ] = None
    prefill_on: Annotated[Literal["device", "cpu"], About("where prompts are computed")] = "device"
    seed: Annotated[int, About("from which the seeds of requests follow that name none", at_least=0)] = 0
    cache_dir: Annotated[Path, About("folder of fetched models")] = field(default_factory=user_cache_dir)
    traceback: Annotated[bool, About("show the traceback of errors")] = False
    provenance: Mapping[str, Provenance] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def resolve(
        cls,
        *,
        config: str | os.PathLike[str] | None = None,
        start_dir: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> Settings:
        """Collect every setting from its sources; ``overrides`` are the call's values and win.

        ``config`` names the one file to read, ``start_dir`` (default: the working directory) is where the search for a
        file begins, ``environ`` (default: the process's) holds the variables. An empty variable counts as not set.

        Raises:
            InvalidSetting: an unknown key, a value of the wrong type or outside what is allowed, or a file that cannot
                be read; names the source and the nearest known key.
        """
        env = os.environ if environ is None else environ
        settings = replace(cls(), cache_dir=user_cache_dir(env))
        for path in _config_files(config, env, Path.cwd() if start_dir is None else Path(start_dir)):
            settings = _updated(settings, _read_file(path))
        settings = _updated(settings, _read_environment(env))
        return settings.override(**overrides)

    def override(self, **values: Any) -> Settings:
        """New settings in which these values of a call replace whatever was there.

        Raises:
            InvalidSetting: as :meth:`resolve`.
        """
        return _updated(self, [(key, value, Provenance("call")) for key, value in values.items()])

    def source(self, key: str) -> Source:
        """Where the value of ``key`` came from."""
        return self.trace(key).source

    def origin(self, key: str) -> str:
        """The variable or the file and line that set ``key``; empty for a call or a default."""
        return self.trace(key).origin

    def trace(self, key: str) -> Provenance:
        """Source and origin of ``key``."""
        _check_known(key, Provenance("call"))
        return self.provenance.get(key, Provenance())

    def as_report(self) -> dict[str, dict[str, Any]]:
        """``{key: {"value", "source", "origin"}}`` as plain data, in the order of the fields."""
        report = {}
        for key in SETTINGS:
            value, trace = getattr(self, key), self.trace(key)
            shown = str(value) if isinstance(value, Path) else value
            report[key] = {"value": shown, "source": trace.source, "origin": trace.origin}
        return report


SETTINGS: Final[Mapping[str, Any]] = {
    key: hint for key, hint in get_type_hints(Settings, include_extras=True).items() if key != "provenance"
}
"""Every key with its annotated type."""


def traceback_wanted(*, config: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> bool:
    """Whether errors should be shown with their traceback, also when the settings themselves are at fault."""
    env = os.environ if environ is None else environ
    try:
        return Settings.resolve(config=config, environ=env).traceback
    except InvalidSetting:
        return env.get(_variable("traceback"), "").lower() in TRUE_WORDS


# -- checking one value ------------------------------------------------------------------------------------------------


def _variable(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.upper()


def _updated(settings: Settings, values: Iterable[tuple[str, Any, Provenance]]) -> Settings:
    """``settings`` with these values checked and put in place; a later value replaces an earlier one."""
    changes: dict[str, Any] = {}
    provenance = dict(settings.provenance)
    for key, value, trace in values:
        _check_known(key, trace)
        changes[key] = _checked(key, value, trace)
        provenance[key] = trace
    return replace(settings, **changes, provenance=provenance)


def _check_known(key: str, trace: Provenance) -> None:
    if key in SETTINGS:
        return
    if trace.source == "environment":
        given, known = trace.origin, [CONFIG_VARIABLE, *map(_variable, SETTINGS)]
    else:
        given, known = key, list(SETTINGS)
    nearest = difflib.get_close_matches(given, known, n=1)
    advice = f"did you mean '{nearest[0]}'?" if nearest else f"known: {', '.join(known)}"
    raise InvalidSetting(f"unknown setting '{given}' ({trace}); {advice}")


def _checked(key: str, value: Any, trace: Provenance) -> Any:
    """``value`` as the setting's type: text of the environment is parsed, other values must have the type already."""
    hint, about = get_args(SETTINGS[key])
    is_text = trace.source == "environment"
    if is_text and NoneType in get_args(hint) and value.lower() == "none":
        return None
    if isinstance(value, os.PathLike) and hint is not Path:
        value = os.fspath(value)
    try:
        from pydantic import Field, TypeAdapter, ValidationError
    except ImportError as error:
        if trace.source == "call":
            return value  # the function that takes an explicit argument checks it too
        raise InvalidSetting(
            f"{key} is set by {trace}, and reading that needs pydantic: pip install pydantic, or remove it and pass "
            f"{key} as an argument"
        ) from error
    adapter: TypeAdapter[Any] = TypeAdapter(
        hint if about.at_least is None else Annotated[hint, Field(ge=about.at_least)]
    )
    refusal = InvalidSetting(f"{key} = {value!r} ({trace}); expected {_allowed(hint, about)}")
    try:
        checked = adapter.validate_python(value, strict=not is_text and hint is not Path)
    except ValidationError:
        raise refusal from None
    if checked == "":
        raise refusal
    return checked


_WORDS: Final = {
    int: "an integer",
    str: "a string that is not empty",
    bool: "true or false",
    Path: "a path",
    NoneType: "none",
}


def _allowed(hint: Any, about: About) -> str:
    """The values a setting takes, in words."""
    parts = []
    for member in get_args(hint) if NoneType in get_args(hint) else (hint,):
        choices = " or ".join(f"'{choice}'" for choice in get_args(member))
        bound = f" of at least {about.at_least}" if member is int and about.at_least is not None else ""
        parts.append(choices or _WORDS[member] + bound)
    return " or ".join(parts)


# -- reading the sources -----------------------------------------------------------------------------------------------


def _read_environment(env: Mapping[str, str]) -> list[tuple[str, Any, Provenance]]:
    found: list[tuple[str, Any, Provenance]] = []
    for variable, text in sorted(env.items()):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable != CONFIG_VARIABLE and text != "":
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            found.append((key, text, Provenance("environment", variable)))
    return found


def _config_files(config: str | os.PathLike[str] | None, env: Mapping[str, str], start: Path) -> list[Path]:
    """The files to read, the weaker one first."""
    named = (Path(config), "config, call") if config is not None else None
    if named is None and env.get(CONFIG_VARIABLE):
        named = (Path(env[CONFIG_VARIABLE]), f"environment {CONFIG_VARIABLE}")
    if named is not None:
        path, origin = named
        if not path.is_file():
            raise InvalidSetting(f"no settings file '{path}' ({origin}); give the path of a {CONFIG_FILE}")
        if path.name == PROJECT_FILE and _project_table(path) is None:
            raise InvalidSetting(f"'{path}' ({origin}) has no table [tool.forebay]")
        return [path]
    start = start.resolve()
    for folder in (start, *start.parents):
        here = [path for path in (folder / PROJECT_FILE, folder / CONFIG_FILE) if path.is_file()]
        used = [path for path in here if path.name == CONFIG_FILE or _project_table(path) is not None]
        if used:
            return used
    return []


def _parse(path: Path) -> tuple[dict[str, Any], str]:
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), text
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidSetting(f"the settings file '{path}' cannot be read: {error}") from error


def _project_table(path: Path) -> dict[str, Any] | None:
    """``[tool.forebay]`` of a pyproject file, None where there is none."""
    tool = _parse(path)[0].get("tool")
    table = tool.get("forebay") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise InvalidSetting(f"tool.forebay in '{path}' is {table!r}; expected a table")
    return cast("dict[str, Any] | None", table)


def _read_file(path: Path) -> list[tuple[str, Any, Provenance]]:
    """Every key of one file. Relative paths in it are relative to its folder."""
    content, text = _parse(path)
    name = ""
    if path.name == PROJECT_FILE:
        name, content = "tool.forebay", _project_table(path) or {}
    found = []
    for key, value in content.items():
        line = _line_of(text, name, key)
        origin = f"{path}:{line}" if line is not None else f"{path} [{name}]" if name else str(path)
        found.append((key, _anchored(key, value, path.parent), Provenance("file", origin)))
    return found


def _anchored(key: str, value: Any, folder: Path) -> Any:
    """A relative ``cache_dir``, or a ``model`` that is a path and not a name, joined to the file's folder.

    A model is a path where something lies there, or where it is written as one (``./``, ``~``, ``/``); else it is a known model's
    name or a hub's ``org/name``.
    """
    if key not in ("cache_dir", "model") or not isinstance(value, str) or not value:
        return value
    try:
        path = folder / Path(value).expanduser()
        is_path = key == "cache_dir" or re.match(r"[./~\\]", value) is not None or path.exists()
    except (RuntimeError, OSError, ValueError) as error:  # a home that nobody has, a name too long, a NUL
        raise InvalidSetting(f"{folder}: {key} = {value!r}: {error}; write a path that can be") from error
    return str(path) if is_path else value


def _line_of(text: str, table: str, key: str) -> int | None:
    """The 1-based line that assigns ``key`` in ``table`` ("" for the top level), for error messages."""
    current = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            current = ".".join(part.strip().strip("\"'") for part in header[1].split("."))
        elif current == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return None
