"""Edits by name, written as plain values and read back strictly: what plans and edited checkpoints are made of.

    from_dict(to_dict(edit)) == edit

Nothing is imported or run by a name that a file gives.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from rheoscope.errors import RheoscopeError
from rheoscope.surgery.calibration import Calibration
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_routing import FilterOff, FilterScalar, KeyBiasRouting, TruncateFiltering, TruncateRouting
from rheoscope.surgery.edits_sinks import (
    ConstantHeads,
    DiagonalHeads,
    DropHeads,
    IdentityHeads,
    SinkOneHot,
    UniformMixing,
)
from rheoscope.surgery.edits_steering import (
    AttentionGain,
    GateFFN,
    OtherPrefix,
    ParallelFFN,
    RadialFFN,
    TangentialFFN,
    TopAttention,
    ZeroAttention,
    ZeroFFN,
)
from rheoscope.surgery.edits_structure import DropAttention, Parallelize, ShrinkHeads

_KINDS: tuple[type[Edit], ...] = (
    *(DropHeads, ConstantHeads, DiagonalHeads, DropAttention, Linearize, Parallelize, ShrinkHeads, GateFFN),
    *(IdentityHeads, SinkOneHot, UniformMixing),
    *(ZeroFFN, RadialFFN, TangentialFFN, ZeroAttention, AttentionGain, TopAttention, ParallelFFN, OtherPrefix),
    *(TruncateRouting, TruncateFiltering, FilterScalar, FilterOff, KeyBiasRouting),
)
EDITS: dict[str, type[Edit]] = {kind.__name__: kind for kind in _KINDS}
NAME = "edit"  # the key that holds the name


def to_dict(edit: Edit) -> dict[str, Any]:
    """The edit as plain values: its name under `edit`, and every field that is not as by default.

    Raises RheoscopeError for an edit fitted on a text: the moments it holds are no plain values.
    """
    name = type(edit).__name__
    if EDITS.get(name) is not type(edit):
        raise RheoscopeError(f"{name} asked to be written down; it is no edit of rheoscope: use {', '.join(EDITS)}")
    written: dict[str, Any] = {NAME: name}
    for part in fields(edit):
        value = getattr(edit, part.name)
        if isinstance(value, Calibration):
            raise RheoscopeError(
                f"{name} asked to be written down; it holds moments of a text, which are no plain values: "
                "apply it with `edited`"
            )
        if part.default is MISSING or value != part.default:
            written[part.name] = _listed(value)
    return written


def from_dict(mapping: Mapping[str, Any]) -> Edit:
    """The edit that a mapping describes. Raises RheoscopeError for a name, a field or a value that does not belong."""
    if not isinstance(mapping, Mapping):
        raise RheoscopeError(
            f"an edit was given as {type(mapping).__name__}: give a mapping with its name under `{NAME}`"
        )
    name = mapping.get(NAME)
    if not isinstance(name, str) or name not in EDITS:
        raise RheoscopeError(f"no edit is called {name!r}; the edits are {', '.join(EDITS)}")
    kinds = _field_types(name)
    values = {}
    for key, value in mapping.items():
        if key == NAME:
            continue
        if key not in kinds:
            known = ", ".join(kinds) or "none"
            raise RheoscopeError(f"{name} has no field {key!r}; its fields are {known}")
        values[key] = _read(value, kinds[key], f"{name}.{key}")
    return EDITS[name](**values)


@cache
def _field_types(name: str) -> dict[str, Any]:
    """Type of every field that can be written down."""
    kind = EDITS[name]
    hints = get_type_hints(kind)
    types = {part.name: hints[part.name] for part in fields(kind)}
    return {field: wanted for field, wanted in types.items() if Calibration not in get_args(wanted)}


def _listed(value: Any) -> Any:
    return [_listed(part) for part in value] if isinstance(value, tuple) else value


def _read(value: Any, wanted: Any, where: str) -> Any:
    """The value in the type of its field; whole numbers pass for real ones, and nothing else for anything.

    Real numbers are finite: a gate of NaN would make every loss NaN.
    """
    if get_origin(wanted) in (Union, UnionType):
        if value is None and type(None) in get_args(wanted):
            return None
        (wanted,) = (kind for kind in get_args(wanted) if kind is not type(None))
    if get_origin(wanted) is tuple:
        if not isinstance(value, list | tuple):
            raise RheoscopeError(f"{where} is {value!r}: give a list")
        kinds = get_args(wanted)
        kinds = (kinds[0],) * len(value) if kinds[-1] is Ellipsis else kinds
        if len(kinds) != len(value):
            raise RheoscopeError(f"{where} has {value!r}: give {len(kinds)} values there")
        return tuple(_read(part, kind, where) for part, kind in zip(value, kinds, strict=True))
    if wanted is float and type(value) is int and abs(value) <= sys.float_info.max:
        value = float(value)
    if type(value) is not wanted:
        raise RheoscopeError(f"{where} is {value!r}: give {_words(wanted)}")
    if wanted is float and not math.isfinite(value):
        raise RheoscopeError(f"{where} is {value!r}: give a finite number")
    return value


def _words(wanted: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}[wanted]
