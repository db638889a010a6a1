"""An option for every setting, made from the settings themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, get_args

import typer

from forebay.runtime.cli.console import resolve_settings, setting_option
from forebay.runtime.settings import SETTINGS

GLOBAL: Final = ("traceback",)
"""Settings that are options of the program, in front of a command's name."""

_METAVARS: Final = {"model": "PATH|NAME", "backend": "NAME[:MODE]"}


def with_setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with options for all settings; it is called with its own arguments and the resolved ``settings``.

    Its first parameter has to be ``context``, and one has to be called ``settings``.
    """
    own = inspect.signature(command, eval_str=True).parameters
    keys = [key for key in SETTINGS if key not in GLOBAL]

    def with_settings(context: typer.Context, **given: Any) -> None:
        values = {key: given.pop(key) for key in keys}
        command(context, settings=resolve_settings(context, **values), **given)

    parameters = [*(p for name, p in own.items() if name != "settings"), *map(_parameter, keys)]
    keyword = [parameters[0], *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters[1:])]
    with_settings.__name__ = command.__name__
    with_settings.__doc__ = command.__doc__
    with_settings.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    with_settings.__annotations__ = {p.name: p.annotation for p in keyword}
    return with_settings


def _parameter(key: str) -> inspect.Parameter:
    """The option of one setting, None where it is not given; its value is checked with the settings."""
    hint = get_args(SETTINGS[key])[0]
    (kind,) = [member for member in get_args(hint) or (hint,) if member is not NoneType][:1]
    if kind is bool:
        name = key.replace("_", "-")
        doc = SETTINGS[key].__metadata__[0].doc
        option = typer.Option(f"--{name}/--no-{name}", help=doc, show_default=False)
        annotation: Any = Annotated[bool | None, option]
    elif kind is int:
        annotation = Annotated[int | None, setting_option(key, "N")]
    elif kind is Path:
        annotation = Annotated[Path | None, setting_option(key, "PATH")]
    else:
        annotation = Annotated[str | None, setting_option(key, _METAVARS.get(key) or "|".join(_choices(hint)))]
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _choices(hint: Any) -> list[str]:
    """The words of a ``Literal``, one that may be None too."""
    return [word for member in (hint, *get_args(hint)) for word in get_args(member) if isinstance(word, str)]
