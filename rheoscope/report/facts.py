"""What was measured, in words: model, text and run as label and value, and the summary as tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import PurePath
from typing import Any

from rheoscope.instruments.catalog import null_name, quantity_of
from rheoscope.report.words import duration, moment, number, percent, visible, with_error, worded
from rheoscope.tables import Reading


def _left_out(counts: Any) -> str:
    if isinstance(counts, Mapping):
        counts = {name: count for name, count in counts.items() if count}
    return worded(counts) if counts else "nothing"


def _versions(versions: Any) -> str:
    return ", ".join(f"{worded(name)} {worded(number)}" for name, number in dict(versions).items())


# group: provenance key, label, how it is written
_ROWS: dict[str, tuple[tuple[str, str, Callable[[Any], str]], ...]] = {
    "Model": (
        ("ref", "Name", worded),
        ("family", "Family", worded),
        ("model_type", "Type", worded),
        ("n_layers", "Layers", worded),
        ("n_heads", "Query heads", worded),
        ("n_kv_heads", "Key heads", worded),
        ("d_model", "Residual width", worded),
        ("d_head", "Head width", worded),
        ("parameters", "Parameters", worded),
        ("dtype", "Number format", worded),
        ("device", "Device", worded),
        ("weights_hash", "Weights hash", worded),
    ),
    "Text": (
        ("sources", "Sources", worded),
        ("n_documents", "Documents", worded),
        ("n_windows", "Windows", worded),
        ("window", "Window", lambda tokens: f"{worded(tokens)} tokens"),
        ("tokens", "Tokens", worded),
        ("tail", "Short ends", worded),
        ("left_out", "Left out", _left_out),
        ("hash", "Token hash", worded),
    ),
    "Run": (
        ("created", "Made", lambda when: moment(str(when))),
        ("wall_seconds", "Time taken", lambda seconds: duration(float(seconds))),
        ("seed", "Seed", str),
        ("config", "Options", worded),
        ("versions", "Versions", _versions),
        ("command", "Command", worded),
    ),
}


@dataclass(frozen=True)
class Tile:
    """One number at the head of the report."""

    label: str
    value: str
    error: str
    unit: str
    notes: tuple[str, ...]


def facts(provenance: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Groups of label and value. What the provenance does not say is left out."""
    groups = []
    for title, rows in _ROWS.items():
        held = provenance if title == "Run" else provenance.get(title.lower()) or {}
        said = [(label, write(held[key])) for key, label, write in rows if held.get(key) not in (None, "", [], {})]
        if said:
            groups.append((title, said))
    return groups


def name_of(provenance: Mapping[str, Any]) -> str:
    """The name of the model; of a folder its last part."""
    ref = str((provenance.get("model") or {}).get("ref") or "unnamed model")
    return visible(PurePath(ref).name if PurePath(ref).is_absolute() else ref)


def in_one_line(provenance: Mapping[str, Any]) -> str:
    """Size of the model and amount of text, as far as the provenance says them."""
    model, text = provenance.get("model") or {}, provenance.get("text") or {}
    parts = []
    if {"n_layers", "n_heads"} <= model.keys():
        parts.append(f"{worded(model['n_layers'])} layers of {worded(model['n_heads'])} heads")
    if "parameters" in model:
        parts.append(f"{worded(model['parameters'])} parameters")
    if "tokens" in text:
        parts.append(f"read on {worded(text['tokens'])} tokens")
    return ", ".join(parts)


def checks(findings: Any) -> dict[str, Any] | None:
    """Identity checks as a table, from a list of records or from a mapping of names to records or results."""
    if not findings:
        return None
    if isinstance(findings, Mapping):
        named = ((name, found if isinstance(found, Mapping) else {"result": found}) for name, found in findings.items())
        findings = [{"identity": name, **found} for name, found in named]
    records = [asdict(found) if is_dataclass(found) else found for found in findings]
    columns = [column for column in dict.fromkeys(key for record in records for key in record)]
    return {
        "columns": [visible(str(column)) for column in columns],
        "rows": [[_cell(record.get(column)) for column in columns] for record in records],
    }


def _cell(value: Any) -> str:
    if value is None or value != value:
        return ""
    return f"{value:.1e}" if isinstance(value, float) else worded(value)


def tiles(readings: list[Reading]) -> list[Tile]:
    """The summary of a run, ready to print."""
    return [_tile(reading) for reading in readings]


def _tile(reading: Reading) -> Tile:
    value, error = number(reading.value), ""
    if reading.se is not None:
        value, error = with_error(reading.value, reading.se)
    notes = []
    if reading.how != "value":
        notes.append(f"{reading.how}; {percent(0.8)} in {number(reading.low)} to {number(reading.high)}")
    for role, null in list(reading.nulls.items())[:1]:
        row, _ = quantity_of(reading.quantity, reading.instrument)
        notes.append(f"{null_name(row, role)}: {number(null)}")
    unit = "" if reading.unit == "1" else reading.unit
    return Tile(reading.long_name, value, error, unit, tuple(notes))
