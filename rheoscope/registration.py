"""Makes transformers know the model types of rheoscope, without loading anything before somebody asks for one.

transformers' mapping from model types to configurations is told which types there are, at once or when it is imported.
That happens in the middle of much else of transformers, where nothing of ours can be imported yet; the mapping imports
a type when it is looked up, and that registers the model class as well.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

CONFIGURATIONS = "transformers.models.auto.configuration_auto"
# Model types and the modules that register them when they are imported.
HOMES = {"rheoscope_decoder": "rheoscope.nets", "rheoscope_edited": "rheoscope.surgery.edited_model"}


def register() -> None:
    """Let transformers know our model types, now or when its mapping is imported."""
    if CONFIGURATIONS in sys.modules:
        _tell(sys.modules[CONFIGURATIONS])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _tell(module: ModuleType) -> None:
    mapping = module.CONFIG_MAPPING
    if not hasattr(mapping, "knows_rheoscope"):
        mapping.__class__ = _late(type(mapping))


def _late(kind: type) -> type:
    """A class of the mapping that says that it has our types, and imports them when they are looked up."""

    class Late(kind):
        knows_rheoscope = True

        def __contains__(self, key: object) -> bool:
            return key in HOMES or super().__contains__(key)

        def __getitem__(self, key: str) -> Any:
            if key in HOMES:
                importlib.import_module(HOMES[key])
            return super().__getitem__(key)

    return Late


class _WhenImported(MetaPathFinder):
    """Finds the mapping's module once, where the finders after it find it, and has its loader tell us."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != CONFIGURATIONS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


class _Then(Loader):
    """A loader that tells us when it has loaded."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self.loader
        _tell(module)
