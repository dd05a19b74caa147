"""Two runs side by side: every quantity that both have, its difference and the error of that.

Losses are paired by document where both runs read the same text. All other differences take their error from both,
√(se² + se²), which is too large where the texts are the same, never too small.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import xarray as xr

from rheoscope.errors import RheoscopeError
from rheoscope.run import Run
from rheoscope.stats import paired_difference
from rheoscope.tables import siblings

CLEAR = 3.0  # standard errors beyond which the difference of one place counts as clear


@dataclass(frozen=True)
class Difference:
    """One quantity in both runs. Over several places: means, mean difference, and in how many it is clear.

    Means are over the places where both runs have a finite number, n_places of them, so that they differ by the change.
    se: of the difference of a single value; None where a run has no error for it. n_clear: places whose difference is
    more than CLEAR standard errors; None without errors.
    """

    instrument: str
    quantity: str
    long_name: str
    unit: str
    before: float
    after: float
    change: float
    se: float | None
    n_places: int
    n_clear: int | None
    paired: bool = False
    by_place: xr.DataArray | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Comparison:
    """All differences, and what sets the two runs apart besides them."""

    before: dict
    after: dict
    differences: tuple[Difference, ...]
    same_text: bool
    left_out: tuple[str, ...]  # quantities that only one run has, or that have other places in the other

    def of(self, instrument: str) -> list[Difference]:
        return [one for one in self.differences if one.instrument == instrument]

    @property
    def paired(self) -> bool:
        """Whether losses are paired by document: the same text, and more than one document."""
        return any(one.paired for one in self.differences)

    @property
    def instruments(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.instrument for one in self.differences))


def compared(before: Run, after: Run) -> Comparison:
    """The differences after - before. Raises RheoscopeError for runs that have no quantity in common.

    And for a run that was changed by hand so that it cannot be compared.
    """
    try:
        return _compared(before, after)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise RheoscopeError(
            f"the runs cannot be compared ({type(error).__name__}: {error}); one was changed after it was measured, or "
            "comes from another version of rheoscope: measure again"
        ) from error


def _compared(before: Run, after: Run) -> Comparison:
    first, second = before.provenance, after.provenance
    hashes = [part.get("text", {}).get("hash") for part in (first, second)]
    same_text = hashes[0] is not None and hashes[0] == hashes[1]
    differences: list[Difference] = []
    left_out: list[str] = []
    for instrument in dict.fromkeys((*before.instruments, *after.instruments)):
        if instrument not in before or instrument not in after:
            left_out.append(instrument)
            continue
        datasets = (before[instrument], after[instrument])
        found, missing = _of_instrument(instrument, *datasets)
        if instrument == "loss" and same_text:
            found = [_paired(*datasets, one) if one.quantity == "nll_mean" else one for one in found]
        differences += found
        left_out += [f"{instrument}.{name}" for name in missing]
    if not differences:
        held = [", ".join(run.instruments) or "nothing" for run in (before, after)]
        raise RheoscopeError(
            f"the two runs have no quantity in common: one holds {held[0]}, the other {held[1]}; "
            "measure both with the same instruments"
        )
    return Comparison(first, second, tuple(differences), same_text, tuple(left_out))


def _of_instrument(instrument: str, before: xr.Dataset, after: xr.Dataset) -> tuple[list[Difference], list[str]]:
    """Differences of the numbers that both have at the same places, and the names of those they have not."""
    first, second = siblings(before), siblings(after)
    found, missing = [], []
    for name in dict.fromkeys((*first, *second)):
        value = before.get(name, after.get(name))
        if value.dtype.kind not in "fiu":
            continue
        if name not in first or name not in second or not _same_places(before[name], after[name]):
            missing.append(name)
            continue
        errors = [beside[name].get("se") for beside in (first, second)]
        found.append(_difference(instrument, before[name], after[name], errors))
    return found, missing


def _same_places(first: xr.DataArray, second: xr.DataArray) -> bool:
    if first.dims != second.dims or first.shape != second.shape:
        return False
    return all(np.array_equal(first[dim].values, second[dim].values) for dim in first.dims)


def _difference(
    instrument: str, before: xr.DataArray, after: xr.DataArray, errors: list[xr.DataArray | None]
) -> Difference:
    change = after.astype(float) - before.astype(float)
    known = all(error is not None and error.dims == before.dims for error in errors)
    se = np.hypot(*(error.values.astype(float) for error in errors)) if known else None
    single = change.size == 1
    shared = np.isfinite(change.values) | single
    n_clear = None
    if se is not None and not single:
        with np.errstate(invalid="ignore", divide="ignore"):
            n_clear = int((np.abs(change.values) > CLEAR * se).sum())
    return Difference(
        instrument=instrument,
        quantity=str(before.name),
        long_name=before.attrs.get("long_name", str(before.name)),
        unit=before.attrs.get("units", ""),
        before=_mean(before.values[shared]),
        after=_mean(after.values[shared]),
        change=_mean(change.values[shared]),
        se=float(np.squeeze(se)) if single and se is not None else None,
        n_places=int(shared.sum()),
        n_clear=n_clear,
        by_place=change if before.dims == ("layer", "head") else None,
    )


def _paired(before: xr.Dataset, after: xr.Dataset, found: Difference) -> Difference:
    """The difference of the mean losses with its error over documents, paired; as it is with fewer than two."""
    if not _same_places(before["nll"], after["nll"]) or before["nll"].size < 2:
        return found
    tokens = before["tokens"].values
    sums = [data["nll"].values * tokens for data in (after, before)]
    change = paired_difference(*sums, denominators=tokens)
    return Difference(**{**vars(found), "change": float(change.value), "se": float(change.se), "paired": True})


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values, dtype=float)) if values.size else float("nan")
