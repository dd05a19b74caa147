"""rheoscope shows the flow inside a transformer and lets you act on it.

    view = rheoscope.load("HuggingFaceTB/SmolLM2-135M")
    corpus = rheoscope.read("text.txt", tokenizer=view.tokenizer, window=512)
    run = rheoscope.measure(view, corpus)
    run.report("run.html")

Names are imported when they are first used: `import rheoscope` itself loads neither torch nor transformers. It makes
our model types known to transformers' Auto classes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rheoscope.registration import register

if TYPE_CHECKING:
    from rheoscope.corpus import Corpus as Corpus
    from rheoscope.corpus import read as read
    from rheoscope.errors import Refused as Refused
    from rheoscope.errors import RheoscopeError as RheoscopeError
    from rheoscope.instruments.measure import measure as measure
    from rheoscope.models.check import check as check
    from rheoscope.models.load import load as load
    from rheoscope.models.view import ModelView as ModelView
    from rheoscope.run import Run as Run
    from rheoscope.surgery.edited_model import save_edited as save_edited
    from rheoscope.surgery.edits import edited as edited
    from rheoscope.surgery.restructure import restructured as restructured

_HOMES = {
    "Corpus": "corpus",
    "read": "corpus",
    "Refused": "errors",
    "RheoscopeError": "errors",
    "measure": "instruments.measure",
    "check": "models.check",
    "load": "models.load",
    "ModelView": "models.view",
    "Run": "run",
    "edited": "surgery.edits",
    "restructured": "surgery.restructure",
    "save_edited": "surgery.edited_model",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rheoscope' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__


register()
