"""What the report shows of ablations: the table of variants, parallel layers, gates, pressure and prefixes."""

from __future__ import annotations

import numpy as np
import xarray as xr
from scipy.stats import spearmanr

from rheoscope.report.figures import caption
from rheoscope.report.figures_score_edits import SCORE_EDITS
from rheoscope.report.figures_steering_edits import (
    defect_against_cost,
    defect_beside_cost,
    gain_figure,
    gate_figure,
    lines_by,
    parallel_curves,
    response_figure,
    variant_bars,
)
from rheoscope.report.panels import Panel, Question, Section, View
from rheoscope.report.words import number


def _signed(value: float) -> str:
    return f"{float(value):+.3f}"


def _variants(dataset: xr.Dataset) -> Panel:
    change = dataset.variant_change.sel(spare="none")
    spared = dataset.variant_change.sel(spare="first")
    tangential, radial = (f"{part}-only FFN" for part in ("tangential", "radial"))
    views = [View("All layers", variant_bars(dataset), caption(dataset, "variant_change"))]
    names = ["variant_change"]
    if "variant_change_by_layer" in dataset:
        figure = lines_by(dataset, "variant_change_by_layer", "variant")
        views.append(View("One layer", figure, caption(dataset, "variant_change_by_layer")))
        names.append("variant_change_by_layer")
    return Panel(
        title="Which part of the FFN does the work?",
        answer=f"Keeping only what turns the token costs {_signed(change.sel(variant=tangential))} nats per token, "
        f"keeping "
        f"only what stretches it {_signed(change.sel(variant=radial))}. With the first token of each window left "
        f"alone: "
        f"{_signed(spared.sel(variant=tangential))} and {_signed(spared.sel(variant=radial))}.",
        views=tuple(views),
        quantities=tuple(names),
    )


def _parallel_layers(dataset: xr.Dataset) -> Panel:
    cost = dataset.parallel_change_by_layer.values
    together = [_rank_correlation(dataset[f"parallel_{name}"].values, cost) for name in ("defect", "displacement")]
    return Panel(
        title="Does the defect foretell what a parallel layer costs?",
        answer=f"Over the layers, the ranks of defect and measured cost correlate by {number(together[0])}, those of "
        f"displacement and cost by {number(together[1])}.",
        views=(
            View("By depth", defect_beside_cost(dataset), caption(dataset, "parallel_change_by_layer")),
            View("Against defect", defect_against_cost(dataset), "Every point is a layer, coloured by depth."),
        ),
        quantities=("parallel_defect", "parallel_displacement", "parallel_change_by_layer"),
    )


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's correlation, equal values at the mean of their ranks; NaN where one of them is constant."""
    return float(spearmanr(a, b).statistic) if len(a) > 2 and np.ptp(a) and np.ptp(b) else float("nan")


def _curve(dataset: xr.Dataset) -> Panel:
    random = dataset.parallel_change_random
    orders = {"defect": dataset.parallel_change_low, "displacement": dataset.parallel_change_displacement}
    said = [f"{_beaten(change, random)} for low {name} first" for name, change in orders.items()]
    reading = "The band spans the random choices. " + caption(dataset, "parallel_change_low")
    views = [View("Linear", parallel_curves(dataset), reading)]
    if min(float(change.min()) for change in (*orders.values(), random, dataset.parallel_change_high)) > 0:
        views.append(View("Logarithmic", parallel_curves(dataset, log=True), reading))
    return Panel(
        title="How many layers can be made parallel?",
        answer=f"Number of layers at which an order is cheaper than every random choice ({dataset.sizes['choice']} of "
        f"them): {', '.join(said)}.",
        views=tuple(views),
        quantities=(
            "parallel_change_low",
            "parallel_change_displacement",
            "parallel_change_random",
            "parallel_speedup_low",
        ),
    )


def _beaten(change: xr.DataArray, random: xr.DataArray) -> str:
    """The numbers of layers at which an order costs less than every random choice."""
    cheaper = (change < random.min("choice")).values
    return " and ".join(str(n) for n, beats in zip(change.n_parallel.values, cheaper, strict=True) if beats) or "none"


def _gates(dataset: xr.Dataset) -> Panel:
    changes = [
        f"{_signed(dataset[f'gate_change_{split}'])} ± {float(dataset[f'gate_change_{split}_se']):.3f}"
        for split in ("calibration", "held_out")
    ]
    return Panel(
        title="Does the FFN write too much or too little?",
        answer=f"The mean gate is {number(float(dataset.gate_mean))}; the loss changes by {changes[0]} on the text "
        f"of the "
        f"fit and by {changes[1]} nats per token on text it never saw.",
        views=(View("", gate_figure(dataset), caption(dataset, "gate")),),
        quantities=("gate", "gate_mean", "gate_change_calibration", "gate_change_held_out"),
    )


def _pressure(dataset: xr.Dataset) -> Panel:
    last = dataset.diversity_by_edit.isel(layer=-1)
    full, without = (float(last.sel(edit=edit)) for edit in ("full", "zero-FFN"))
    by_edit = lines_by(dataset, "diversity_by_edit", "edit", axis="diversity after the layer")
    by_gain = lines_by(
        dataset, "diversity_by_gain", "gain", axis="diversity after the layer", ordered=True, label="x {}"
    )
    return Panel(
        title="What keeps the tokens apart?",
        answer=f"After the last layer diversity is {number(full)}, and {number(without)} when the FFN writes nothing.",
        views=(
            View("Without a part", by_edit, caption(dataset, "diversity_by_edit")),
            View("More attention", by_gain, caption(dataset, "diversity_by_gain")),
            View("Loss", gain_figure(dataset), caption(dataset, "gain_change")),
        ),
        quantities=("diversity_by_edit", "diversity_by_gain", "gain_change"),
    )


def _prefix(dataset: xr.Dataset) -> Panel:
    longest, last = dataset.keep.values[-1], float(dataset.prefix_turn.isel(keep=-1, layer=-1))
    names = ("prefix_turn", "prefix_deficit_change", "prefix_defect_change")
    labels = ("Direction", "Deficit", "Defect")
    views = [
        View(label, lines_by(dataset, name, "keep", ordered=True, label="last {} kept"), caption(dataset, name))
        for label, name in zip(labels, names, strict=True)
    ]
    views.append(View("Response by lag", response_figure(dataset), caption(dataset, "attention_response")))
    return Panel(
        title="How far back does a token remember?",
        answer=f"With the last {longest} tokens kept and all before them exchanged, the last token enters the last "
        f"layer "
        f"turned by {number(last)} degrees.",
        views=tuple(views),
        quantities=(*names, "attention_response"),
    )


ABLATION = Section(
    title="Ablation",
    instrument="ablation",
    lead="What the model loses when a part of what its layers write is taken away. Every change is a loss with the "
    "edit "
    "minus the loss without, on the same windows.",
    questions=(
        Question(("variant_change",), _variants),
        Question(("parallel_change_by_layer", "parallel_defect"), _parallel_layers),
        Question(("parallel_change_low", "parallel_change_random"), _curve),
        Question(("gate", "gate_change_held_out"), _gates),
        Question(("diversity_by_edit", "gain_change"), _pressure),
        Question(("prefix_turn", "attention_response"), _prefix),
        *SCORE_EDITS,
    ),
)
