"""Files that appear whole or not at all, and the netCDF form of a run."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xarray as xr

from rheoscope.errors import RheoscopeError
from rheoscope.soundness import refuse_foreign, refuse_unsound

FORMAT = "rheoscope-run"
FORMAT_VERSION = 1
_COMPRESS_ABOVE = 4096  # values; below this the chunk's own overhead is larger than what compression saves


@contextmanager
def replacing(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and is removed when it does not.

    A symbolic link is followed, so that the file it names is replaced and the link stays.
    """
    part = None
    try:
        target = Path(path).resolve()
        _require_writable_target(target, overwrite)
        part = _part(target)
        part.touch(exist_ok=False)
        yield part
        _flush_to_disk(part)
        os.replace(part, target)
        if hasattr(os, "O_DIRECTORY"):
            _flush_to_disk(target.parent)
    except OSError as error:
        raise RheoscopeError(f"{path} could not be written: {_reason(error)}.") from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def refuse_output(path: str | Path, *, overwrite: bool = False) -> None:
    """Raise RheoscopeError, before any work is done, where `replacing` would in the end."""
    target = Path(path).resolve()
    _require_writable_target(target, overwrite)
    try:  # rights alone do not tell: a file system may be read-only, and the superuser has every right
        part = _part(target)
        part.touch(exist_ok=False)
        part.unlink()
    except OSError as error:
        raise RheoscopeError(
            f"{target} cannot be written: the folder {target.parent} takes no files ({_reason(error)}); choose another."
        ) from error


def refuse_replaced(output: str | Path, *inputs: str | Path) -> None:
    """Raise RheoscopeError where an output would take the place of a file that it is made from."""
    for path in inputs:
        if Path(output).resolve() == Path(path).resolve():
            raise RheoscopeError(f"{output} would replace {path}, which it is made from: name another file")


def write_tree(tree: xr.DataTree, path: str | Path, *, overwrite: bool = False) -> None:
    """Writes a tree as one netCDF file. Complex variables become pairs `x_re`, `x_im`."""
    datasets = {node.path: _storable(node.to_dataset(inherit=False), node.path.strip("/")) for node in tree.subtree}
    stored = xr.DataTree.from_dict(datasets)
    stored.attrs = dict(tree.attrs, format=FORMAT, format_version=FORMAT_VERSION)
    encoding = {group: _compression(dataset) for group, dataset in datasets.items()}
    with replacing(path, overwrite=overwrite) as part:
        try:
            stored.to_netcdf(part, engine="h5netcdf", encoding=encoding)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RheoscopeError(f"{path} could not be written: {_reason(error)}.") from error


def read_tree(path: str | Path) -> xr.DataTree:
    """A tree read into memory; the file is closed again."""
    path = Path(path)
    if not os.path.exists(path):
        raise RheoscopeError(f"There is no file {path}; give the path of a run that `rheoscope measure` wrote.")
    if os.path.isdir(path):
        raise RheoscopeError(f"{path} is a folder; give the path of a run file.")
    try:
        refuse_unsound(path)
        with xr.open_datatree(path, engine="h5netcdf", decode_timedelta=False) as opened:
            attrs = dict(opened.attrs)
            datasets = {node.path: node.to_dataset(inherit=False).load() for node in opened.subtree}
        _require_run_format(path, attrs)
        tree = xr.DataTree.from_dict({group: _restored(dataset) for group, dataset in datasets.items()})
        refuse_foreign(path, tree, json.loads(attrs.get("provenance", "{}")))
    except (OSError, ValueError, LookupError, RuntimeError, TypeError, AttributeError) as error:
        raise RheoscopeError(
            f"{path} is not a run file, or it is damaged or incomplete; measure again ({_reason(error)})."
        ) from error
    tree.attrs = {key: value for key, value in attrs.items() if key not in ("format", "format_version")}
    return tree


def _require_writable_target(target: Path, overwrite: bool) -> None:
    if not target.parent.is_dir():
        raise RheoscopeError(f"{target} cannot be written: there is no folder {target.parent}; make it first.")
    if target.is_dir():
        raise RheoscopeError(f"{target} cannot be written: it is a folder; give the path of a file.")
    if target.exists() and not target.is_file():
        raise RheoscopeError(f"{target} cannot be written: it is not an ordinary file.")
    if target.exists() and not overwrite:
        raise RheoscopeError(f"{target} exists already; choose another name, or say overwrite.")


def _part(target: Path) -> Path:
    """A name beside the target that nobody else has."""
    return target.with_name(f".rheoscope-{secrets.token_hex(8)}.part")


def _require_run_format(path: Path, attrs: dict) -> None:
    if not isinstance(attrs.get("format"), str) or attrs["format"] != FORMAT:
        raise RheoscopeError(f"{path} is a netCDF file, but not one that rheoscope wrote.")
    if attrs["format_version"] > FORMAT_VERSION:
        raise RheoscopeError(
            f"{path} has run format {attrs['format_version']}, this rheoscope reads up to {FORMAT_VERSION}; update it."
        )


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    text = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip()
    return text.splitlines()[0].rstrip(".")


def _storable(dataset: xr.Dataset, instrument: str) -> xr.Dataset:
    """What netCDF can hold of a dataset: real numbers, and text without NUL characters or lone surrogates."""
    stored = xr.Dataset(coords=dataset.coords, attrs=dataset.attrs)
    for name, variable in dataset.data_vars.items():
        if np.iscomplexobj(variable):
            for part, values in (("re", variable.real), ("im", variable.imag)):
                if f"{name}_{part}" in dataset:
                    raise RheoscopeError(
                        f"{instrument}.{name} is complex and is stored as {name}_re and {name}_im, "
                        f"but {name}_{part} exists as well; rename one."
                    )
                stored[f"{name}_{part}"] = values.assign_attrs(variable.attrs, complex_part_of=name)
        elif variable.dtype.kind in "OU" and not _is_plain(variable.values):
            escaped = [str(text).encode("unicode_escape").decode("ascii") for text in variable.values.ravel()]
            stored[name] = variable.copy(data=np.array(escaped, dtype=object).reshape(variable.shape))
            stored[name].attrs["escaped"] = 1
        else:
            stored[name] = variable
    return stored.drop_encoding()


def _restored(dataset: xr.Dataset) -> xr.Dataset:
    dataset = dataset.drop_encoding()
    for name, variable in list(dataset.data_vars.items()):
        attrs = dict(variable.attrs)
        if attrs.pop("escaped", None):
            texts = [str(text).encode("ascii").decode("unicode_escape") for text in variable.values.ravel()]
            # A string array drops NUL at the end of a text; xarray takes no object array with a lone surrogate.
            data = np.array(texts, dtype=str if any(map(_has_surrogate, texts)) else object).reshape(variable.shape)
            dataset[name] = (variable.dims, data, attrs)
        elif (base := attrs.pop("complex_part_of", None)) and name.endswith("_re"):
            dataset[base] = (variable.dims, _complex(variable.values, dataset[f"{base}_im"].values), attrs)
            dataset = dataset.drop_vars([f"{base}_re", f"{base}_im"])
    return dataset


def _complex(re: np.ndarray, im: np.ndarray) -> np.ndarray:
    """Pairs put together without arithmetic: re + 1j * im would turn an infinite part into NaN."""
    values = np.empty(re.shape, dtype=np.result_type(re, np.complex64))
    values.real, values.imag = re, im
    return values


def _is_plain(texts: np.ndarray) -> bool:
    return all("\0" not in text and not _has_surrogate(text) for text in texts.flat)


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _compression(dataset: xr.Dataset) -> dict[str, dict]:
    large = (v for v in dataset.data_vars.values() if v.size > _COMPRESS_ABOVE and v.dtype.kind in "fiub")
    return {variable.name: {"zlib": True, "complevel": 4} for variable in large}
