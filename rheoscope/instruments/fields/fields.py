"""Attention fields: what varies in a layer's attention from text to text, at which distances, in how many patterns.

One window of the corpus is one snapshot: the layer's attention map, averaged over heads. Fluctuations about the mean
map are decomposed into orthogonal modes; rows are read by wavelets over lag. Definitions: docs/fields.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import xarray as xr
from jaxtyping import Int64

from rheoscope.corpus import Batch, Corpus
from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.fields.coherence import RowCoefficients, coherence_positions
from rheoscope.instruments.fields.dataset import field_dataset
from rheoscope.instruments.fields.ensemble import Design
from rheoscope.instruments.fields.entries import SINKS, Entries
from rheoscope.instruments.fields.layer import Layer, Plan
from rheoscope.instruments.fields.maps import maps_of_heads
from rheoscope.instruments.fields.nulls import chance_corpus, dominant, with_chance
from rheoscope.instruments.fields.pod import WINDOWS
from rheoscope.instruments.fields.shelf import room
from rheoscope.instruments.fields.snapshots import rank_within
from rheoscope.instruments.fields.wavelets import Morlet, default_scales, least_window
from rheoscope.instruments.instrument import Instrument, LayerSites, Pass
from rheoscope.instruments.sampling import spread
from rheoscope.models.view import ModelView
from rheoscope.stats import OWN

FEWEST_SNAPSHOTS = 8
SHORTEST_WINDOW = 16
FEWEST_DIRECTIONS = 8  # of the streaming form; below it says next to nothing


class Fields(Instrument):
    """Multiscale POD of attention: intensity, scalograms, spectra, H*, modes and coherence of every layer."""

    name = "fields"
    kept: ClassVar = {"layers": OWN}

    @dataclass(frozen=True)
    class Options:
        """skip_rows: first queries of a causal map that are left out, because their rows are short.

        sink: "separate" leaves key 0 out and reports its variance apart, "keep" does not. window: what is laid on lags
        before the decomposition, "band", "low_pass" (published) or "none"; bands: its scales in tokens, powers of two
        from 4 to an eighth of a window if empty; the field without a window always comes last. scales: of the wavelets
        in tokens, 2 to a quarter of a window if empty. omega0: centre frequency, 5 as published. dominant: "relative"
        to a null, or "raw" for the published top four by energy. heads: "mean", or "each" for the readings of every
        head beside. n_snapshots: windows that are snapshots, evenly spread over the text, as far as one layer of them
        fits the budget in float64. n_scalogram: those of them whose rows are transformed, n_rows of each. n_null:
        windows given to each null, 0 for none. n_modes: modes drawn. budget_mib: memory for snapshots; beyond it they
        go to a temporary file of at most disk_mib; beyond that only their leading directions are kept, and the share
        of energy that this leaves out is reported.
        """

        skip_rows: int = 8
        sink: str = "separate"
        window: str = "band"
        bands: Sequence[float] = ()
        scales: Sequence[float] = ()
        omega0: float = 6.0
        dominant: str = "relative"
        heads: str = "mean"
        n_snapshots: int = 150
        n_scalogram: int = 16
        n_rows: int = 32
        n_null: int = 8
        n_modes: int = 3
        n_bins: int = 64
        budget_mib: int = 192
        disk_mib: int = 8192

    def __init__(self, view: ModelView, corpus: Corpus, options: Options | None = None):
        super().__init__(view, corpus, options)
        refuse_corpus(corpus)
        refuse_options(self.options, corpus.window)
        chosen, window = self.options, corpus.window
        self.morlet = Morlet(tuple(chosen.scales) or default_scales(window), self._n_lags(), omega0=chosen.omega0)
        self.n_heads = view.n_heads if chosen.heads == "each" else 0
        self.snapshots, self.storage = self._storage()
        n = len(self.snapshots)
        with_z = n == corpus.n_windows and not self.n_heads  # else most maps would be made for nothing
        self.sites = frozenset({"attention", "attn_mean"} if with_z else {"attention"})
        counts = {2**k for k in range(3, n.bit_length()) if 2**k < n} | {n, min(n, max(chosen.n_null, 8))}
        self.design = Design(
            bands=(*(tuple(chosen.bands) or default_bands(window)), np.inf) if chosen.window != "none" else (np.inf,),
            window=chosen.window,
            n_modes=min(chosen.n_modes, n - 1),
            n_bins=min(chosen.n_bins, window),
            counts=tuple(sorted(counts)),
            ranks=tuple(2**k for k in range((n // 2).bit_length())),
        )
        self.sampled = self.snapshots[spread(n, chosen.n_scalogram)]
        widths = self._widths()
        plans = {width: self._plan(width) for width in dict.fromkeys(widths)}
        self.entries = [plans[width].entries for width in widths]
        self.layers = [Layer(plans[width]) for width in widths]

    def _n_lags(self) -> int:
        return self.corpus.window if self.view.causal else 2 * self.corpus.window - 1

    def _widths(self) -> list[int | None]:
        """Lags that each layer sees, where a sliding window bounds them."""
        return [width if width and width < self.corpus.window else None for width in self.view.windows]

    def _plan(self, width: int | None) -> Plan:
        chosen, window = self.options, self.corpus.window
        entries = Entries(window, causal=self.view.causal, skip_rows=chosen.skip_rows, sink=chosen.sink, width=width)
        rows = np.arange(entries.first_row, window)
        rows = rows[spread(len(rows), chosen.n_rows)]
        return Plan(self.corpus, entries, self.morlet, self.snapshots, self.sampled, rows, self.n_heads, self.storage)

    def _storage(self) -> tuple[Int64[np.ndarray, " snapshot"], int | str]:
        """The windows that are snapshots, and where they are kept: in memory, on disk, or that many directions."""
        window, options = self.corpus.window, self.options
        n_fields = self.view.n_layers * (1 + self.n_heads)
        n_entries = window * (window + 1) // 2 if self.view.causal else window**2
        budget = options.budget_mib * 2**20
        chosen = spread(self.corpus.n_windows, min(options.n_snapshots, budget // (8 * n_entries)))
        size = n_fields * n_entries * 4 * len(chosen)
        if len(chosen) >= FEWEST_SNAPSHOTS and size <= max(budget, min(options.disk_mib * 2**20, room())):
            return chosen, "memory" if size <= budget else "disk"
        rank = rank_within(budget, n_fields=n_fields, n_entries=n_entries)
        if rank < FEWEST_DIRECTIONS:
            raise Refused(
                f"fields asked for; {options.budget_mib} MiB hold {len(chosen)} maps of {window} tokens, or {rank} "
                f"directions of {n_fields} fields, and {FEWEST_DIRECTIONS} are the fewest: set fields.budget_mib to at "
                f"least {FEWEST_SNAPSHOTS * n_entries * 8 // 2**20 + 1}, or take shorter windows"
            )
        return spread(self.corpus.n_windows, options.n_snapshots), rank

    def observe(self, layer: int, sites: LayerSites, batch: Batch) -> None:
        windows = batch.windows.numpy()
        rows = np.flatnonzero(np.isin(windows, self.snapshots))
        if not len(rows):
            return
        attention = sites.attention if len(rows) == len(windows) else sites.attention.of_rows(rows)
        maps = maps_of_heads(attention) if self.n_heads else attention.mean_probs[None]
        self.layers[layer].observe(maps, windows[rows])

    def kept_bytes(self) -> int:
        """Snapshots kept in memory, and those of one field in float64, twice, while it is read."""
        n_fields, n, n_entries = self.view.n_layers * (1 + self.n_heads), len(self.snapshots), len(self.entries[0])
        rows = {"memory": n, "disk": 0}.get(self.storage, 0) if isinstance(self.storage, str) else 3 * self.storage
        return super().kept_bytes() + n_entries * (4 * rows * n_fields + 16 * n)

    def finalize(self) -> xr.Dataset:
        """Readings of the shared pass. Layers are read one by one, so only one is ever held in float64."""
        of_rows = self._row_coefficients()
        readings = [
            layer.readings(self.design, of_rows.get(entries))
            for layer, entries in zip(self.layers, self.entries, strict=True)
        ]
        data = field_dataset(readings, self)
        return dominant(data, self.options.dominant)

    def _row_coefficients(self) -> dict[Entries, RowCoefficients]:
        """What the coherence between positions is read from; nothing where no window on lag has a scale."""
        scales = [band for band in self.design.bands if np.isfinite(band)]
        positions, omega0 = coherence_positions(self.entries[0]), self.morlet.omega0
        return {e: RowCoefficients(e, positions, scales, omega0=omega0) for e in set(self.entries)} if scales else {}

    def chance(self) -> xr.Dataset:
        """The readings that a null is compared by."""
        return field_dataset([layer.chance(self.design) for layer in self.layers], self)

    @property
    def n_null(self) -> int:
        return max(self.options.n_null, FEWEST_SNAPSHOTS) if self.options.n_null else 0

    def null(self, few: Corpus) -> Fields:
        return Fields(self.view, few, replace(self.options, heads="mean", n_null=few.n_windows, n_modes=1))

    def with_nulls(self, data: xr.Dataset, null: Fields | None, run_pass: Pass, seed: int) -> xr.Dataset:
        """The same architecture untrained, and the trained model on shuffled tokens, on a few windows each."""
        if not self.options.n_null:
            return data
        if null is not None:
            data = with_chance(data, null.chance(), "null")
        few = self.corpus.of_windows(spread(self.corpus.n_windows, self.n_null))
        del null  # its snapshots, before the next are made
        shuffled = self.null(chance_corpus(few, seed))
        run_pass(shuffled.corpus, [shuffled], task="shuffled null")
        data = with_chance(data, shuffled.chance(), "null_shuffled")
        return dominant(data, self.options.dominant)


def default_bands(window: int) -> tuple[float, ...]:
    """Scales of the windows on lag: powers of two from 4 to an eighth of a window (4, 8, 16, 32 for 256 tokens)."""
    return tuple(float(2**k) for k in range(2, max(3, int(np.log2(window / 8)) + 1)))


def refuse_corpus(corpus: Corpus) -> None:
    """Raise Refused for windows that are no ensemble of equal maps."""
    if corpus.n_windows < FEWEST_SNAPSHOTS:
        raise Refused(
            f"fields asked for of {corpus.n_windows} windows; an ensemble needs at least {FEWEST_SNAPSHOTS}: "
            "read more text, or shorter windows"
        )
    if corpus.lengths.min() < corpus.window:
        short = int((corpus.lengths < corpus.window).sum())
        raise Refused(
            f"fields asked for; {short} of {corpus.n_windows} windows are shorter than the {corpus.window} tokens of "
            "the others, and snapshots must be equally long: leave short ends out (--tail drop)"
        )
    if corpus.window < SHORTEST_WINDOW:
        raise Refused(
            f"fields asked for of windows of {corpus.window} tokens; scales need at least {SHORTEST_WINDOW}: "
            "give a longer --window"
        )


def refuse_options(options: Fields.Options, window: int) -> None:
    """Raise RheoscopeError for a choice that does not exist or does not fit a window."""
    choices = {"sink": SINKS, "window": WINDOWS, "dominant": ("relative", "raw"), "heads": ("mean", "each")}
    for name, allowed in choices.items():
        if getattr(options, name) not in allowed:
            raise RheoscopeError(
                f"fields.{name}={getattr(options, name)} asked for; choose one of {', '.join(allowed)}"
            )
    if not 0 <= options.skip_rows <= window // 2:
        raise RheoscopeError(
            f"fields.skip_rows={options.skip_rows} asked for; windows of {window} tokens can spare 0 to {window // 2}"
        )
    for scale in (*options.scales, *options.bands):
        if not isinstance(scale, int | float):
            raise RheoscopeError(f"scale {scale!r} asked for of fields; give a list of numbers, such as [4, 8, 16]")
        if scale <= 0 or least_window(scale) > window:
            raise RheoscopeError(
                f"scale {scale:g} asked for; it needs windows of at least {least_window(scale)} tokens "
                f"and a size above 0, and these have {window}: give smaller scales or a longer --window"
            )
    positive = ("n_scalogram", "n_rows", "n_modes", "n_bins", "omega0")
    if min(getattr(options, name) for name in positive) <= 0 or options.n_null < 0:
        raise RheoscopeError(f"fields.{', '.join(positive)} must be above 0, and n_null at least 0: give such numbers")
    if options.n_snapshots < FEWEST_SNAPSHOTS:
        raise RheoscopeError(
            f"fields.n_snapshots={options.n_snapshots} asked for; an ensemble needs at least {FEWEST_SNAPSHOTS}"
        )
