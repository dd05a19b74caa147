"""What the report shows of ablations: the table of variants, parallel layers, gates, pressure and prefixes."""

from __future__ import annotations

import numpy as np
import xarray as xr

from .figures import caption
from .figures_steering_edits import (
    defect_against_cost,
    defect_beside_cost,
    gain_figure,
    gate_figure,
    lines_by,
    parallel_curves,
    response_figure,
    variant_bars,
)
from .panels import Panel, Question, Section, View
from .words import number


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
    defect, cost = dataset.parallel_defect.values, dataset.parallel_change_by_layer.values
    ranks = [np.argsort(np.argsort(values)) for values in (defect, cost)]
    together = float(np.corrcoef(*ranks)[0, 1]) if len(defect) > 2 and np.ptp(defect) else float("nan")
    return Panel(
        title="Does the defect foretell what a parallel layer costs?",
        answer=f"Over the layers, the ranks of defect and measured cost correlate by {number(together)}.",
        views=(
            View("By depth", defect_beside_cost(dataset), caption(dataset, "parallel_change_by_layer")),
            View("Against defect", defect_against_cost(dataset), "Every point is a layer, coloured by depth."),
        ),
        quantities=("parallel_defect", "parallel_change_by_layer"),
    )


def _curve(dataset: xr.Dataset) -> Panel:
    low, random = dataset.parallel_change_low, dataset.parallel_change_random
    cheaper = (low < random.min("choice")).values
    sizes = [str(size) for size, beaten in zip(dataset.n_parallel.values, cheaper, strict=True) if beaten]
    said = (
        f"cheaper than every random choice at {', '.join(sizes)} layers" if sizes else "never cheaper than all of them"
    )
    reading = "The band spans the random choices. " + caption(dataset, "parallel_change_low")
    views = [View("Linear", parallel_curves(dataset), reading)]
    if float(low.min()) > 0 and float(random.min()) > 0 and float(dataset.parallel_change_high.min()) > 0:
        views.append(View("Logarithmic", parallel_curves(dataset, log=True), reading))
    return Panel(
        title="How many layers can be made parallel?",
        answer=f"Taking layers of low defect first is {said} (of {dataset.sizes['choice']}).",
        views=tuple(views),
        quantities=("parallel_change_low", "parallel_change_random", "parallel_change_high", "parallel_speedup_low"),
    )


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
    by_gain = lines_by(dataset, "diversity_by_gain", "gain", axis="diversity after the layer", ordered=True)
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
        View(label, lines_by(dataset, name, "keep", ordered=True), caption(dataset, name))
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
    ),
)
