"""What the catalogue rows of the sinks dataset have in common."""

from __future__ import annotations

from rheoscope.instruments.catalog.quantity import Quantity

PAPER = "arXiv 2605.08453"
OURS = "this project"
HEADS, LAYER = ("layer", "head"), ("layer",)
SHARE, COSINE, LENGTH, ANY = (0.0, 1.0), (-1.0, 1.0), (0.0, float("inf")), None


def row(name: str, long_name: str, caption: str, equation: str, **more) -> Quantity:
    """A row: by layer and head, a share, of our own making, unless it says otherwise."""
    fields = {"dims": HEADS, "unit": "1", "bounds": SHARE, "source": OURS} | more
    return Quantity(name=name, instrument="sinks", long_name=long_name, caption=caption, equation=equation, **fields)
