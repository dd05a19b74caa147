"""Numbers and texts of a report as a reader would write them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import numpy as np

UNDEFINED = "not defined"


def number(value: float) -> str:
    """Three significant digits, and no more zeros than needed."""
    if not np.isfinite(value):
        return UNDEFINED
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def with_error(value: float, se: float) -> tuple[str, str]:
    """A value and its error, both to the second digit of the error. The error is "" where there is none."""
    if not (np.isfinite(value) and np.isfinite(se)) or se <= 0:
        return number(value), ""
    digits = max(0, 1 - int(np.floor(np.log10(float(f"{se:.1e}")))))  # 0.0996 counts as 0.10
    return f"{value:,.{digits}f}", f"{se:,.{digits}f}"


def percent(share: float) -> str:
    """A share in percent, without digits after the point unless it is below 1 or above 99 %."""
    if not np.isfinite(share):
        return UNDEFINED
    digits = 1 if 0 < share < 0.01 or 0.99 < share < 1 else 0
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def median(values: Any) -> float:
    """The median of the values that are defined, NaN if none is."""
    values = np.asarray(values, dtype=float)
    defined = values[np.isfinite(values)]
    return float(np.median(defined)) if defined.size else float("nan")


def duration(seconds: float) -> str:
    """A length of time in the units that suit it."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def moment(text: str) -> str:
    """An ISO date and time without the letters and fractions; as it is where it is not one."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return visible(text)
    return f"{when:%Y-%m-%d %H:%M}{f' {when.tzname()}' if when.tzinfo else ''}"


def visible(text: str) -> str:
    """Text with its control characters and lone surrogates spelled out, so that a page can hold it."""
    return "".join(
        letter if letter.isprintable() or letter == " " else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def worded(value: Any) -> str:
    """A value of the provenance: whole numbers with separators, lists and mappings with commas."""
    if isinstance(value, Mapping):
        return ", ".join(f"{visible(str(name))}: {worded(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(worded(part) for part in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return visible(str(value))
