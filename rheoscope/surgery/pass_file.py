"""The file that keeps passes: one line of JSON each, added at the end and never changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rheoscope.errors import RheoscopeError

LISTS = ("nll", "tokens")  # one number per window
BEGINNING = b'{"key": "'  # of every line


def passes_in(path: Path) -> dict[str, dict[str, Any]]:
    """The passes in a file by key; none where there is no file.

    A last line that its writer, when it was killed, left without an end is taken out of the file. Raises
    RheoscopeError, with the file as it was, for any other line that is no pass: the file is then somebody else's.
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _unusable(path, error) from error
    known: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        record = _pass_of(line)
        if record is None:
            raise _foreign(path, number)
        known[record["key"]] = record
    if rest:
        if not (known or rest.startswith(BEGINNING) or BEGINNING.startswith(rest)):
            raise _foreign(path, 1)
        _take_out(path, len(rest))
    return known


def add(path: Path, record: dict[str, Any]) -> None:
    """Write one more pass, so that it is on the disk when this returns."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _unusable(path, error) from error


def _pass_of(line: bytes) -> dict[str, Any] | None:
    """The pass that a line holds, or None."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        return None
    if not isinstance(record, dict) or not isinstance(record.get("key"), str):
        return None
    numbers = [record.get("seconds")]
    for name in LISTS:
        if not isinstance(record.get(name), list):
            return None
        numbers += record[name]
    return record if all(type(number) in (int, float) for number in numbers) else None


def _take_out(path: Path, n_bytes: int) -> None:
    """Shorten a file by its last bytes."""
    try:
        os.truncate(path, path.stat().st_size - n_bytes)
    except OSError as error:
        raise _unusable(path, error) from error


def _foreign(path: Path, number: int) -> RheoscopeError:
    return RheoscopeError(f"{path} was to go on with; its line {number} is no pass: name another file, or delete it")


def _unusable(path: Path, error: OSError) -> RheoscopeError:
    reason = error.strerror or type(error).__name__
    return RheoscopeError(f"{path} was to keep passes; it cannot be read and written ({reason}): name another file")
