"""What a file must be before it is read as a run: all in itself, no larger than its bytes can hold, plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray as xr

from rheoscope.errors import RheoscopeError
from rheoscope.tables import REDUCTIONS, siblings

SMALL = 2**20  # bytes; an array up to this size may claim to be anything
DEFLATION = 1040  # zlib makes nothing smaller than by a factor of 1032
NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
WORDS = ("units", "long_name", "description", "equation", "source", "summary")
NUMBERS = "fiub"  # kinds of dtype
KINDS = NUMBERS + "cOUS"
MAPPINGS = ("model", "text", "config", "versions")


def refuse_unsound(path: Path) -> None:
    """Raise RheoscopeError for links that lead elsewhere, and for arrays that claim more numbers than are stored.

    A few bytes can claim an array of any size, which would be taken from memory before it is found to be empty, and
    can name another file to be read in their place. Raises what h5py raises for a file that is no HDF5.
    """
    with h5py.File(path, "r") as file:
        for name, link in _links(file):
            if not isinstance(link, h5py.HardLink):
                raise RheoscopeError(f"{path}: {name} leads elsewhere, which no run does; measure again.")
            found = file[name]
            if isinstance(found, h5py.Dataset):
                _refuse_unsound_array(path, name, found)


def _links(group: h5py.Group) -> Iterator[tuple[str, Any]]:
    """Every link below a group. A group that stands in two places is told as a link; it may hold itself."""
    waiting, seen = [(group, "")], {h5py.h5o.get_info(group.id).addr}
    while waiting:
        parent, prefix = waiting.pop()
        for key in parent:
            link = parent.get(key, getlink=True)
            child = parent[key] if isinstance(link, h5py.HardLink) else None
            if isinstance(child, h5py.Group):
                place = h5py.h5o.get_info(child.id).addr
                link = None if place in seen else link
                seen.add(place)
                waiting += [(child, f"{prefix}{key}/")] if link is not None else []
            yield f"{prefix}{key}", link


def _refuse_unsound_array(path: Path, name: str, array: h5py.Dataset) -> None:
    if array.is_virtual or array.external:
        raise RheoscopeError(f"{path}: {name} is kept in another file, as in no run; measure again.")
    if str(array.attrs.get("NAME", b"")).startswith(("b'" + NO_VARIABLE, NO_VARIABLE)):
        return  # its length is all that is read
    size = (array.size or 0) * array.dtype.itemsize
    if size > max(SMALL, DEFLATION * array.id.get_storage_size()):
        raise RheoscopeError(
            f"{path}: {name} claims {size:.2g} bytes and cannot hold them; the file is damaged: measure again."
        )


def refuse_foreign(path: Path, tree: xr.DataTree, provenance: object) -> None:
    """Raise RheoscopeError for a tree that rheoscope did not write: provenance, or what describes an array."""
    if not isinstance(provenance, Mapping):
        raise RheoscopeError(f"{path} has no provenance that can be read; the file is damaged: measure again.")
    for key in MAPPINGS:
        if not isinstance(provenance.get(key, {}), Mapping):
            raise RheoscopeError(f"{path}: its provenance holds no mapping under {key!r}; measure again.")
    for name, group in tree.children.items():
        dataset = group.to_dataset()
        _refuse_no_number(f"{path}: {name}", dataset.attrs.get("n", 0))
        for variable in dataset.variables.values():
            _refuse_foreign_attributes(f"{path}: {name}", variable)
        _refuse_foreign_siblings(f"{path}: {name}", dataset)


def _refuse_foreign_attributes(where: str, variable: xr.Variable) -> None:
    if variable.dtype.kind not in KINDS:
        raise RheoscopeError(f"{where} has an array of {variable.dtype}, which no run has; measure again.")
    for key in WORDS:
        if not isinstance(variable.attrs.get(key, ""), str):
            raise RheoscopeError(f"{where} has an array whose {key} is no text; the file is damaged: measure again.")
    how = variable.attrs.get("summary", "")
    several = how == "value" and variable.size > 1
    if how and (how not in REDUCTIONS or variable.dtype.kind not in NUMBERS or several):
        raise RheoscopeError(f"{where} has an array to be summed up by {how!r}; the file is damaged: measure again.")
    _refuse_no_number(where, variable.attrs.get("n", 0))


def _refuse_foreign_siblings(where: str, dataset: xr.Dataset) -> None:
    """What stands beside a number is its error or a null, and a number too."""
    for name, beside in siblings(dataset).items():
        if dataset[name].dtype.kind in NUMBERS and any(other.dtype.kind not in NUMBERS for other in beside.values()):
            raise RheoscopeError(f"{where} has {name} with an error or null that is no number; measure again.")


def _refuse_no_number(where: str, n: object) -> None:
    if np.ndim(n) or not np.issubdtype(np.asarray(n).dtype, np.number):
        raise RheoscopeError(f"{where} has an array whose n is no number; the file is damaged: measure again.")
