"""Seeds a fault into a process: modules are imported from patched source."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import decode_source, find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from forebay.specs.errors import InvalidInput
from forebay.specs.faults.catalogue import Fault, Patch

NAMESPACE = "forebay."


class SeededLoader(SourceFileLoader):
    """Compiles a module from its source with patches applied; nothing of it is cached."""

    def __init__(self, name: str, path: str, patches: Sequence[Patch]) -> None:
        super().__init__(name, path)
        self._patches = tuple(patches)

    def get_code(self, fullname: str) -> CodeType:
        """The code of the patched source; raises InvalidInput where a patch does not apply."""
        source = decode_source(self.get_data(self.path))
        for patch in self._patches:
            source = patch.apply(source)
        # A kernel language may compile the text that ``inspect`` finds, which is the file's. An entry without a time of change stays.
        linecache.cache[self.path] = (len(source), None, source.splitlines(keepends=True), self.path)
        return compile(source, self.path, "exec", dont_inherit=True)


class SeededFinder(MetaPathFinder):
    """Finds the modules that a fault patches, in front of everybody else."""

    def __init__(self, fault: Fault) -> None:
        self._patches: dict[str, list[Patch]] = {}
        for patch in fault.patches:
            self._patches.setdefault(patch.module, []).append(patch)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """The module's own spec with a loader that patches; None for modules the fault leaves alone."""
        patches = self._patches.get(fullname)
        if patches is None:
            return None
        spec = _found_by_others(self, fullname, path)
        if spec is None or spec.origin is None:
            raise InvalidInput(f"{fullname}: no such module; the fault no longer applies, adapt it")
        spec.loader = SeededLoader(fullname, spec.origin, patches)
        return spec


def seed(fault: Fault) -> None:
    """Make this process import Forebay with ``fault`` in it. What was imported of Forebay so far is forgotten."""
    sys.meta_path.insert(0, SeededFinder(fault))
    for name in [name for name in sys.modules if name.startswith(NAMESPACE)]:
        del sys.modules[name]
    # At once, because pytest puts its own finder in front: it rewrites the asserts of every module of a distribution with a plugin.
    for module in dict.fromkeys(patch.module for patch in fault.patches):
        import_module(module)


def check_applies(fault: Fault) -> None:
    """Raise InvalidInput unless every patch of ``fault`` applies to its module and the result compiles."""
    sources: dict[str, str] = {}
    for patch in fault.patches:
        if patch.module not in sources:
            spec = find_spec(patch.module)
            if spec is None or spec.origin is None:
                raise InvalidInput(f"{patch.module}: no such module; fault {fault.id} no longer applies, adapt it")
            sources[patch.module] = Path(spec.origin).read_text(encoding="utf-8")
        sources[patch.module] = patch.apply(sources[patch.module])
    for module, source in sources.items():
        try:
            compile(source, module, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise InvalidInput(f"fault {fault.id}: {module} does not compile any more: {error}") from error


def _found_by_others(own: MetaPathFinder, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is not own:
            spec = finder.find_spec(fullname, path)
            if spec is not None:
                return spec
    return None
