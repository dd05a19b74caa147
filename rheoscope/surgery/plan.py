"""Plans: which edits a model is to have, why, and what they are expected to change and save. Written as YAML.

    plan.save("plan.yaml")
    Plan.load("plan.yaml").edits

A plan holds names and numbers, never code, and may be written or changed by hand: only `edits` is needed. Constant
heads are written without their constants: those are the means over the calibration text of the moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from rheoscope.errors import RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.storage import replacing
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_sinks import ConstantHeads, HeadEdit
from rheoscope.surgery.plan_file import of_yaml, to_yaml
from rheoscope.surgery.registry import from_dict, to_dict
from rheoscope.surgery.texts import KnownDocuments

FORMAT, VERSION = "rheoscope-plan", 1
SAMPLED = 997  # every so many-th weight is in the fingerprint
HASHED_TOKENS, DOCUMENTS = "hashed_tokens", "document_hashes"  # of its text: the documents it was chosen on
PER_LAYER = ("n_heads", "n_kv_heads")
SHAPE = ("n_layers", *PER_LAYER, "d_model")


@dataclass(frozen=True)
class PlannedEdit:
    """One edit, the reading that chose it, the change of the loss predicted from that, and the parameters it saves."""

    edit: Edit
    because: str = ""
    predicted_change: float | None = None  # nats per token
    predicted_change_se: float | None = None
    saving: int | None = None  # parameters


@dataclass(frozen=True)
class Plan:
    """Edits in the order they were chosen, and where they come from.

    model, fingerprint, shape: which model it was made for; a plan without them is for any. text: what the choice was
    measured on. limit: the loss change that it was to keep to, nats per token. found: what was measured of the whole.
    """

    planned: tuple[PlannedEdit, ...]
    model: str = ""
    fingerprint: str = ""
    shape: Mapping[str, int] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    limit: float | None = None
    found: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chosen_on(self) -> KnownDocuments | None:
        """The documents it was chosen on; None where it does not name them."""
        if DOCUMENTS not in self.text:
            return None
        return KnownDocuments(self.text[HASHED_TOKENS], frozenset(self.text[DOCUMENTS]))

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits alone."""
        return tuple(one.edit for one in self.planned)

    def to_yaml(self) -> str:
        """The plan as text."""
        whole: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for name in ("model", "fingerprint", "shape", "text", "seed", "limit", "found"):
            value = getattr(self, name)
            if value not in ("", None) and value != {}:
                whole[name] = dict(value) if isinstance(value, Mapping) else value
        whole["edits"] = [_written(one) for one in self.planned]
        return to_yaml(whole)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes the plan, whole or not at all."""
        with replacing(path, overwrite=overwrite) as part:
            part.write_text(self.to_yaml(), encoding="utf-8")
        return Path(path)

    @classmethod
    def of_yaml(cls, text: str, *, name: str = "the plan") -> Plan:
        """The plan that a text describes. Raises RheoscopeError, in one sentence, for anything that does not belong."""
        whole = of_yaml(text, name=name, format=FORMAT, version=VERSION)
        items = whole.pop("edits", None)
        if not isinstance(items, list) or not items:
            raise RheoscopeError(f"{name} has no list `edits`: give at least one edit")
        planned = tuple(_read(item, f"{name}, edit {number}") for number, item in enumerate(items, 1))
        return cls(planned=planned, **_head(whole, name))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan in a file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise RheoscopeError(
                f"{path} cannot be read as a plan ({reason}): give a file of `rheoscope prescribe`"
            ) from error
        return cls.of_yaml(text, name=str(path))

    def refuse_other(self, view: ModelView) -> None:
        """Raise RheoscopeError where the plan was made for another model, or names what this one does not have."""
        shape = shape_of(view)
        other = {name: size for name, size in self.shape.items() if shape.get(name) != size}
        if other:
            name, size = next(iter(other.items()))
            raise RheoscopeError(
                f"the plan was made for {self.model or 'another model'} with {name} = {size}; {view.ref} has "
                f"{shape.get(name, 'layers that differ in it')}: prescribe for this model"
            )
        if self.fingerprint and self.fingerprint != fingerprint(view):
            raise RheoscopeError(
                f"the plan was made for the weights of {self.model or 'another model'}, and {view.ref} has others: "
                "prescribe for this model, or take the line `fingerprint` out of the plan to try it here"
            )
        for edit in self.edits:
            if isinstance(edit, HeadEdit):
                edit.refuse_unknown(view)
            edit.chosen(view)
            if not (isinstance(edit, ConstantHeads) and not edit.constants):
                edit.taps(view)


def completed(edits: Sequence[Edit], means: Any) -> tuple[Edit, ...]:
    """The edits, with constants for those constant heads that have none. means: z by layer and head."""
    return tuple(
        replace(edit, constants=tuple(tuple(means[pair].tolist()) for pair in edit.heads))
        if isinstance(edit, ConstantHeads) and not edit.constants
        else edit
        for edit in edits
    )


def no_means(view: ModelView) -> Float64[np.ndarray, "layer head d_value"]:
    """0 for z of every head, where edits are tried before the means are taken; layers may differ in their heads."""
    return np.zeros((view.n_layers, max(size.n_heads for size in view.sizes), view.d_value))


def written(known: KnownDocuments) -> dict[str, Any]:
    """Documents as a plan writes them."""
    return {HASHED_TOKENS: known.n_tokens, DOCUMENTS: sorted(known.hashes)}


def without_constants(edit: Edit) -> Edit:
    """The edit as a plan writes it."""
    return replace(edit, constants=()) if isinstance(edit, ConstantHeads) else edit


def shape_of(view: ModelView) -> dict[str, int]:
    """The sizes that a plan is tied to, without the numbers of heads where layers differ in them."""
    differ = {name for name in PER_LAYER if len({getattr(size, name) for size in view.sizes}) > 1}
    return {name: int(getattr(view, name)) for name in SHAPE if name not in differ}


@torch.no_grad()
def fingerprint(view: ModelView) -> str:
    """A hash of the names, shapes and some of the weights; the same in every dtype that holds them exactly."""
    digest = hashlib.sha256()
    for name, parameter in sorted(view.model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        if not parameter.is_meta:
            digest.update(parameter.detach().flatten()[::SAMPLED].cpu().double().numpy().tobytes())
    return digest.hexdigest()[:16]


_ASIDE = {"because": str, "predicted_change": float, "predicted_change_se": float, "saving": int}


def _written(one: PlannedEdit) -> dict[str, Any]:
    written = to_dict(one.edit)
    aside = {name: getattr(one, name) for name in _ASIDE}
    return written | {name: value for name, value in aside.items() if value not in ("", None)}


def _read(item: Any, where: str) -> PlannedEdit:
    if not isinstance(item, dict):
        raise RheoscopeError(f"{where} is no mapping: give `edit: NAME` and its fields")
    aside = {name: _typed(item.pop(name), kind, f"{where}, {name}") for name, kind in _ASIDE.items() if name in item}
    try:
        return PlannedEdit(from_dict(item), **aside)
    except RheoscopeError as error:
        raise RheoscopeError(f"{where}: {error}") from error


_HEAD = {"model": str, "fingerprint": str, "shape": dict, "text": dict, "seed": int, "limit": float, "found": dict}


def _head(whole: dict[str, Any], name: str) -> dict[str, Any]:
    unknown = [key for key in whole if key not in _HEAD]
    if unknown:
        raise RheoscopeError(f"{name} has a key {unknown[0]!r}; a plan has {', '.join(_HEAD)} and edits")
    head = {key: _typed(value, _HEAD[key], f"{name}, {key}") for key, value in whole.items()}
    for key, size in head.get("shape", {}).items():
        if key not in SHAPE or type(size) is not int:
            raise RheoscopeError(f"{name}, shape has {key!r}: {size!r}: give whole numbers for {', '.join(SHAPE)}")
    _refuse_documents(head.get("text", {}), name)
    return head


def _refuse_documents(text: Mapping[str, Any], name: str) -> None:
    if DOCUMENTS not in text:
        return
    n_tokens, hashes = text.get(HASHED_TOKENS), text[DOCUMENTS]
    if type(n_tokens) is not int or n_tokens < 1:
        raise RheoscopeError(f"{name}, text, {HASHED_TOKENS} is {n_tokens!r}: give a whole number from 1")
    if not isinstance(hashes, list) or not all(isinstance(one, str) for one in hashes):
        raise RheoscopeError(f"{name}, text, {DOCUMENTS} is {hashes!r}: give a list of texts, or take it out")


def _typed(value: Any, kind: type, where: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        words = {str: "a text", float: "a number", int: "a whole number", dict: "a mapping"}[kind]
        raise RheoscopeError(f"{where} is {value!r}: give {words}")
    return value
