"""Catalogue rows of the ablation dataset: what edits do to the loss, and how the stream answers them."""

from __future__ import annotations

from rheoscope.instruments.catalog.quantity import Quantity

PAPER = "arXiv 2608.02071"
SCORES = "arXiv 2605.18826"
OURS = "this project"

ABLATION_DIMENSIONS: dict[str, tuple[str, str]] = {
    "variant": ("1", "what is taken away in every layer"),
    "spare": ("1", "tokens left alone"),
    "edit": ("1", "what is taken away in every layer, or nothing"),
    "n_parallel": ("1", "layers made parallel"),
    "choice": ("1", "random order of the layers, counted from 0"),
    "gain": ("1", "factor on what attention writes"),
    "rank": ("1", "rank that is kept"),
    "score_edit": ("1", "form of the scores"),
    "n_linear": ("1", "layers made linear, from the first"),
    "keep": ("tokens", "text kept before another one begins"),
}


def _row(name: str, dims: tuple[str, ...], long_name: str, caption: str, equation: str, **more) -> Quantity:
    fields = {"unit": "nats/token", "bounds": None, "source": PAPER} | more
    return Quantity(
        name=name, instrument="ablation", dims=dims, long_name=long_name, caption=caption, equation=equation, **fields
    )


def _curve(which: str, words: str, dims: tuple[str, ...]) -> list[Quantity]:
    """Rows of one order in which layers are made parallel."""
    return [
        _row(
            f"parallel_change_{which}",
            dims,
            f"loss change, {words} made parallel",
            f"What it costs when attention and FFN run side by side in so many layers, {words}.",
            "loss with x + A + Φ(x) in the chosen layers, minus loss of the model",
        ),
        _row(
            f"parallel_speedup_{which}",
            dims,
            f"estimated speed-up, {words}",
            f"How much faster the layers would be if the two halves of these took as long as the longer one, {words}.",
            "Σ(T_A + T_Φ) / [Σ_sequential (T_A + T_Φ) + Σ_parallel max(T_A, T_Φ)]",
            unit="1",
            bounds=(0.0, float("inf")),
        ),
        _row(
            f"parallel_time_{which}",
            dims,
            f"measured time of the edited pass, {words}",
            "The time of the pass that measured the loss, over that of the model as it is. Here the two halves ran one "
            f"after the other, so nothing is saved yet, {words}.",
            "seconds with the edit / seconds without",
            unit="1",
            bounds=(0.0, float("inf")),
            source=OURS,
        ),
    ]


ABLATION = (
    _row(
        "plain_loss",
        (),
        "loss without edits",
        "The loss that all changes start from.",
        "loss of the model",
        source=OURS,
    ),
    _row(
        "variant_change",
        ("variant", "spare"),
        "loss change",
        "What the model loses when a part of what its layers write is taken away, in all layers at once.",
        "loss with the edit - loss of the model, paired by document",
    ),
    _row(
        "variant_change_by_layer",
        ("variant", "layer"),
        "loss change, one layer",
        "What the model loses when a part of what one layer writes is taken away.",
        "loss with the edit in that layer - loss of the model, paired by document",
    ),
    _row(
        "parallel_defect",
        ("layer",),
        "defect on the ablated text",
        "The defect by which the layers were put in order.",
        "C = mean of ‖Φ(x + A) - Φ(x)‖ / (‖Φ(x)‖ + 10⁻⁶)",
        unit="1",
        bounds=(0.0, float("inf")),
    ),
    _row(
        "parallel_displacement",
        ("layer",),
        "displacement on the ablated text",
        "By how much of its length a token leaves the layer elsewhere when attention and FFN run side by side; another "
        "order of the layers.",
        "mean of ‖Φ(x + A) - Φ(x)‖ / ‖x⁺‖",
        unit="1",
        bounds=(0.0, float("inf")),
        source=OURS,
    ),
    _row(
        "parallel_change_by_layer",
        ("layer",),
        "loss change, one layer made parallel",
        "What it costs when attention and FFN of this layer alone run side by side.",
        "loss with x + A + Φ(x) in the layer, minus loss of the model",
    ),
    *_curve("low", "layers of low defect first", ("n_parallel",)),
    *_curve("high", "layers of high defect first", ("n_parallel",)),
    *_curve("displacement", "layers of low displacement first", ("n_parallel",)),
    *_curve("random", "layers in random order", ("n_parallel", "choice")),
    _row(
        "gate",
        ("layer",),
        "gate on the FFN",
        "The factor on what the FFN of a layer writes that lowers the loss of the calibration text most, all weights "
        "frozen. Below 1: the layer writes more than serves this text.",
        "α minimising the loss with F → αF, from 1",
        unit="1",
    ),
    _row("gate_mean", (), "mean gate", "The mean factor over all layers.", "mean of α", unit="1"),
    _row(
        "gate_change_calibration",
        (),
        "loss change by the gates, calibration text",
        "What the gates gain on the text they were fitted on.",
        "loss with gates - loss of the model",
    ),
    _row(
        "gate_change_held_out",
        (),
        "loss change by the gates, held-out text",
        "What the gates gain on text they never saw, which is what counts.",
        "loss with gates - loss of the model",
    ),
    _row(
        "gain_change",
        ("gain",),
        "loss change by an attention gain",
        "What it costs when attention pulls harder in all layers.",
        "loss with A → κA - loss of the model",
        source=OURS,
    ),
    _row(
        "diversity_by_gain",
        ("gain", "layer"),
        "diversity under an attention gain",
        "How far tokens still point in different ways after each layer when attention pulls harder in all of them.",
        "D of x⁺ with A → κA",
        unit="1",
        bounds=(0.0, 1.0),
        source=OURS,
    ),
    _row(
        "diversity_by_edit",
        ("edit", "layer"),
        "diversity without a part",
        "How far tokens still point in different ways after each layer when a part of what layers write is taken away.",
        "D of x⁺ with the edit in all layers",
        unit="1",
        bounds=(0.0, 1.0),
        source=OURS,
    ),
    _row(
        "prefix_turn",
        ("keep", "layer"),
        "turn by another prefix",
        "By what angle the last token points elsewhere when all but the last few tokens are those of another text.",
        "angle(u_t, u_t with another prefix)",
        unit="degrees",
        bounds=(0.0, 180.0),
        source=OURS,
    ),
    _row(
        "prefix_deficit_change",
        ("keep", "layer"),
        "change of the deficit by another prefix",
        "By how much the angular deficit of the last token differs under another prefix.",
        "mean |D_A - D_A with another prefix|",
        unit="1",
        bounds=(0.0, 2.0),
        source=OURS,
    ),
    _row(
        "prefix_defect_change",
        ("keep", "layer"),
        "change of the defect by another prefix",
        "By how much the defect of the last token differs under another prefix.",
        "mean |C - C with another prefix|",
        unit="1",
        bounds=(0.0, float("inf")),
        source=OURS,
    ),
    _row(
        "attention_response",
        ("layer", "lag"),
        "response of attention",
        "How strongly what attention writes at a token answers a change of the stream at one so many places before it.",
        "K = root mean square of ‖P_u ∂A_t/∂x_s‖ over t - s = lag, by random probes",
        unit="1",
        bounds=(0.0, float("inf")),
        source=OURS,
    ),
    _row(
        "routing_change",
        ("rank",),
        "loss change, routing of a rank",
        "What it costs when the routing part of all scores keeps only its leading planes, so many singular values in "
        "all; 0: no routing.",
        "loss with S → its leading rank/2 planes on the calibration text, minus loss of the model",
        source=SCORES,
    ),
    _row(
        "filtering_change",
        ("rank",),
        "loss change, filtering of a rank",
        "What it costs when the filtering part of all scores keeps only so many leading directions; 0: no filtering.",
        "loss with F → its leading directions on the calibration text, minus loss of the model",
        source=SCORES,
    ),
    _row(
        "score_edit_change",
        ("score_edit",),
        "loss change, scores in a simple form",
        "What it costs when routing is only a bias of every key, the same for all queries, or filtering only a number "
        "per head, or nothing.",
        "loss with S → f_i - f_j, F → m 1, or F → 0, minus loss of the model",
        source=SCORES,
    ),
    _row(
        "linear_change",
        ("n_linear",),
        "loss change, linear layers",
        "What it costs when the first layers attend without a softmax, the weights as they are: linear attention with "
        "features elu + 1.",
        "loss with softmax(scores) → φ(q)·φ(k), normalised, in layers 0 to n - 1, minus loss of the model",
        source=SCORES,
    ),
)
