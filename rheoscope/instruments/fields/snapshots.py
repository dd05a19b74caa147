"""How the snapshots of one field are kept: all of them in float32, or their leading subspace and what it leaves out.

The second form is for ensembles beyond the memory budget. It holds rows B with BᵀB + ΔᵀΔ equal to the scatter matrix of
all snapshots about their mean, where ΔᵀΔ is positive and its energy is known exactly at every entry. So every
eigenvalue of B, under any window, is at most the true one, and together they miss exactly the discarded energy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from rheoscope.errors import RheoscopeError
from rheoscope.instruments.fields.shelf import Shelf


class Ensemble(NamedTuple):
    """Rows X with XᵀX the scatter about the mean field, less what was discarded at each entry; N snapshots in all."""

    rows: Float64[Tensor, "row entry"]
    n: int
    mean: Float64[np.ndarray, " entry"]
    discarded: Float64[np.ndarray, " entry"]
    windows: Int64[np.ndarray, " row"] | None  # of each row, where rows are snapshots


class Snapshots(Protocol):
    """Takes fields by window, and the state of another of the same corpus; ends as an ensemble."""

    def update(self, windows: Int64[np.ndarray, " window"], fields: Float[Tensor, "window entry"]) -> None: ...

    def state(self) -> dict[str, np.ndarray]: ...

    def restore(self, state: Mapping[str, np.ndarray]) -> None: ...

    def take_in(self, state: Mapping[str, np.ndarray]) -> None: ...

    def ensemble(self) -> Ensemble: ...


class AllSnapshots:
    """Every snapshot in float32, by its number, in memory or on disk. Order and batches leave no trace."""

    def __init__(self, n_windows: int, n_entries: int, *, on_disk: bool = False):
        self.fields = Shelf(n_windows, n_entries) if on_disk else np.zeros((n_windows, n_entries), np.float32)
        self.seen = np.zeros(n_windows, bool)

    def update(self, windows: Int64[np.ndarray, " window"], fields: Float[Tensor, "window entry"]) -> None:
        refuse_twice(self.seen[windows])
        self.fields[windows] = fields.cpu().numpy()
        self.seen[windows] = True

    def state(self) -> dict[str, np.ndarray]:
        return {"windows": np.flatnonzero(self.seen), "fields": self.fields[self.seen]}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self.seen[:] = False
        self.take_in(state)

    def take_in(self, state: Mapping[str, np.ndarray]) -> None:
        self.update(state["windows"], torch.from_numpy(state["fields"]))

    def ensemble(self) -> Ensemble:
        rows = torch.from_numpy(self.fields[self.seen]).double()
        mean = rows.mean(0)
        rows -= mean
        return Ensemble(rows, len(rows), mean.numpy(), np.zeros(rows.shape[1]), np.flatnonzero(self.seen))


class LeadingSubspace:
    """The leading `rank` directions of the snapshots so far, from an incremental SVD that follows the mean.

    Every cut keeps the largest singular values and adds the energy of the others to what is discarded.
    """

    def __init__(self, n_windows: int, n_entries: int, *, rank: int):
        self.rank = rank
        self.seen = np.zeros(n_windows, bool)
        self.n = 0
        self.mean = torch.zeros(n_entries, dtype=torch.float64)
        self.rows = torch.zeros(0, n_entries)
        self.energy = torch.zeros(n_entries, dtype=torch.float64)

    def update(self, windows: Int64[np.ndarray, " window"], fields: Float[Tensor, "window entry"]) -> None:
        refuse_twice(self.seen[windows])
        self.seen[windows] = True
        for part in fields.split(self.rank):
            part = part.cpu().double()
            mean = part.mean(0)
            deviations = part - mean
            self._join(len(part), mean, deviations, deviations.square().sum(0))

    def state(self) -> dict[str, np.ndarray]:
        tensors = {"mean": self.mean, "rows": self.rows, "energy": self.energy}
        return {"seen": self.seen, "n": np.array(self.n)} | {name: part.numpy() for name, part in tensors.items()}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self.seen, self.n = state["seen"].copy(), int(state["n"])
        self.mean, self.rows, self.energy = (torch.tensor(state[name]) for name in ("mean", "rows", "energy"))

    def take_in(self, state: Mapping[str, np.ndarray]) -> None:
        refuse_twice(self.seen & state["seen"])
        self.seen |= state["seen"]
        if state["n"]:
            mean, rows, energy = (torch.from_numpy(state[name]).double() for name in ("mean", "rows", "energy"))
            self._join(int(state["n"]), mean, rows, energy)

    def ensemble(self) -> Ensemble:
        rows = self.rows.double()
        discarded = (self.energy - rows.square().sum(0)).clamp(min=0)
        return Ensemble(rows, self.n, self.mean.numpy(), discarded.numpy(), None)

    def _join(self, n: int, mean: Tensor, rows: Tensor, energy: Tensor) -> None:
        """Join the scatter of other snapshots: their rows, and one row for the distance between the two means."""
        total = self.n + n
        gap = mean - self.mean
        between = gap * (self.n * n / total) ** 0.5
        self.energy += energy + between.square()
        self.mean += gap * (n / total)
        self.n = total
        self.rows = torch.cat([self.rows, rows.to(self.rows), between[None].to(self.rows)])
        if len(self.rows) > 2 * self.rank:
            self.rows = leading(self.rows, self.rank)


def leading(rows: Float[Tensor, "row entry"], rank: int) -> Float[Tensor, "rank entry"]:
    """The `rank` rows V_kᵀ X of largest singular values: the best rank-k part of X up to a rotation of its rows."""
    gram = (rows @ rows.T).double()
    _, vectors = torch.linalg.eigh(gram)
    return vectors[:, -rank:].T.to(rows.dtype) @ rows


def refuse_twice(seen: Bool[np.ndarray, " window"]) -> None:
    """Raise RheoscopeError where a window came before."""
    if seen.any():
        raise RheoscopeError(
            f"{int(seen.sum())} windows of a field came twice; feed or merge every window of the corpus once."
        )


def rank_within(budget: int, *, n_fields: int, n_entries: int) -> int:
    """Directions that fit a budget in bytes, when up to three times as many float32 rows are held per field."""
    return budget // (n_fields * n_entries * 4 * 3)
