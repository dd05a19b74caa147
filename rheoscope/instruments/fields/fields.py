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

from rheoscope.corpus import Batch, Corpus
from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.fields.coherence import coherence_positions
from rheoscope.instruments.fields.dataset import field_dataset
from rheoscope.instruments.fields.ensemble import Design
from rheoscope.instruments.fields.entries import SINKS, Entries
from rheoscope.instruments.fields.layer import Layer
from rheoscope.instruments.fields.nulls import chance_corpus, dominant, with_chance
from rheoscope.instruments.fields.pod import WINDOWS
from rheoscope.instruments.fields.snapshots import rank_within
from rheoscope.instruments.fields.wavelets import Morlet, default_scales, least_window
from rheoscope.instruments.instrument import Instrument, LayerSites, Pass
from rheoscope.instruments.sampling import spread
from rheoscope.models.untrained import untrained
from rheoscope.models.view import ModelView
from rheoscope.stats import OWN

FEWEST_SNAPSHOTS = 8
SHORTEST_WINDOW = 16
FEWEST_DIRECTIONS = 8  # of the streaming form; below it says next to nothing


class Fields(Instrument):
    """Multiscale POD of attention: intensity, scalograms, spectra, H*, modes and coherence of every layer."""

    name = "fields"
    sites = frozenset({"attention", "attn_probs"})
    kept: ClassVar = {"layers": OWN}

    @dataclass(frozen=True)
    class Options:
        """skip_rows: first queries of a causal map that are left out, because their rows are short.

        sink: "separate" leaves key 0 out and reports its variance apart, "keep" does not. window: what is laid on lags
        before the decomposition, "band", "low_pass" (published) or "none"; bands: its scales in tokens, powers of two
        from 4 to an eighth of a window if empty; the field without a window always comes last. scales: of the wavelets
        in tokens, 2 to a quarter of a window if empty. omega0: centre frequency, 5 as published. dominant: "relative"
        to a null, or "raw" for the published top four by energy. heads: "mean", or "each" for the readings of every
        head beside. n_scalogram: windows whose rows are transformed; n_null: windows given to each null, 0 for none;
        n_modes: modes drawn. budget_mib: memory for snapshots; beyond it only their leading directions are kept, and
        the share of energy that this leaves out is reported.
        """

        skip_rows: int = 8
        sink: str = "separate"
        window: str = "band"
        bands: Sequence[float] = ()
        scales: Sequence[float] = ()
        omega0: float = 6.0
        dominant: str = "relative"
        heads: str = "mean"
        n_scalogram: int = 16
        n_null: int = 16
        n_modes: int = 3
        n_bins: int = 64
        budget_mib: int = 1024

    def __init__(self, view: ModelView, corpus: Corpus, options: Options | None = None):
        super().__init__(view, corpus, options)
        refuse_corpus(corpus)
        refuse_options(self.options, corpus.window)
        chosen, window = self.options, corpus.window
        self.morlet = Morlet(tuple(chosen.scales) or default_scales(window), self._n_lags(), omega0=chosen.omega0)
        n = corpus.n_windows
        counts = {2**k for k in range(3, n.bit_length()) if 2**k < n} | {n, min(n, max(chosen.n_null, 8))}
        self.design = Design(
            bands=(*(tuple(chosen.bands) or default_bands(window)), np.inf) if chosen.window != "none" else (np.inf,),
            window=chosen.window,
            n_modes=min(chosen.n_modes, n - 1),
            n_bins=min(chosen.n_bins, window),
            counts=tuple(sorted(counts)),
            ranks=tuple(2**k for k in range((n // 2).bit_length())),
        )
        shared: dict[int | None, Entries] = {}
        self.entries = [shared.setdefault(width, self._entries(width)) for width in self._widths()]
        self.sampled = spread(n, chosen.n_scalogram)
        self.n_heads = view.n_heads if chosen.heads == "each" else 0
        rank = self._rank()
        self.layers = [
            Layer(corpus, entries, self.morlet, self.sampled, self.n_heads, rank) for entries in self.entries
        ]

    def _n_lags(self) -> int:
        return self.corpus.window if self.view.causal else 2 * self.corpus.window - 1

    def _widths(self) -> list[int | None]:
        """Lags that each layer sees, where a sliding window bounds them."""
        return [
            width if self.view.causal and width and width < self.corpus.window else None for width in self.view.windows
        ]

    def _entries(self, width: int | None) -> Entries:
        chosen = self.options
        return Entries(
            self.corpus.window, causal=self.view.causal, skip_rows=chosen.skip_rows, sink=chosen.sink, width=width
        )

    def _rank(self) -> int | None:
        """Directions kept of every field in the streaming form; None where all snapshots fit the budget."""
        n_fields, n_entries = self.view.n_layers * (1 + self.n_heads), len(self.entries[0])
        budget = self.options.budget_mib * 2**20
        if n_fields * n_entries * 4 * self.corpus.n_windows <= budget:
            return None
        rank = rank_within(budget, n_fields=n_fields, n_entries=n_entries)
        if rank < FEWEST_DIRECTIONS:
            raise Refused(
                f"fields asked for; {self.options.budget_mib} MiB hold {rank} directions of {n_fields} maps of "
                f"{self.corpus.window} tokens, and {FEWEST_DIRECTIONS} are the fewest: set fields.budget_mib to at "
                f"least {FEWEST_DIRECTIONS * n_fields * n_entries * 12 // 2**20 + 1}, or take shorter windows"
            )
        return rank

    def observe(self, layer: int, sites: LayerSites, batch: Batch) -> None:
        self.layers[layer].observe(sites.attention.probs, batch.windows.numpy())

    def finalize(self) -> xr.Dataset:
        """Readings of the shared pass. Layers are read one by one, so only one is ever held in float64."""
        positions = coherence_positions(self.entries[0])
        readings = [layer.readings(self.design, positions) for layer in self.layers]
        data = field_dataset(readings, self)
        return dominant(data, self.options.dominant)

    def with_nulls(self, data: xr.Dataset, run_pass: Pass, seed: int) -> xr.Dataset:
        """The same architecture untrained, and the trained model on shuffled tokens, on `n_null` windows each."""
        if not self.options.n_null:
            return data
        few = self.corpus.of_windows(spread(self.corpus.n_windows, max(self.options.n_null, FEWEST_SNAPSHOTS)))
        options = replace(self.options, heads="mean", n_null=few.n_windows, n_modes=1)
        null = Fields(self.view, few, options)
        with untrained(self.view, seed):
            run_pass(few, [null], task="untrained null")
        data = with_chance(data, null.finalize(), "null")
        shuffled = Fields(self.view, chance_corpus(few, seed), options)
        run_pass(shuffled.corpus, [shuffled], task="shuffled null")
        data = with_chance(data, shuffled.finalize(), "null_shuffled")
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
    if min(options.n_scalogram, options.n_modes, options.n_bins, options.omega0) <= 0 or options.n_null < 0:
        raise RheoscopeError(
            "fields.n_scalogram, n_modes, n_bins and omega0 must be above 0, and n_null at least 0: give such numbers"
        )
