"""What the report shows of attention as an ensemble of fields: intensity, scales, modes."""

from __future__ import annotations

import numpy as np
import xarray as xr

from rheoscope.report.axes import axis_name
from rheoscope.report.figures import Level, Line, by_depth, caption, heat_map
from rheoscope.report.figures_by_lag import lag_lines, lag_map
from rheoscope.report.figures_by_scale import (
    bands_by_depth,
    coherence_map,
    lines_by_layer,
    mode_pictures,
    scale_map,
    scales_by_depth,
    some_layers,
)
from rheoscope.report.panels import Panel, Question, Section, View
from rheoscope.report.theme import tone
from rheoscope.report.words import median, number, percent


def _whole(dataset: xr.Dataset) -> xr.Dataset:
    """The dataset at the window that passes everything, always the last."""
    return dataset.isel(band=-1)


def _intensity(dataset: xr.Dataset) -> Panel:
    share = percent(median(dataset.sink_variance_share)) if "sink_variance_share" in dataset else ""
    sink = f" Over the whole map, {share} of the change lies in attention to the first token." if share else ""
    lines = [Line("intensity", "field", "routing"), Line("intensity_everything", "whole map", "score")]
    depth = by_depth(dataset, [line for line in lines if line.name in dataset], axis="turbulent intensity")
    views = [View("By depth", depth, caption(dataset, "intensity"))]
    if "intensity_by_lag" in dataset:
        views.append(View("By distance", lag_map(dataset.intensity_by_lag), caption(dataset, "intensity_by_lag")))
    if "lag_profile" in dataset:
        views.append(View("Attention", lag_lines(dataset.lag_profile), caption(dataset, "lag_profile")))
    names = ("intensity", "intensity_everything", "sink_variance_share", "intensity_by_lag", "lag_profile")
    return Panel(
        title="How much of attention changes from text to text?",
        answer=f"{percent(median(dataset.intensity))} of it in the median layer.{sink}",
        views=tuple(views),
        quantities=tuple(name for name in names if name in dataset),
    )


def _scales(dataset: xr.Dataset) -> Panel:
    trained = "scale_energy_null" in dataset
    chance = dataset["scale_energy_null"] if trained else 1.0
    ratio = dataset.scale_energy / chance
    found = dataset.dominant_scale.isel(peak=0)
    some = int(np.isfinite(found).sum())
    figure = scales_by_depth(ratio, dataset.dominant_scale, "energy over untrained" if trained else "energy")
    against = "the same model before training" if trained else "even attention, which has none"
    said = f"the clearest is {number(median(found))} tokens in the median of them" if some else "so none is named"
    return Panel(
        title="At which sizes is attention patterned?",
        answer=f"Against {against}, {some} of {found.size} layers have a scale that stands out; {said}.",
        views=(View("", figure, f"{caption(dataset, 'dominant_scale')} Points mark them."),),
        quantities=("scale_energy", "dominant_scale"),
    )


def _scalograms(dataset: xr.Dataset) -> Panel:
    by_position = dataset.scalogram_by_position
    views = [
        View(
            str(layer),
            scale_map(by_position.sel(layer=layer), "position", "position", "energy"),
            f"{caption(dataset, 'scalogram_by_position')} Short rows have no room for large scales.",
        )
        for layer in some_layers(dataset)
    ]
    return Panel(
        title="Where in the window are these patterns?",
        answer=f"Read from the rows of {dataset.attrs.get('n_scalogram', 'some')} windows, layer by layer.",
        views=tuple(views),
        quantities=("scalogram_by_position",),
        choice="layer",
    )


def _distances(dataset: xr.Dataset) -> Panel:
    reading = caption(dataset, "scalogram")
    views = [
        View(str(layer), scale_map(dataset.scalogram.sel(layer=layer), "lag", "distance", "energy"), reading)
        for layer in some_layers(dataset)
    ]
    return Panel(
        title="How far back do they lie?",
        answer="Distance is counted from the query to the key; the blank wedge is too near an end of the rows.",
        views=tuple(views),
        quantities=("scalogram",),
        choice="layer",
    )


def _modes_needed(dataset: xr.Dataset) -> Panel:
    n = dataset.attrs.get("n_snapshots", 0)
    levels = [Level(0.6 * n, "above: limited by the number of texts"), Level(n - 1, "most there can be")] if n else []
    views = [
        View(
            f"Hold {level:g} %",
            bands_by_depth(
                dataset.h_star.sel(level=level),
                levels=levels,
                axis=f"modes that hold {level:g} %",
                errors=dataset.h_star_se.sel(level=level),
            ),
            f"{caption(dataset, 'h_star')} One line per window on distance.",
        )
        for level in dataset["level"].values
    ]
    whole = _whole(dataset).sel(level=90.0)
    limited = int((whole.h_star_limited > 0).sum()) if "h_star_limited" in dataset else 0
    per_head = f" That is {number(median(whole.h_star_per_head))} per head." if "h_star_per_head" in dataset else ""
    return Panel(
        title="How many patterns hold what changes?",
        answer=f"The median layer needs {number(median(whole.h_star))} modes for 90 %, of {n} texts.{per_head} "
        f"{limited} of {dataset.sizes['layer']} layers are limited by the number of texts.",
        views=tuple(views),
        quantities=("h_star", "h_star_limited", "h_star_per_head", "h_star_everything"),
    )


def _by_count(dataset: xr.Dataset) -> Panel:
    whole = _whole(dataset).sel(level=90.0)
    null = whole.get("h_star_by_count_null")
    figure = lines_by_layer(
        whole.h_star_by_count, "count", title="number of texts", axis="modes that hold 90 %", log=False, dashed=null
    )
    first, last = (number(median(whole.h_star_by_count.isel(count=place))) for place in (0, -1))
    ends = dataset["count"].values[[0, -1]]
    words = " Dashed: the same model before training." if null is not None else ""
    return Panel(
        title="Would more texts need more patterns?",
        answer=f"The median layer needs {first} modes with {ends[0]} texts and {last} with {ends[1]}. "
        "As long as the line rises, the number belongs to the text as much as to the model.",
        views=(View("", figure, f"{caption(dataset, 'h_star_by_count')} One line per layer.{words}"),),
        quantities=("h_star_by_count",),
    )


def _decay(dataset: xr.Dataset) -> Panel:
    whole = _whole(dataset)
    last = int(whole.beta_last.max())
    spectrum = lines_by_layer(whole.eigenvalues, "component", title="mode", axis="energy of a mode")
    if last:
        spectrum.add_vrect(x0=1, x1=last, fillcolor=tone("score band"), line_width=0, layer="below")
    exponent = bands_by_depth(dataset.beta, axis=axis_name(dataset.beta), errors=(dataset.beta_high - dataset.beta))
    defined = np.isfinite(whole.beta).values
    said = (
        f"β is {number(median(whole.beta))} in the median layer over modes 1 to {last}, so T = 1/β is "
        f"{number(median(whole.spectral_temperature))}; other ranges give {number(median(whole.beta_least))} to "
        f"{number(median(whole.beta_most))}."
        if defined.any()
        else "Too few modes are usable for an exponent."
    )
    return Panel(
        title="How fast does their energy fall?",
        answer=said,
        views=(
            View("Spectra", spectrum, f"{caption(dataset, 'eigenvalues')} Shaded: the modes that β is fitted to."),
            View("Exponent", exponent, "β by depth; bars are the 95 % interval of the straight line."),
        ),
        quantities=("eigenvalues", "beta", "spectral_temperature"),
    )


def _other_texts(dataset: xr.Dataset) -> Panel | None:
    whole = _whole(dataset)
    if not np.isfinite(whole.held_out_error).any():
        return None
    figure = lines_by_layer(
        whole.held_out_error,
        "rank",
        title="modes",
        axis="energy left out",
        log=False,
        dashed=whole.reconstruction_error,
    )
    at = whole.sel(level=90.0).held_out_at_h_star
    return Panel(
        title="Do the patterns hold on other texts?",
        answer=f"Modes that leave {percent(0.1)} out of the half they were made from leave {percent(median(at))} out "
        "of the other half, in the median layer.",
        views=(View("", figure, f"{caption(dataset, 'held_out_error')} Dashed: on their own texts."),),
        quantities=("held_out_error", "reconstruction_error", "held_out_at_h_star"),
    )


def _pictures(dataset: xr.Dataset) -> Panel:
    whole = _whole(dataset)
    views = [
        View(str(layer), mode_pictures(whole.sel(layer=layer)), caption(dataset, "mode"))
        for layer in some_layers(dataset)
    ]
    peaks = whole.mode_peak_lag.isel(mode_number=0)
    return Panel(
        title="What do the patterns look like?",
        answer=f"The first mode is strongest at distance {number(median(peaks))} in the median layer. Each title "
        "gives a mode's share of the energy; below each map is its average by distance.",
        views=tuple(views),
        quantities=("mode", "mode_lag_profile", "mode_peak_lag"),
        choice="layer",
    )


def _coherence(dataset: xr.Dataset) -> Panel:
    middle = dataset["coherence_scale"].values[dataset.sizes["coherence_scale"] // 2]
    values = dataset.coherence.sel(coherence_scale=middle)
    apart = values.where(values["row"] != values["other_row"])
    views = [
        View(str(layer), coherence_map(values.sel(layer=layer)), caption(dataset, "coherence"))
        for layer in some_layers(dataset)
    ]
    return Panel(
        title="Do positions change together?",
        answer=f"At a scale of {number(float(middle))} tokens two different positions have a coherence of "
        f"{number(median(apart))} in the median, once chance is taken off.",
        views=tuple(views),
        quantities=("coherence", "coherence_raw"),
        choice="layer",
    )


def _heads(dataset: xr.Dataset) -> Panel:
    return Panel(
        title="Which heads change most from text to text?",
        answer=f"{percent(median(dataset.head_intensity))} of the attention of the median head changes.",
        views=(View("", heat_map(dataset, "head_intensity"), caption(dataset, "head_intensity")),),
        quantities=("head_intensity",),
    )


FIELDS = Section(
    title="Attention fields",
    instrument="fields",
    lead="Each text gives one attention map per layer. Taken together they are an ensemble, like snapshots of a "
    "turbulent flow: a mean map, and what changes from text to text. Wavelets ask at which sizes a row of attention "
    "is patterned; modes are the patterns of change themselves. A window on distance keeps only pairs about "
    "so far apart.",
    questions=(
        Question(("intensity",), _intensity),
        Question(("scale_energy", "dominant_scale"), _scales),
        Question(("scalogram_by_position",), _scalograms),
        Question(("scalogram",), _distances),
        Question(("h_star", "h_star_se"), _modes_needed),
        Question(("h_star_by_count",), _by_count),
        Question(("eigenvalues", "beta"), _decay),
        Question(("held_out_error", "reconstruction_error"), _other_texts),
        Question(("mode", "mode_lag_profile", "eigenvalues"), _pictures),
        Question(("coherence",), _coherence),
        Question(("head_intensity",), _heads),
    ),
)
