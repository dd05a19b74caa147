"""Axes of the figures: depth, heads, powers of two, each drawn alike wherever it appears."""

from __future__ import annotations

import numpy as np
import xarray as xr

_POWERS_OF_TWO = [2**k for k in range(-3, 24)]
POWERS_OF_TWO = {"type": "log", "tickvals": _POWERS_OF_TWO, "ticktext": [f"{power:,g}" for power in _POWERS_OF_TWO]}


def axis_name(variable: xr.DataArray) -> str:
    """Long name and unit, as written on an axis."""
    unit = variable.attrs.get("units", "1")
    name = variable.attrs.get("long_name", str(variable.name))
    return name if unit == "1" else f"{name} ({unit})"


def counted_axis(title: str, numbers: np.ndarray, *, most_ticks: int = 16) -> dict:
    """An axis of whole numbers (layers, heads), half a step wider on both sides, ticks on whole numbers only."""
    first, last = float(numbers.min()), float(numbers.max())
    step = int(np.ceil((last - first + 1) / most_ticks))
    clear = {"text": title, "standoff": 16}  # of the numbers beside it
    return {"title": clear, "range": [first - 0.5, last + 0.5], "tick0": 0, "dtick": step, "tickformat": "d"}


def layer_axis(layers: np.ndarray) -> dict:
    """The axis of depth."""
    return counted_axis("layer (0 is the first)", layers)


def rows_downwards(title: str, numbers: np.ndarray) -> dict:
    """The vertical axis of a map, the first row on top."""
    axis = counted_axis(title, numbers)
    return axis | {"range": axis["range"][::-1], "showgrid": False}
