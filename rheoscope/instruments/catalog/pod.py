"""Catalogue rows of the fields dataset that come from the decomposition: energies, ranks, decay and modes.

λ_k are the eigenvalues of the covariance of the windowed field w(τ) u, falling; u is the fluctuation of the attention
map of one text about the mean over texts, τ = i - j the lag.
"""

from __future__ import annotations

from rheoscope.instruments.catalog.quantity import Quantity

PAPER = "arXiv 2606.06573"
OURS = "this project"
_INF = float("inf")
SHARE, COUNT, ANY = (0.0, 1.0), (0.0, _INF), (-_INF, _INF)


def field_row(
    name: str, dims: tuple[str, ...], unit: str, long_name: str, caption: str, equation: str, **more
) -> Quantity:
    fields = {"bounds": COUNT, "source": PAPER} | more
    return Quantity(
        name=name,
        instrument="fields",
        dims=("layer", *dims),
        unit=unit,
        long_name=long_name,
        caption=caption,
        equation=equation,
        **fields,
    )


_SPECTRUM = (
    field_row(
        "eigenvalues",
        ("band", "component"),
        "1",
        "mode energy",
        "The energy of each pattern (mode) of change between texts, the strongest first.",
        "λ_k of (1/N) Σ_s (w u_s)(w u_s)ᵀ",
    ),
    field_row(
        "h_star",
        ("band", "level"),
        "modes",
        "modes needed, H*",
        "How many patterns hold 90, 95 or 99 % of what changes from text to text. It grows with the number of texts, "
        "and can never reach it.",
        "H*(ε): least n with Σ_(k>n) λ_k ≤ ε Σ λ_k, ε = 1 - level/100",
        bounds=COUNT,
    ),
    field_row(
        "h_star_everything",
        ("level",),
        "modes",
        "modes needed, whole map",
        "The same number without a window on lag and with first rows and first column left in.",
        "H*(ε) over all visible entries",
        bounds=COUNT,
    ),
    field_row(
        "h_star_limited",
        ("band", "level"),
        "1",
        "H* limited by the number of texts",
        "1 where more than 60 % of all modes that so many texts can have are needed: then more texts would give more.",
        "1 if H* > 0.6 N, else 0",
        bounds=SHARE,
    ),
    field_row(
        "h_star_by_count",
        ("band", "count", "level"),
        "modes",
        "modes needed, by number of texts",
        "How the number of modes needed grows with the number of texts. Compare it with a null at equal numbers only.",
        "H*(ε) of N snapshots, mean over up to four disjoint subsets",
        bounds=COUNT,
    ),
    field_row(
        "h_star_per_head",
        ("band", "level"),
        "1",
        "modes needed per head",
        "Modes needed beside the number of heads. Advice at most: no theorem links a basis of the ensemble to how many "
        "heads work in parallel. Prune heads and measure the loss to find out.",
        "H*(ε) / number of heads",
        bounds=COUNT,
    ),
    field_row(
        "discarded_share",
        ("band",),
        "1",
        "energy left out by the memory budget",
        "0 where all snapshots are kept. Otherwise the share of energy that no eigenvalue holds; H* counts it as left "
        "out and is an upper bound.",
        "(Σ λ - Σ λ kept) / Σ λ",
        bounds=SHARE,
        source=OURS,
    ),
    field_row(
        "reconstruction_error",
        ("band", "rank"),
        "1",
        "error of a reconstruction",
        "How much of what changes from text to text the first modes leave out, on the texts that they were made from.",
        "Σ_(k>n) λ_k / Σ λ_k",
        bounds=SHARE,
    ),
    field_row(
        "held_out_error",
        ("band", "rank"),
        "1",
        "error of a reconstruction of other texts",
        "How much the modes of one half of the documents leave out of the other half. Above the error on their own "
        "half by as much as modes fit those texts only.",
        "Σ_test ‖x - Σ_(k≤n) ⟨x, φ_k⟩ φ_k‖² / Σ_test ‖x‖², x = w (A - Ā_train)",
        bounds=COUNT,
        source=OURS,
    ),
    field_row(
        "held_out_at_h_star",
        ("band", "level"),
        "1",
        "error on other texts at H*",
        "What as many modes as one half of the documents needs for 90, 95 or 99 % leave out of the other half.",
        "held-out error at n = H*(ε) of the training half",
        bounds=COUNT,
        source=OURS,
    ),
)

_DECAY = (
    ("beta", "decay exponent β", "How fast the energy of modes falls: λ_k ~ k^-β.", "slope of log λ_k on log k"),
    ("beta_low", "decay exponent β, lower end", "Lower end of the 95 % interval of the straight line.", "β - t s_β"),
    ("beta_high", "decay exponent β, upper end", "Upper end of the 95 % interval of the straight line.", "β + t s_β"),
    ("beta_last", "modes fitted", "How many modes the line was fitted to; 0 where too few are usable.", "min(30, N/4)"),
    ("beta_least", "β, least over ranges", "The least β over half, once and twice the range of modes.", "min β"),
    ("beta_most", "β, most over ranges", "The largest β over half, once and twice the range of modes.", "max β"),
    (
        "spectral_temperature",
        "spectral temperature",
        "Large: energy falls slowly and many modes share it. The source says the opposite in places; this follows its "
        "formula.",
        "T = 1/β",
    ),
)

_MODES = (
    field_row(
        "mode",
        ("band", "mode_number", "query_bin", "key_bin"),
        "1",
        "mode",
        "A pattern in which attention changes from text to text: where one colour grows, the other shrinks.",
        "φ_k, orthonormal; means over bins of the map",
        bounds=ANY,
    ),
    field_row(
        "coefficients",
        ("band", "snapshot", "mode_number"),
        "1",
        "coefficient of a mode",
        "How much of each pattern is in the attention of each text, and with which sign.",
        "⟨w u_s, φ_k⟩ = sqrt(N λ_k) v_k(s)",
        bounds=ANY,
    ),
    field_row(
        "mode_lag_profile",
        ("band", "mode_number", "lag"),
        "1",
        "mode at a distance",
        "The average of a mode over all pairs this far apart.",
        "mean over rows of φ_k(i, i - τ)",
        bounds=ANY,
    ),
    field_row(
        "mode_peak_lag",
        ("band", "mode_number"),
        "tokens",
        "peak distance of a mode",
        "The distance at which that average is largest in size.",
        "argmax_τ |φ_k(τ)| over the lags that at least a quarter of the rows have",
        bounds=ANY,
    ),
    field_row(
        "coherence",
        ("coherence_scale", "row", "other_row"),
        "1",
        "coherence between positions",
        "Whether the attention rows of two positions change together from text to text, at one scale, close by. "
        "What chance gives for so few texts is taken off.",
        "γ_ij = |E W_i W̄_j| / sqrt(E|W_i|² E|W_j|²), with γ² corrected to ((N-1)γ² - 1)/(N-2)",
        bounds=SHARE,
    ),
    field_row(
        "coherence_raw",
        ("coherence_scale", "row", "other_row"),
        "1",
        "coherence between positions, as it is",
        "The same before the correction. N unrelated texts give about 1/sqrt(N).",
        "γ_ij = |E W_i W̄_j| / sqrt(E|W_i|² E|W_j|²)",
        bounds=SHARE,
    ),
)

POD: tuple[Quantity, ...] = (
    *_SPECTRUM,
    *(
        field_row(name, ("band",), "1", long_name, caption, equation, bounds=ANY)
        for name, long_name, caption, equation in _DECAY
    ),
    *_MODES,
)
