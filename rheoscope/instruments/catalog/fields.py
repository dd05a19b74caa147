"""Catalogue rows of the fields dataset: attention maps as an ensemble of fields.

A is the attention map of one text in one layer, averaged over heads; Ā its mean over texts; u = A - Ā. Lag τ = i - j is
query minus key.
"""

from __future__ import annotations

from rheoscope.instruments.catalog.pod import ANY, COUNT, OURS, POD, SHARE, field_row
from rheoscope.instruments.catalog.quantity import Quantity

_SCALE_NULL = "A null is needed to read it, because most profiles simply fall with distance."

_INTENSITY = (
    field_row(
        "intensity",
        (),
        "1",
        "turbulent intensity",
        "How much of a layer's attention changes from text to text. 0: the same map whatever the text; near 1: hardly "
        "anything is shared. First rows and sink are left out as the options say.",
        "Σ_s ‖u_s‖² / Σ_s ‖A_s‖²",
        bounds=SHARE,
        summary="median",
    ),
    field_row(
        "intensity_by_lag",
        ("lag",),
        "1",
        "turbulent intensity at a distance",
        "The same share among pairs of positions this far apart.",
        "Σ_s ‖u_s(τ)‖² / Σ_s ‖A_s(τ)‖²",
        bounds=SHARE,
    ),
    field_row(
        "intensity_everything",
        (),
        "1",
        "turbulent intensity, whole map",
        "The same share with the first rows and the first column left in, which dominate it in most models.",
        "Σ_s ‖u_s‖² / Σ_s ‖A_s‖² over all visible entries",
        bounds=SHARE,
    ),
    field_row(
        "sink_variance_share",
        (),
        "1",
        "variance in the first column",
        "How much of what changes from text to text is attention to the very first token.",
        "Σ_s ‖u_s(·, 0)‖² / Σ_s ‖u_s‖²",
        bounds=SHARE,
        source=OURS,
        summary="median",
    ),
    field_row(
        "first_rows_variance_share",
        (),
        "1",
        "variance in the first rows",
        "How much of it lies in the rows of the first queries, which have few keys to choose from.",
        "Σ_s Σ_(i < skip_rows) ‖u_s(i, ·)‖² / Σ_s ‖u_s‖²",
        bounds=SHARE,
        source=OURS,
    ),
    field_row(
        "lag_profile",
        ("lag",),
        "1",
        "attention at a distance",
        "The average attention that a position pays to the one this many tokens before it.",
        "mean over texts and rows of A(i, i - τ)",
        bounds=SHARE,
    ),
    field_row(
        "lag_profile_everything",
        ("lag",),
        "1",
        "attention at a distance, whole map",
        "The same average with first rows and first column left in.",
        "mean over texts and all visible entries of A(i, i - τ)",
        bounds=SHARE,
    ),
)

_SCALES = (
    field_row(
        "scalogram",
        ("scale", "lag"),
        "1",
        "wavelet energy by scale and distance",
        "How strong a pattern of each size is in the rows of attention, and how far back it lies. Blank: too near "
        "an end of the rows to say.",
        "mean over texts and rows of |W(a, τ)|²; a sinusoid of height h at its scale has h²",
    ),
    field_row(
        "scalogram_by_position",
        ("scale", "position"),
        "1",
        "wavelet energy by scale and position",
        "How strong a pattern of each size is in the attention row of each position of the window.",
        "mean over texts and lags inside the cone of |W(a, τ)|²",
    ),
    field_row(
        "scale_energy",
        ("scale",),
        "1",
        "wavelet energy at a scale",
        f"How strong patterns of this size are in a layer's attention rows. {_SCALE_NULL}",
        "mean over texts, rows and lags inside the cone of |W(a, τ)|²",
    ),
    field_row(
        "dominant_scale",
        ("peak",),
        "tokens",
        "dominant scale",
        "The sizes at which attention is patterned more than before training, where such sizes stand out: at most "
        "four, the clearest first. None for a layer whose excess only rises or falls.",
        "local maxima of E(a) / E_null(a) above 1, clear of their surroundings by two standard errors",
    ),
)

_HEADS = (
    (
        "head_intensity",
        (),
        "1",
        "turbulent intensity of a head",
        "How much of a head's attention changes from text to text.",
        "Σ_s ‖u_s‖² / Σ_s ‖A_s‖²",
        SHARE,
    ),
    (
        "head_h_star",
        ("band", "level"),
        "modes",
        "modes needed by a head",
        "How many patterns hold 90, 95 or 99 % of what changes in one head.",
        "H*(ε) of the head's own map",
        COUNT,
    ),
    (
        "head_beta",
        ("band",),
        "1",
        "decay exponent β of a head",
        "How fast the energy of one head's modes falls.",
        "slope of log λ_k on log k",
        ANY,
    ),
    (
        "head_lag_profile",
        ("lag",),
        "1",
        "attention of a head at a distance",
        "The average attention that one head pays at each distance.",
        "mean over texts and rows of A_h(i, i - τ)",
        SHARE,
    ),
)

FIELDS: tuple[Quantity, ...] = (
    *_INTENSITY,
    *_SCALES,
    *POD,
    *(
        field_row(name, ("head", *dims), unit, long_name, caption, equation, bounds=bounds)
        for name, dims, unit, long_name, caption, equation, bounds in _HEADS
    ),
)

FIELD_DIMENSIONS: dict[str, tuple[str, str]] = {
    "band": ("tokens", "scale of the window on lag, infinite for none"),
    "scale": ("tokens", "scale of the wavelet"),
    "level": ("%", "energy held"),
    "count": ("1", "number of texts"),
    "rank": ("1", "number of modes"),
    "mode_number": ("1", "mode, counted from 0"),
    "snapshot": ("1", "window of the text, counted from 0"),
    "query_bin": ("tokens", "query position"),
    "key_bin": ("tokens", "key position"),
    "peak": ("1", "place among the dominant scales, counted from 0"),
    "coherence_scale": ("tokens", "scale of the wavelet in coherence"),
    "row": ("tokens", "position"),
    "other_row": ("tokens", "other position"),
}
