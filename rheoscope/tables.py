"""Tidy tables of a dataset, and the few numbers that stand for it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import xarray as xr

_SIBLING = re.compile(r"(?P<base>.+?)_(?P<role>se|null(?:_[a-z0-9]+)*)")
REDUCTIONS = {
    "value": np.squeeze,
    "mean": np.mean,
    "median": np.median,
    "10th": lambda values: np.percentile(values, 10),
    "90th": lambda values: np.percentile(values, 90),
}


def sibling(name: str, bases: Collection[str]) -> tuple[str, str] | None:
    """The quantity that a variable stands beside and its role there, or None for a quantity of its own.

    Roles are "se", "null", "null_se", "null_<kind>" and "null_<kind>_se".
    """
    match = _SIBLING.fullmatch(name)
    return (match["base"], match["role"]) if match and match["base"] in bases else None


def siblings(dataset: xr.Dataset) -> dict[str, dict[str, xr.DataArray]]:
    """Each quantity of a dataset, with what stands beside it by role.

    A variable with a dim that its base lacks (a null with one value per seed) is a quantity of its own.
    """
    names = [str(name) for name in dataset.data_vars]
    found = {name: sibling(name, names) for name in names}
    found = {name: pair for name, pair in found.items() if pair and {*dataset[name].dims} <= {*dataset[pair[0]].dims}}
    beside: dict[str, dict[str, xr.DataArray]] = {name: {} for name in names if name not in found}
    for name, (base, role) in found.items():
        beside[base][role] = dataset[name]
    return beside


def tidy_tables(dataset: xr.Dataset, instrument: str) -> dict[str, pd.DataFrame]:
    """One table per set of dims, named `instrument.dims`: dims, quantity, value, se, null, …, n, unit.

    Numbers and texts of the same dims are kept in separate tables, so that every column has one type.
    """
    parts = defaultdict(list)
    for name, beside in siblings(dataset).items():
        is_text = dataset[name].dtype.kind in "OUS"
        place = "_".join(map(str, dataset[name].dims)) or "scalars"
        table = f"{instrument}.{place}_text" if is_text else f"{instrument}.{place}"
        parts[table].append(_rows(dataset[name], beside, n=dataset.attrs.get("n", np.nan)))
    return {table: _ordered(pd.concat(rows, ignore_index=True)) for table, rows in sorted(parts.items())}


def _rows(value: xr.DataArray, beside: dict[str, xr.DataArray], *, n: float) -> pd.DataFrame:
    """One row per place. A sibling that varies along fewer dims (a null that is one number) is repeated.

    n: number of documents of the whole dataset, for a quantity that does not state its own.
    """
    columns = {"value": value, **{role: other.broadcast_like(value) for role, other in beside.items()}}
    places = np.indices(value.shape).reshape(value.ndim, value.size)
    table = {dim: value[dim].values[index] for dim, index in zip(value.dims, places, strict=True)}
    labels = {name: label for name, label in value.coords.items() if name not in value.dims}
    table.update(
        {name: label.broadcast_like(value).transpose(*value.dims).values.ravel() for name, label in labels.items()}
    )
    table["quantity"] = np.full(value.size, value.name, dtype=object)
    for role, array in columns.items():
        table[role] = array.transpose(*value.dims).values.ravel()
    table["n"] = np.full(value.size, value.attrs.get("n", n))
    table["unit"] = np.full(value.size, value.attrs.get("units", ""), dtype=object)
    return pd.DataFrame(table)


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    last = ["n", "unit"]
    return table[[*(column for column in table if column not in last), *last]]


@dataclass(frozen=True)
class Reading:
    """One number that stands for a quantity: its value, or the median or mean over all places and their spread."""

    instrument: str
    quantity: str
    long_name: str
    unit: str
    value: float
    how: str  # "value", "median" or "mean"
    n_places: int  # how many values it was made of
    se: float | None = None  # standard error over documents, for a single value
    low: float | None = None  # 10th and 90th percentile of the places
    high: float | None = None
    nulls: dict[str, float] = field(default_factory=dict)  # by role: "null", "null_gaussian", …


def readings(dataset: xr.Dataset, instrument: str) -> list[Reading]:
    """One reading per quantity whose attribute `summary` says how a single number is made of it."""
    found = []
    for name, beside in siblings(dataset).items():
        how = dataset[name].attrs.get("summary", "")
        if how:
            found.append(_reading(dataset[name], beside, instrument, how))
    return found


def _reading(value: xr.DataArray, beside: dict[str, xr.DataArray], instrument: str, how: str) -> Reading:
    single = value.size == 1
    low, high = (None, None) if single else (_reduced(value, "10th"), _reduced(value, "90th"))
    return Reading(
        instrument=instrument,
        quantity=str(value.name),
        long_name=value.attrs.get("long_name", str(value.name)),
        unit=value.attrs.get("units", ""),
        value=_reduced(value, how),
        how="value" if single else how,
        n_places=value.size,
        se=_reduced(beside["se"], "value") if single and "se" in beside else None,
        low=low,
        high=high,
        nulls={role: _reduced(other, how) for role, other in beside.items() if "null" in role and "_se" not in role},
    )


def _reduced(values: xr.DataArray, how: str) -> float:
    """NaN entries are places where the quantity is not defined and are left out; NaN where it is defined nowhere."""
    numbers = values.values.astype(np.float64)
    defined = numbers[~np.isnan(numbers)]
    return float(REDUCTIONS["value" if values.size == 1 else how](defined)) if defined.size else float("nan")
