"""One measurement kept together: labelled arrays by instrument, and where they come from."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from rheoscope.errors import RheoscopeError
from rheoscope.storage import read_tree, replacing, write_tree
from rheoscope.tables import Reading, readings, tidy_tables

FORMATS = ("csv", "parquet")
PROVENANCE = "provenance.json"


class Run:
    """What instruments measured on one model and one text, with the provenance of every number.

    `run["routing"]` is a Dataset: `run["routing"].routing_share.sel(layer=3)`.
    """

    def __init__(self, tree: xr.DataTree):
        self.tree = tree

    @classmethod
    def of(cls, datasets: Mapping[str, xr.Dataset], provenance: Mapping[str, Any]) -> Run:
        """The run made of one dataset per instrument. Provenance is anything that JSON can hold."""
        tree = xr.DataTree.from_dict(dict(datasets))
        tree.attrs["provenance"] = _as_json(provenance)
        return cls(tree)

    @property
    def instruments(self) -> tuple[str, ...]:
        return tuple(self.tree.children)

    @property
    def provenance(self) -> dict[str, Any]:
        """Model, text, options, versions, seed and times. A copy: changing it does not change the run."""
        return json.loads(self.tree.attrs.get("provenance", "{}"))

    def __getitem__(self, instrument: str) -> xr.Dataset:
        if instrument not in self.tree.children:
            held = ", ".join(self.instruments) or "no instrument"
            raise RheoscopeError(f"This run has no {instrument}: it holds {held}; measure again with {instrument}.")
        return self.tree[instrument].to_dataset()

    def __contains__(self, instrument: str) -> bool:
        return instrument in self.tree.children

    def __repr__(self) -> str:
        model = self.provenance.get("model", {}).get("ref", "unnamed model")
        return f"Run of {model}: {', '.join(self.instruments) or 'no instrument'}"

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes one netCDF file, whole or not at all. An existing file is refused unless `overwrite`."""
        write_tree(self.tree, path, overwrite=overwrite)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """The run in a file, read into memory; the file is closed again."""
        return cls(read_tree(path))

    def to_tables(self) -> dict[str, pd.DataFrame]:
        """Tidy tables named `instrument.dims`: one row per quantity and place, error, nulls, n and unit beside it."""
        tables = {}
        for instrument in self.instruments:
            tables.update(tidy_tables(self[instrument], instrument))
        return tables

    def export(self, folder: str | Path, format: str = "csv", *, overwrite: bool = False) -> list[Path]:
        """Writes the tidy tables and `provenance.json` into a folder, which is made where it is missing.

        `overwrite` removes the tables of an earlier run that are there, so that all are of the run that
        provenance.json tells of.
        """
        refuse_format(format)
        folder = _made_folder(Path(folder))
        tables = {folder / f"{name}.{format}": table for name, table in self.to_tables().items()}
        provenance = folder / PROVENANCE
        existing = [path for path in (*tables, provenance) if path.exists()]
        if existing and not overwrite:
            raise RheoscopeError(f"{existing[0]} exists already; choose another folder, or say overwrite.")
        if overwrite:
            _remove_tables(folder, {*self.instruments, *_instruments_of(provenance)})
        for path, table in tables.items():
            with replacing(path, overwrite=overwrite) as part:
                table.to_csv(part, index=False) if format == "csv" else table.to_parquet(part, index=False)
        with replacing(provenance, overwrite=overwrite) as part:
            part.write_text(json.dumps(self.provenance, indent=2) + "\n", encoding="utf-8")
        return [*tables, provenance]

    def summary(self) -> list[Reading]:
        """The few numbers that stand for the run, in the order of the catalogue."""
        return [reading for instrument in self.instruments for reading in readings(self[instrument], instrument)]

    def report(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes one HTML page that opens from disk and loads nothing from a network."""
        from rheoscope.report.page import html

        with replacing(path, overwrite=overwrite) as part:
            part.write_text(html(self), encoding="utf-8", errors="backslashreplace")
        return Path(path)


def _as_json(provenance: Mapping[str, Any]) -> str:
    try:
        return json.dumps(provenance, default=_plain)
    except (TypeError, ValueError) as error:
        raise RheoscopeError(f"The provenance cannot be kept as JSON: {error}.") from error


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def refuse_format(format: str) -> None:
    """Raise RheoscopeError for a format that tables are not written in."""
    if format not in FORMATS:
        raise RheoscopeError(f"tables as {format!r} asked for; there are {', '.join(FORMATS)}")


def tables_in(folder: Path, instruments: Collection[str]) -> list[Path]:
    """The tables of some instruments that a folder holds, in either format; none where there is no folder."""
    names = "|".join(re.escape(name) for name in instruments)
    form = re.compile(rf"({names})\.\w+\.({'|'.join(FORMATS)})")
    try:
        return sorted(path for path in folder.iterdir() if form.fullmatch(path.name)) if folder.is_dir() else []
    except OSError as error:
        raise RheoscopeError(f"the folder {folder} cannot be listed: {error.strerror}; choose another.") from error


def _instruments_of(provenance: Path) -> list[str]:
    """The instruments that the provenance beside tables names; none where it cannot be read."""
    try:
        said = json.loads(provenance.read_text(encoding="utf-8"))
        return [name for name in said["config"]["instruments"] if isinstance(name, str)]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


def _remove_tables(folder: Path, instruments: Collection[str]) -> None:
    """The provenance goes last, as it names the instruments whose tables are to be removed."""
    try:
        for path in (*tables_in(folder, instruments), folder / PROVENANCE):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise RheoscopeError(f"{path} cannot be replaced: {error.strerror}; choose another folder.") from error


def _made_folder(folder: Path) -> Path:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise RheoscopeError(f"The folder {folder} cannot be made: {error.strerror}.") from error
    return folder
