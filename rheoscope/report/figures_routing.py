"""What the report shows of routing and filtering: what attention scores are made of."""

from __future__ import annotations

import numpy as np
import xarray as xr

from rheoscope.report.figures import Level, Line, by_depth, caption, heat_map, null_label, nulls_of
from rheoscope.report.figures_by_head import eigenvalue_cloud, heads_against, layers_drawn
from rheoscope.report.figures_by_lag import lag_lines, lag_map
from rheoscope.report.panels import Panel, Question, Section, View
from rheoscope.report.words import median, number, percent

_GAUSSIAN = Level(0.5, "unrelated queries and keys")
_MAPS = {  # variable: its button, and what the colours diverge from
    "routing_share": ("Routing share", _GAUSSIAN),
    "gauge_share": ("Key bias", None),
    "diagonal_share": ("Diagonal", None),
    "routing_k90": ("Routing rank", None),
    "filtering_k90": ("Filtering rank", None),
    "utilisation": ("Capacity used", None),
    "stability_share_positive": ("Growing", Level(0.5, "as many grow as fade")),
    "stability_max_re": ("Growth rate", None),
}
_COUNTS = {  # the five ways to count directions: button and how to read it
    "k90": ("Hold 90 %", "How many directions hold 90 % of each part of the scores."),
    "k95": ("Hold 95 %", "How many directions hold 95 % of each part of the scores."),
    "k99": ("Hold 99 %", "How many directions hold 99 % of each part of the scores."),
    "entropy_rank": ("Entropy rank", "How many directions of equal strength would be as spread out as each part."),
    "participation": ("Participation", "How many directions take part, strong ones counting for more."),
}
_RANK_NOTE = "Routing directions come in pairs, so 2 is the least."


def _routing_share(dataset: xr.Dataset) -> Panel:
    values = dataset.routing_share.values
    below = int((values < _GAUSSIAN.value).sum())
    levels = [] if "null_gaussian" in nulls_of(dataset, "routing_share") else [_GAUSSIAN]
    figure = by_depth(dataset, [Line("routing_share", "routing share", "routing")], levels=levels)
    return Panel(
        title="How much of the score is routing?",
        answer=f"{percent(median(values))} in the median head. {below} of {int(np.isfinite(values).sum())} heads lie "
        f"below the {percent(0.5)} that unrelated queries and keys would give: there, filtering dominates.",
        views=(View("", figure, caption(dataset, "routing_share")),),
        quantities=("routing_share",),
    )


def _every_head(dataset: xr.Dataset) -> Panel:
    names = [name for name in _MAPS if name in dataset]
    return Panel(
        title="Which heads differ?",
        answer="Every square is a head. Point at one to read its value, its error and its nulls.",
        views=tuple(
            View(
                _MAPS[name][0],
                heat_map(dataset, name, centre=_MAPS[name][1]),
                f"{caption(dataset, name)} {_extremes(dataset[name])}",
            )
            for name in names
        ),
        quantities=tuple(names),
    )


def _extremes(values: xr.DataArray) -> str:
    """The heads with the least and the largest value, in a sentence."""
    values = values.transpose("layer", "head")
    if not np.isfinite(values.values).any():
        return ""
    places = (np.unravel_index(find(values.values), values.shape) for find in (np.nanargmin, np.nanargmax))
    layers, heads = values["layer"].values, values["head"].values
    least, most = (f"head {heads[j]} of layer {layers[i]} ({number(values.values[i, j])})" for i, j in places)
    return f"Least in {least}, most in {most}."


def _ranks(dataset: xr.Dataset) -> Panel:
    minimal = ""
    if "minimal_rank_share" in dataset:
        minimal = f" {percent(float(dataset.minimal_rank_share))} of layers are at the least rank, 2."
    views = []
    levels = _rank_levels(dataset)
    for count, (label, reading) in _COUNTS.items():
        if f"routing_{count}" in dataset:
            figure = by_depth(dataset, _rank_lines(dataset, count), levels=levels, log=True, axis="directions")
            views.append(View(label, figure, f"{reading} {_RANK_NOTE}"))
    return Panel(
        title="How many directions does each part use?",
        answer=f"The median head has 90 % of its routing in {number(median(dataset.routing_k90))} directions.{minimal}",
        views=tuple(views),
        quantities=tuple(line.name for count in _COUNTS for line in _rank_lines(dataset, count)),
    )


def _rank_lines(dataset: xr.Dataset, count: str) -> list[Line]:
    lines = (
        Line(f"routing_{count}", "routing", "routing"),
        Line(f"routing_{count}_gauge_removed", "routing, key bias removed", "residue"),
        Line(f"filtering_{count}", "filtering", "filtering"),
        Line(f"score_{count}", "whole score", "score"),
    )
    return [line for line in lines if line.name in dataset]


def _rank_levels(dataset: xr.Dataset) -> list[Level]:
    levels = [Level(2.0, "least rank of routing: 2")]
    if "capacity" in dataset and np.ptp(dataset.capacity.values) == 0:
        capacity = float(dataset.capacity[0])
        levels.append(Level(capacity, f"capacity: {number(capacity)}"))
    return levels


def _key_bias(dataset: xr.Dataset) -> Panel:
    share = median(dataset.gauge_share)
    figure = by_depth(dataset, [Line("gauge_share", "key-bias share", "residue")])
    return Panel(
        title="Is routing more than a bias towards some keys?",
        answer=f"In the median head {percent(share)} of the routing part says only which keys count"
        f"{_against(dataset, 'gauge_share')}. The rest depends on the pair.",
        views=(View("", figure, caption(dataset, "gauge_share")),),
        quantities=("gauge_share",),
    )


def _stability(dataset: xr.Dataset) -> Panel:
    grows = dataset.eigenvalues_re > 0
    heads = grows.any("component")
    reading = (
        "Each point is an eigenvalue λ of one head's score table, without the mask, for one document. Its angle says "
        "what happens to its direction: on the right it grows, on the left it fades, above and below it rotates into "
        "another. The circles are |λ| in logits; points at the centre are smaller than the innermost."
    )
    return Panel(
        title="Would a head on its own be stable?",
        answer=f"{int(heads.sum())} of {heads.size} heads have a direction that grows. "
        f"Over all heads, {percent(float(grows.mean()))} of the directions grow.",
        views=tuple(View(str(layer), eigenvalue_cloud(dataset, layer), reading) for layer in layers_drawn(dataset)),
        quantities=("eigenvalues_re", "eigenvalues_im"),
        choice="layer",
    )


def _growth(dataset: xr.Dataset) -> Panel:
    name = "stability_share_positive"
    return Panel(
        title="How many directions grow at each depth?",
        answer=f"{percent(median(dataset[name]))} in the median head{_against(dataset, name)}.",
        views=(View("", by_depth(dataset, [Line(name, "growing directions", "filtering")]), caption(dataset, name)),),
        quantities=(name,),
    )


def _against(dataset: xr.Dataset, name: str) -> str:
    """The nulls of a share, as the end of a sentence."""
    nulls = nulls_of(dataset, name).values()
    words = [f"{percent(median(null))} ({null_label(dataset[name], null)})" for null in nulls]
    return f", against {' and '.join(words)}" if words else ""


def _by_lag(dataset: xr.Dataset) -> Panel:
    values = dataset.routing_share_by_lag.dropna("lag", how="all").transpose("layer", "lag")
    lags = values["lag"].values
    parts = ((lags > 0) & (lags <= 4), lags > lags.max() * 3 / 4)
    near, far = (percent(median(values.values[:, part])) for part in parts)
    return Panel(
        title="At which distances is the score one-way?",
        answer=f"In the median layer {near} of the score between neighbours up to 4 tokens apart is routing, "
        f"and {far} in the farthest quarter of distances.",
        views=_lag_views(values, caption(dataset, "routing_share_by_lag")),
        quantities=("routing_share_by_lag",),
    )


def _lag_views(values: xr.DataArray, reading: str) -> tuple[View, View]:
    level = Level(_GAUSSIAN.value, f"{_GAUSSIAN.label}: {_GAUSSIAN.value}")
    return (
        View("Map", lag_map(values, centre=_GAUSSIAN), reading),
        View("Lines", lag_lines(values, levels=[level]), f"{reading} One line per layer."),
    )


def _weights_and_data(dataset: xr.Dataset) -> Panel:
    lines = [
        Line("capacity", "capacity of the head width", "score"),
        Line("kernel_routing_k90", "weights allow", "filtering"),
        Line("routing_k90", "text uses", "routing"),
    ]
    lines = [line for line in lines if line.name in dataset]
    depth = by_depth(dataset, lines, log=True, axis="directions that hold 90 % of routing")
    reading = (
        "By their weights heads could route in as many directions as the orange line says; the text uses those of the "
        "blue one. No head of this width can use more than its capacity."
    )
    heads = heads_against(dataset, "kernel_routing_k90", "routing_k90", log=True)
    below = "Heads below the dotted line"
    views = [
        View("By depth", depth, reading),
        View("Every head", heads, f"{below} use fewer directions than their weights allow."),
    ]
    shares = ("kernel_routing_share", "routing_share")
    if all(name in dataset for name in shares):
        words = f"{below} route less on this text than by their weights alone."
        views.append(View("Shares", heads_against(dataset, *shares), words))
    return Panel(
        title="Does the text use what the weights allow?",
        answer=f"The weights of the median head allow {number(median(dataset.kernel_routing_k90))} directions; "
        f"the text uses {number(median(dataset.routing_k90))}.",
        views=tuple(views),
        quantities=(*(line.name for line in lines), *(shares if len(views) > 2 else ())),
    )


def _weights_by_lag(dataset: xr.Dataset) -> Panel:
    by_head = dataset.kernel_routing_share_by_lag
    values = by_head.dropna("lag").reduce(np.median, "head", keep_attrs=True).transpose("layer", "lag")
    near, far = (percent(median(values.isel(lag=place))) for place in (0, -1))
    lags = values["lag"].values
    answer = f"The weights' own share is {near} at distance {lags[0]} and {far} at distance {lags[-1]}"
    quantities = ["kernel_routing_share_by_lag"]
    if "kernel_routing_share_averaged" in dataset:
        averaged = percent(median(dataset.kernel_routing_share_averaged))
        answer += f"; at the distances that attention goes to it is {averaged}"
        quantities.append("kernel_routing_share_averaged")
    return Panel(
        title="Do rotary positions alone make scores one-way?",
        answer=f"{answer}.",
        views=_lag_views(values, f"{caption(dataset, 'kernel_routing_share_by_lag')} Median over heads."),
        quantities=tuple(quantities),
    )


ROUTING = Section(
    title="Routing and filtering",
    instrument="routing",
    lead="Before softmax, a head gives every ordered pair of positions a score. Swap the two positions and the score "
    "splits in two: the part that stays (filtering: how well the two match) and the part that changes sign (routing: "
    "which of the two sends to the other). Bands hold 80 % of heads; dashed lines are what chance gives, or the same "
    "architecture before training.",
    questions=(
        Question(("routing_share",), _routing_share),
        Question(("routing_share",), _every_head),
        Question(("routing_k90",), _ranks),
        Question(("gauge_share",), _key_bias),
        Question(("eigenvalues_re", "eigenvalues_im"), _stability),
        Question(("stability_share_positive",), _growth),
        Question(("routing_share_by_lag",), _by_lag),
        Question(("kernel_routing_k90", "routing_k90"), _weights_and_data),
        Question(("kernel_routing_share_by_lag",), _weights_by_lag),
    ),
)
