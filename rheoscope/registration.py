"""Makes transformers know the model types of rheoscope, without loading it before somebody does.

Where transformers' Auto classes are there already they are told at once; else as soon as they are imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AUTO_CLASSES = "transformers.models.auto.modeling_auto"
HOMES = ("rheoscope.nets", "rheoscope.surgery.edited_model")  # each registers its model type when it is imported


def register() -> None:
    """Register our model types, now or when the Auto classes are imported."""
    if AUTO_CLASSES in sys.modules:
        _import_homes()
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _import_homes() -> None:
    for home in HOMES:
        importlib.import_module(home)


class _WhenImported(MetaPathFinder):
    """Finds the Auto classes once, where the finders after it find them, and has their loader tell us."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AUTO_CLASSES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


class _Then(Loader):
    """A loader that registers our model types after it has loaded."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self.loader
        _import_homes()
