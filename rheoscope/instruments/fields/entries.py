"""The visible entries of an attention map in the order of their lag, and which of them a field is made of."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from scipy import sparse
from torch import Tensor

from rheoscope.stats.estimates import quotient

SINKS = ("separate", "keep")


class Entries:
    """Places (query i, key j) of a map of L x L, sorted by lag τ = i - j, by query within one lag.

    A causal map has the entries j <= i and the lags 0 … L - 1; a map that sees both ways has all of them, and lags of
    both signs. `skip_rows` leaves out the first queries of a causal map, whose rows are short (the first is always 1);
    `sink="separate"` leaves out key 0; `width` is that of a sliding window, which sees lags of a smaller size.
    What is left out stays in the order and is not marked in `kept`.

    Attributes:
        lags: [lag] the lags in rising order. `bounds[l]:bounds[l + 1]` are the entries of lag number l.
    """

    def __init__(self, window: int, *, causal: bool, skip_rows: int = 0, sink: str = "keep", width: int | None = None):
        self.window, self.causal = window, causal
        self.first_row = skip_rows if causal else 0
        self.first_key = 1 if sink == "separate" else 0
        self.width = min(width or window, window)
        query, key = np.divmod(np.arange(window**2), window)
        if causal:
            query, key = query[key <= query], key[key <= query]
        order = np.lexsort((query, query - key))
        self.query, self.key = query[order], key[order]
        self.lag = self.query - self.key
        self.lags, counts = np.unique(self.lag, return_counts=True)
        self.bounds = np.concatenate([[0], np.cumsum(counts)])
        self._placed: dict[bytes, tuple[Tensor, Tensor]] = {}  # by rows, where their entries are
        self._binned: dict[int, sparse.csr_array] = {}  # by number of bins a side, which entries make up each

    def __len__(self) -> int:
        return len(self.query)

    @cached_property
    def flat(self) -> Int64[Tensor, " entry"]:
        """Place of every entry in the flattened map."""
        return torch.from_numpy(self.query * self.window + self.key)

    @cached_property
    def kept(self) -> Bool[np.ndarray, " entry"]:
        """The entries that the field is made of."""
        return (self.query >= self.first_row) & (self.key >= self.first_key) & (abs(self.lag) < self.width)

    @cached_property
    def n_kept(self) -> Int64[np.ndarray, " lag"]:
        """How many entries of every lag the field has."""
        return np.add.reduceat(self.kept.astype(np.int64), self.bounds[:-1])

    def of_row(self, query: int) -> Int64[np.ndarray, " kept"]:
        """The entries of one query that the field is made of, in the order of their lag."""
        lags = np.flatnonzero((self.lags <= query) & (self.lags > query - self.window))
        own = self.bounds[lags] + query - np.maximum(self.lags[lags], 0)  # by query within a lag, from the first it has
        return own[self.kept[own]]

    def packed(self, A: Float[Tensor, "*batch query key"]) -> Float[Tensor, "*batch entry"]:
        """The entries of maps, in order."""
        return A.flatten(-2).index_select(-1, self.flat.to(A.device))

    def by_lag(self, values: Float64[np.ndarray, "*batch entry"]) -> Float64[np.ndarray, "*batch lag"]:
        """Sums over the entries of every lag."""
        return np.add.reduceat(values, self.bounds[:-1], axis=-1)

    def rows(
        self, values: Float[Tensor, "*batch entry"], queries: Int64[np.ndarray, " row"] | None = None
    ) -> Float[Tensor, "*batch row lag"]:
        """The rows of some queries, or of all, as functions of lag; 0 where a row has no entry in the field."""
        queries = np.arange(self.window) if queries is None else queries
        chosen, place = self._places(queries.tobytes())
        out = values.new_zeros(*values.shape[:-1], len(queries) * len(self.lags))
        out[..., place] = values[..., chosen]
        return out.unflatten(-1, (len(queries), len(self.lags)))

    def _places(self, queries: bytes) -> tuple[Int64[Tensor, " kept"], Int64[Tensor, " kept"]]:
        """Of every entry of some rows of the field: its number, and its place among the rows by lag."""
        if queries not in self._placed:
            own = [self.of_row(query) for query in np.frombuffer(queries, np.int64).tolist()]
            lags = [self.lag[row] - self.lags[0] + number * len(self.lags) for number, row in enumerate(own)]
            self._placed[queries] = tuple(torch.from_numpy(np.concatenate(part)) for part in (own, lags))
        return self._placed[queries]

    @cached_property
    def support(self) -> Int64[np.ndarray, "query 2"]:
        """First and last index into `lags` that the row of each query has in the field; (0, -1) for a row without."""
        query = np.arange(self.window)
        least = 0 if self.causal else query - (self.window - 1)
        first = np.maximum(least, 1 - self.width)
        last = np.minimum(query - self.first_key, self.width - 1)
        none = (query < self.first_row) | (last < first)
        return np.stack([np.where(none, 0, first - self.lags[0]), np.where(none, -1, last - self.lags[0])], 1)

    def picture(self, values: Float64[np.ndarray, "*batch entry"], n_bins: int) -> Float64[np.ndarray, "*batch q k"]:
        """Values as a map of query by key in at most `n_bins` bins a side: means over the field's entries of each bin.

        NaN where a bin has no entry of the field.
        """
        n = min(n_bins, self.window)
        if n not in self._binned:
            own = np.flatnonzero(self.kept)
            cell = (self.query[own] * n // self.window) * n + self.key[own] * n // self.window
            self._binned[n] = sparse.csr_array((np.ones(len(own)), (cell, own)), (n * n, len(self)))
        sums = self._binned[n] @ values.reshape(-1, len(self)).T
        means = quotient(sums.T, self._binned[n].sum(1))
        return means.reshape(*values.shape[:-1], n, n)
