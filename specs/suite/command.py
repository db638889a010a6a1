"""The command line of a pytest that runs the suite and nothing else, whatever the machine's own configuration says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from forebay.specs.errors import InvalidInput

FOLDER: Final = Path(__file__).resolve().parent
PLUGINS: Final = ("forebay.specs.suite.plugin", "hypothesispytest")
"""All that pytest loads beside its own parts: what else is installed must not decide how a backend is judged."""
SHOWN: Final = 10
"""Failures that are told in full, where nobody asks for more or less."""


def suite_arguments(folder: Path, tests: Sequence[str] = ()) -> list[str]:
    """pytest's arguments for the suite, or some files and tests of it, free of any configuration but an empty one in ``folder``.

    ``folder`` gets that configuration. The environment has its part: pytest must find no plugins and no arguments there.

    Raises:
        InvalidInput: a test is not named as a record names it, FILE or FILE::TEST.
    """
    for name in tests:
        file = name.partition("::")[0]
        if Path(file).name != file or not (FOLDER / file).is_file():
            raise InvalidInput(f"got the test {name!r}, expected FILE::TEST as records name it, or a FILE of the suite")
    configuration = folder / "pytest.ini"
    configuration.write_text("[pytest]\n", encoding="utf-8")
    arguments = ["-q", "--no-header", "--tb=no", "-r", "", "-c", str(configuration), "--rootdir", str(FOLDER)]
    arguments += ["-p", "no:cacheprovider", "--strict-markers", "--import-mode=importlib"]
    for plugin in PLUGINS:
        arguments += ["-p", plugin]
    return [*arguments, *(str(FOLDER / name) for name in tests or [""])]
