"""What the report shows of sinks: where heads rest, what turns them off, and how tokens grow alike."""

from __future__ import annotations

import numpy as np
import xarray as xr

from rheoscope.instruments.sinks.sinks import SinkReadings
from rheoscope.report.figures import Level, Line, by_depth, caption, heat_map
from rheoscope.report.figures_by_head import heads_against
from rheoscope.report.figures_sink_heads import KINDS, cost_figure, kind_map, kind_of_heads, output_figure, passage
from rheoscope.report.figures_smoothing import cosines_by_depth, mixing_curves, predicted_against_measured
from rheoscope.report.panels import Panel, Question, Section, View
from rheoscope.report.words import median, number, percent

_THRESHOLD = SinkReadings.Options().threshold
_MAPS = {
    "sink_mass": "Sink mass",
    "diagonal_mass": "Diagonal mass",
    "previous_mass": "Previous token",
    "hard_switch_share": "At rest",
    "value_ratio": "Sink's value",
    "hard_switch_dependence": "Decided by token",
}
_EXAMPLE = tuple(f"example_{part}" for part in ("text", "mass", "layer", "head", "off_tokens", "on_tokens"))
_OUTPUT = ("free_mass", "output_norm", "output_lower", "output_upper")
_DRAWN_LAYERS = 10  # whose outputs are drawn


def _kinds(dataset: xr.Dataset) -> Panel:
    counts = np.bincount(kind_of_heads(dataset, _THRESHOLD).ravel(), minlength=len(KINDS))
    words = ", ".join(f"{count} {kind}" for kind, count in zip(KINDS[1:], counts[1:], strict=True))
    reading = (
        f"A head is named after the largest of its masses where that exceeds {number(_THRESHOLD)}, and is mixed where "
        "none does."
    )
    names = [name for name in _MAPS if name in dataset]
    views = (View("Kinds", kind_map(dataset, _THRESHOLD), reading),)
    views += tuple(View(_MAPS[name], heat_map(dataset, name), caption(dataset, name)) for name in names)
    return Panel(
        title="Where do heads look when they rest?",
        answer=f"Of {counts.sum()} heads: {words}, {counts[0]} mixed.",
        views=views,
        quantities=tuple(names),
    )


def _by_depth(dataset: xr.Dataset) -> Panel:
    rates = dataset.sink_rate
    most = int(rates["layer"].values[np.nanargmax(rates.values)]) if np.isfinite(rates.values).any() else 0
    lines = [
        Line("sink_mass", "sink", "filtering"),
        Line("diagonal_mass", "diagonal", "routing"),
        Line("previous_mass", "previous token", "residue"),
    ]
    return Panel(
        title="At which depth do heads rest?",
        answer=f"{percent(float(rates.mean()))} of all heads are sinks; layer {most} has the largest share, "
        f"{percent(float(rates.max()))}.",
        views=(
            View("Masses", by_depth(dataset, lines, axis="mean attention"), caption(dataset, "sink_mass")),
            View(
                "Share of heads",
                by_depth(dataset, [Line("sink_rate", "sink heads", "filtering")]),
                caption(dataset, "sink_rate"),
            ),
        ),
        quantities=("sink_mass", "diagonal_mass", "previous_mass", "sink_rate"),
    )


def _switches(dataset: xr.Dataset) -> Panel | None:
    if not dataset.sizes["example"]:
        return None
    views = []
    for example in range(dataset.sizes["example"]):
        layer, head = (int(dataset[name].values[example]) for name in ("example_layer", "example_head"))
        off, on = (str(dataset[name].values[example]) for name in ("example_off_tokens", "example_on_tokens"))
        words = (
            f"Head {head} of layer {layer}. Most often at rest at {off or 'no token'}; least often at {on or 'none'}."
        )
        views.append(View(f"{layer}.{head}", passage(dataset, example), words))
    share = dataset.hard_switch_share.values
    switched = int(((share > 0) & (share < 1)).sum())
    return Panel(
        title="Which tokens switch a head off?",
        answer=f"{switched} of {share.size} heads rest at some tokens and not at others. Shown are those whose switch "
        "depends most on the token itself.",
        views=tuple(views),
        quantities=("hard_switch_dependence", "hard_switch_share", "example_mass"),
    )


def _cosines(dataset: xr.Dataset) -> Panel:
    lines = [
        Line("mean_normed", "mean, input of attention", "routing"),
        Line("max_normed", "largest, input of attention", "filtering"),
        Line("mean_raw", "mean, stream itself", "score"),
    ]
    parts = {
        f"{kind}_{stream}": dataset[f"sink_cosine_{kind}"].sel(stream=stream).drop_vars("stream")
        for kind, stream in (("mean", "normed"), ("max", "normed"), ("mean", "raw"))
    }
    away = dataset.sink_cosine_mean.sel(stream="normed") < 0
    figure = by_depth(dataset.assign(parts), lines, levels=[Level(0.0, "at right angles")], axis="cosine to the sink")
    return Panel(
        title="Does the sink point away from the other tokens?",
        answer=f"In {int(away.sum())} of {away.size} layers it does on average, as attention sees them.",
        views=(View("", figure, caption(dataset, "sink_cosine_mean")),),
        quantities=("sink_cosine_mean", "sink_cosine_max"),
    )


def _margins(dataset: xr.Dataset) -> Panel:
    names = {"half_space_margin": "half-space margin", "sink_hull_distance": "distance of the sink to the hull"}
    views = []
    for name, label in names.items():
        parts = {stream: dataset[name].sel(stream=stream).drop_vars("stream") for stream in ("raw", "normed")}
        lines = [Line("normed", "input of attention", "routing"), Line("raw", "stream itself", "score")]
        views.append(
            View(label.capitalize(), by_depth(dataset.assign(parts), lines, axis=label), caption(dataset, name))
        )
    able = (dataset.half_space_margin > 0) & (dataset.sink_hull_distance > 0)
    return Panel(
        title="Could one bilinear score send every token to the sink?",
        answer=f"In {int(able.sel(stream='normed').sum())} of {dataset.sizes['layer']} layers, as attention sees the "
        "tokens: they lie on one side, and the sink is no mixture of the others.",
        views=tuple(views),
        quantities=tuple(names),
    )


def _smoothing(dataset: xr.Dataset) -> Panel:
    views = [View("By depth", cosines_by_depth(dataset), caption(dataset, "cosine_before"))]
    reading = caption(dataset, "cosine_measured")
    drawn = ["cosine_before", "cosine_after", "cosine_measured"]
    answer = f"In {_denser(dataset)} of {dataset.sizes['layer']} layers even attention leaves tokens more alike than "
    answer += "attention to oneself"
    if "cosine_predicted" in dataset:
        error = float(np.abs(dataset.cosine_predicted - dataset.cosine_measured).max())
        answer += f"; the closed form is off by {number(error)} at most"
        both = f"{reading} Points are measured, lines the closed form."
        words = "Every layer and density a point; off the dotted line the closed form errs."
        views += [
            View("Curves", mixing_curves(dataset), both),
            View("Closed form", predicted_against_measured(dataset), words),
        ]
        drawn.append("cosine_predicted")
    else:
        views.append(View("Curves", mixing_curves(dataset), reading))
    return Panel(
        title="Does dense attention make tokens alike?",
        answer=f"{answer}.",
        views=tuple(views),
        quantities=tuple(drawn),
    )


def _denser(dataset: xr.Dataset) -> int:
    sparse, dense = (dataset.cosine_measured.isel(mixing=place) for place in (0, -1))
    return int((dense > sparse).sum())


def _outputs(dataset: xr.Dataset) -> Panel:
    layers = dataset["layer"].values
    drawn = layers[np.unique(np.linspace(0, len(layers) - 1, min(len(layers), _DRAWN_LAYERS)).round().astype(int))]
    applies, broken = float(dataset.bound_assumption_share.mean()), int((dataset.bound_violations > 0).sum())
    reading = (
        "Every point is a query. The dotted line is the most a head can write there, the dashed one the least, where "
        "its values cannot cancel each other."
    )
    return Panel(
        title="Is a head off when its attention rests?",
        answer=f"The lower bound applies in {percent(applies)} of heads and sampled windows; {broken} heads break a "
        "bound that applies. The sink's value has "
        f"{number(median(dataset.value_ratio))} times the length of the others in the median head.",
        views=tuple(View(str(layer), output_figure(dataset, layer), reading) for layer in drawn),
        quantities=("output_norm", "free_mass", "bound_assumption_share", "value_ratio"),
        choice="layer",
    )


def _costs(dataset: xr.Dataset) -> Panel | None:
    if not np.isfinite(dataset.pattern_cost.values).any():
        return None
    sink, diagonal = (median(dataset.pattern_slope.sel(pattern=pattern)) for pattern in ("sink", "diagonal"))
    reading = "Solid: a sink. Dashed: a diagonal. Grey: tokens at right angles. "
    views = [View("Patterns", cost_figure(dataset), reading + caption(dataset, "pattern_cost"))]
    norms = ("qk_nuclear", "vo_nuclear")
    if all(name in dataset for name in norms):
        words = "Norms that training has given every head: of its score and of its value map."
        views.append(View("Heads", heads_against(dataset, *norms), words))
    return Panel(
        title="Is a sink cheaper than a diagonal?",
        answer=f"On this model's own tokens the cost of a sink grows as the {number(sink)}th power of their number, "
        f"that of a diagonal as the {number(diagonal)}th, in the median layer.",
        views=tuple(views),
        quantities=("pattern_cost", "pattern_slope", *(norms if len(views) > 1 else ())),
    )


SINKS = Section(
    title="Sinks and diagonals",
    instrument="sinks",
    lead="Softmax must put its weight somewhere. A head with nothing to do rests on one key, the sink, or on the token "
    "itself, the diagonal. Resting turns it off only if what it then reads is small. Bands hold 80 % of heads; dashed "
    "lines are the same architecture before training.",
    questions=(
        Question(("sink_mass", "diagonal_mass", "previous_mass"), _kinds),
        Question(("sink_mass", "diagonal_mass", "previous_mass", "sink_rate"), _by_depth),
        Question(
            (*_EXAMPLE, "hard_switch_share", "hard_switch_dependence"),
            _switches,
        ),
        Question(("sink_cosine_mean", "sink_cosine_max"), _cosines),
        Question(("half_space_margin", "sink_hull_distance"), _margins),
        Question(("cosine_before", "cosine_after", "cosine_measured"), _smoothing),
        Question(
            (*_OUTPUT, "bound_assumption_share", "bound_violations", "value_ratio"),
            _outputs,
        ),
        Question(("pattern_cost", "pattern_slope", "pattern_cost_orthonormal"), _costs),
    ),
)
