"""What a reader must know of one measured quantity: the record behind every row of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quantity:
    """One measured quantity: its place in the results, its definition, and how to say it in plain words."""

    name: str
    instrument: str
    dims: tuple[str, ...]
    unit: str  # "1" for a pure number
    long_name: str  # short, for axes and tables
    caption: str  # one or two sentences for a reader who does not know the paper
    bounds: tuple[float, float] | None
    equation: str
    source: str
    null: str = "untrained model"  # what the sibling `_null` was measured on
    summary: str = ""  # how one number is made of all values, for summaries: "value", "median", "mean", or not shown
