"""The runtime's fixtures for the shared suite: the objects of this runtime, for a session that runs the suite and no other.

The suite imports nothing of the runtime: :mod:`.suite_entry` loads this module, or whoever starts a process that finds no plugins by
itself. Vendor libraries and the engine are imported once a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from forebay.runtime import Engine, Model
    from forebay.specs import Backend

NO_ARGUMENTS = ("read_behind", "max_rewarm", "seed")
"""Settings that are no argument of an Engine."""


def pytest_configure(config: pytest.Config) -> None:
    """Stop a run that would judge a backend, or a mode of one, that nobody has: some tests never open it.

    Raises:
        pytest.UsageError: with the names and modes that there are.
    """
    requested: str | None = config.getoption("--backend", default=None)
    if requested is None or config.getoption("collectonly"):  # a record of another machine's backend can be verified
        return
    from forebay.runtime.plugins import PluginManager
    from forebay.runtime.selection import check_known
    from forebay.specs.errors import ForebayError

    try:
        check_known(requested, "--backend", PluginManager.discover())
    except ForebayError as error:
        raise pytest.UsageError(f"--backend {requested}: nothing was judged: {error}") from error


@pytest.fixture(scope="session")
def open_backend() -> Callable[..., Backend]:
    """``open_backend(NAME[:MODE], **options)``, free of the machine's own settings."""
    from forebay.runtime import Settings
    from forebay.runtime import open_backend as opened

    def open_plainly(name: str, **options: Any) -> Backend:
        return opened(name, **{"settings": Settings(), **options})

    return open_plainly


@pytest.fixture(scope="session")
def runtime() -> ModuleType:
    """The runtime's public names."""
    import forebay.runtime

    return forebay.runtime


@pytest.fixture(scope="session")
def internals() -> ModuleType:
    """The parts of the engine that clauses speak of: ledger, Lanes, prefix cache, plugin manager."""
    from forebay.runtime import suite_parts

    return suite_parts


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A seeded random model of two layers, D 64, four query heads on one KV head, float32."""
    from forebay.runtime import load_model
    from forebay.runtime.models.suite_model import write_suite_model

    return load_model(write_suite_model(tmp_path_factory.mktemp("suite") / "model"), dtype="float32")


@pytest.fixture
def make_engine(model: Model) -> Iterator[Callable[..., Engine]]:
    """``make_engine(backend, **options)``: engines on the suite's model, closed when the test ends.

    Every setting is the default or one of the options, never the machine's; prefixes are not shared unless asked for.
    """
    from forebay.runtime import Engine, Settings

    with ExitStack() as stack:

        def make(backend: Backend, **options: Any) -> Engine:
            options = {"prefix_reuse": False, "slots": 3, "max_len": 96, **options}
            settings = Settings().override(**{k: options.pop(k) for k in NO_ARGUMENTS if k in options})
            return stack.enter_context(Engine(model, backend, settings=settings, **options))

        yield make
