"""Run files that are whole netCDF with other contents than a run has: lost, renamed, of another kind, giant."""

import io
from contextlib import suppress
from typing import Any

import h5py
import numpy as np
from hypothesis import strategies as st

from .mutations import WORDS, mutated_bytes

attributes = st.one_of(
    st.sampled_from(
        [*WORDS[2:], "{", "null", "[]", '{"model": 3}', '{"model": {"ref": {}}, "text": [], "versions": 1}']
    ),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.lists(st.floats(), max_size=3).map(np.array),
    st.just(h5py.Empty("f")),
)
arrays = st.sampled_from(
    [
        np.zeros((0,)),
        np.zeros(()),
        np.full((2, 3), np.nan),
        np.full((2, 3), np.inf),
        np.full((2, 3), -1e308),
        np.arange(7),
        np.array([[b"a", b"\xff"]]),
        np.zeros((2, 3), bool),
        np.zeros((2, 3, 2, 2), np.int8),
        np.array([1j, np.nan]),
        np.zeros(3, np.dtype([("a", "f4"), ("b", "S3")])),
        np.array(["é", "b"], dtype=h5py.string_dtype()),
    ]
)
GIANT = ((2**60,), (2**28,), (2**15, 2**15), (2**20, 3, 3))


@st.composite
def _with_other_contents(draw: st.DrawFn, content: bytes) -> bytes:
    file = io.BytesIO(content)
    with h5py.File(file, "r+") as whole:
        for _ in range(draw(st.integers(1, 4))):
            names: list[str] = ["/"]
            whole.visit(names.append)
            _change(draw, whole, draw(st.sampled_from(names)))
    return file.getvalue()


def _change(draw: st.DrawFn, whole: h5py.File, name: str) -> None:
    found = whole[name]
    kind = draw(st.sampled_from(["delete", "rename", "attribute", "less", "array", "giant", "link"]))
    if kind == "attribute":
        names = [*found.attrs, "units", "format_version", "complex_part_of", "escaped", "summary", "n", "provenance"]
        found.attrs[draw(st.sampled_from(names))] = draw(attributes)
    elif kind == "less" and len(found.attrs):
        del found.attrs[draw(st.sampled_from(sorted(found.attrs)))]
    elif name == "/":
        return
    elif kind == "rename":
        other = f"{name}{draw(st.sampled_from(['_re', '_se', '_null', 'x']))}"
        with suppress(ValueError):  # HDF5 moves no link that leads out of the file
            whole.move(name, other)
    elif kind != "less":
        _replace(draw, whole, name, kind)


def _replace(draw: st.DrawFn, whole: h5py.File, name: str, kind: str) -> None:
    attrs: dict[str, Any] = {}
    if isinstance(whole[name], h5py.Dataset):
        attrs = {key: value for key, value in whole[name].attrs.items() if not key.endswith("_LIST")}
    del whole[name]
    if kind == "array":
        whole[name] = draw(arrays)
    elif kind == "giant":
        whole.create_dataset(name, shape=draw(st.sampled_from(GIANT)), dtype="f8", chunks=True, compression="gzip")
    elif kind == "link":
        elsewhere = draw(st.sampled_from(["external", "soft"]))
        whole[name] = h5py.ExternalLink("/etc/passwd", "/x") if elsewhere == "external" else h5py.SoftLink("/nowhere")
    if kind in ("array", "giant"):
        whole[name].attrs.update(attrs)


def mutated_run(content: bytes) -> st.SearchStrategy[bytes]:
    """Changes of contents, or of bytes."""
    other = _with_other_contents(content)
    return st.one_of(other, other, mutated_bytes(content, head=4096))
