"""The catalogue: one row per measured quantity, the one place for its name, unit, range, definition and plain words."""

from __future__ import annotations

import xarray as xr

from rheoscope.errors import RheoscopeError
from rheoscope.instruments.catalog.ablation import ABLATION, ABLATION_DIMENSIONS
from rheoscope.instruments.catalog.criticals import CRITICAL_DIMENSIONS, CRITICALS
from rheoscope.instruments.catalog.fields import FIELD_DIMENSIONS, FIELDS
from rheoscope.instruments.catalog.loss import LOSS
from rheoscope.instruments.catalog.quantity import Quantity
from rheoscope.instruments.catalog.routing import ROUTING
from rheoscope.instruments.catalog.sinks import SINK_DIMENSIONS, SINKS
from rheoscope.instruments.catalog.steering import STEERING
from rheoscope.tables import sibling

CATALOG: dict[str, Quantity] = {
    f"{row.instrument}.{row.name}": row for row in (*LOSS, *ROUTING, *SINKS, *STEERING, *FIELDS, *ABLATION, *CRITICALS)
}

# Unit and long name of every dimension that a quantity may have.
DIMENSIONS: dict[str, tuple[str, str]] = {
    "layer": ("1", "layer, counted from 0"),
    "head": ("1", "query head, counted from 0"),
    "document": ("1", "document, counted from 0"),
    "position": ("tokens", "place in the window"),
    "lag": ("tokens", "distance between the two positions"),
    "component": ("1", "eigenvalue, counted from 0"),
    **SINK_DIMENSIONS,
    **FIELD_DIMENSIONS,
    **ABLATION_DIMENSIONS,
    **CRITICAL_DIMENSIONS,
}

_NULLS = {
    "gaussian": "unrelated queries and keys",
    "shuffled": "shuffled text",
    "uniform": "uniform causal attention",
    "directions": "random directions",
    "weights": "shuffled FFN weights",
    "orthogonal": "attention and FFN at right angles",
}
_ROUNDING = 1e-9  # relative; a share computed from float64 sums may pass its bound by this much


def quantity_of(name: str, instrument: str) -> tuple[Quantity, str]:
    """The catalogue row of a variable and its role there: "" for the quantity itself, else "se", "null", …"""
    if row := CATALOG.get(f"{instrument}.{name}"):
        return row, ""
    names = {row.name for row in CATALOG.values() if row.instrument == instrument}
    if found := sibling(name, names):
        return CATALOG[f"{instrument}.{found[0]}"], found[1]
    raise RheoscopeError(f"{instrument}.{name} has no row in the catalogue; add one, or rename the variable.")


def describe(dataset: xr.Dataset, instrument: str) -> xr.Dataset:
    """The dataset with `units`, `long_name` and what the catalogue says on every variable.

    Raises on a variable or dimension without a row, and on dims other than those of the row.
    """
    described = dataset.copy()
    for name in map(str, dataset.data_vars):
        row, role = quantity_of(name, instrument)
        if not role and set(dataset[name].dims) != set(row.dims):
            raise RheoscopeError(
                f"{instrument}.{name} has dims {dataset[name].dims}, its catalogue row says {row.dims}."
            )
        described[name].attrs.update(_attrs(row, role))
    for name in map(str, dataset.coords):
        if name not in DIMENSIONS:
            raise RheoscopeError(f"{instrument} has a coordinate {name!r} without unit and name in the catalogue.")
        unit, long_name = DIMENSIONS[name]
        described[name].attrs.update(units=unit, long_name=long_name)
    return described


def out_of_bounds(dataset: xr.Dataset, instrument: str) -> list[str]:
    """One sentence per quantity with a value that its definition rules out. NaN is not a value."""
    sentences = []
    for name in map(str, dataset.data_vars):
        row, role = quantity_of(name, instrument)
        if row.bounds is None or role.endswith("se") or not dataset[name].size:
            continue
        low, high = row.bounds
        least, most = float(dataset[name].min()), float(dataset[name].max())
        if least < low - _ROUNDING * max(1.0, abs(low)) or most > high + _ROUNDING * max(1.0, abs(high)):
            sentences.append(f"{instrument}.{name} runs from {least:.6g} to {most:.6g}, outside [{low:g}, {high:g}].")
    return sentences


def null_name(row: Quantity, role: str) -> str:
    """What a null was measured on, in words: the row's own for "null", else by kind."""
    kind = role.removesuffix("_se").removeprefix("null").strip("_")
    return _NULLS.get(kind, kind.replace("_", " ")) if kind else row.null


def _attrs(row: Quantity, role: str) -> dict[str, str]:
    long_name = row.long_name
    if role.startswith("null"):
        long_name = f"{long_name}, {null_name(row, role)}"
    if role.endswith("se"):
        long_name = f"{long_name}, standard error over documents"
    attrs = {"units": row.unit, "long_name": long_name}
    if not role:
        attrs |= {"description": row.caption, "equation": row.equation, "source": row.source}
        attrs |= {"summary": row.summary} if row.summary else {}
    return attrs
