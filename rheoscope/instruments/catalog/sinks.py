"""Catalogue rows of the sinks dataset: where attention rests, which heads switch, how tokens are smoothed."""

from __future__ import annotations

from rheoscope.instruments.catalog.quantity import Quantity
from rheoscope.instruments.catalog.sinks_row import ANY as _ANY
from rheoscope.instruments.catalog.sinks_row import LAYER as _LAYER
from rheoscope.instruments.catalog.sinks_row import LENGTH as _LENGTH
from rheoscope.instruments.catalog.sinks_row import PAPER
from rheoscope.instruments.catalog.sinks_row import row as _row
from rheoscope.instruments.catalog.sinks_sampled import SINK_SAMPLES

SINK_DIMENSIONS: dict[str, tuple[str, str]] = {
    "key": ("tokens", "place of the key in the window"),
    "mixing": ("1", "density a of the attention A_a"),
    "stream": ("1", "what the tokens are taken from: the stream itself, or what the norm hands to attention"),
    "query": ("1", "drawn query, counted from 0"),
    "example": ("1", "example, counted from 0"),
    "place": ("tokens", "place in the passage"),
    "pattern": ("1", "where every query must look: at the sink, or at itself"),
    "size": ("tokens", "tokens that show the pattern"),
}


_MASSES = (
    _row(
        "sink_mass",
        "sink mass",
        "How much attention falls on the key that gets most of it, wherever that key stands. Near 1 the head looks at "
        "the same place whatever the text says: it rests.",
        "max_k mean_(i≥k) A(i, k), over keys that enough queries may attend to; row 0 left out",
        source=PAPER,
        summary="median",
    ),
    _row(
        "first_key_mass",
        "mass on a key at the start",
        "How much attention each of the first tokens of a window gets from the queries after it.",
        "mean_(i≥k) A(i, k)",
        dims=("layer", "head", "key"),
        source=PAPER,
    ),
    _row(
        "learned_sink_mass",
        "mass on the learned sink",
        "Attention that goes to no token: the model has a learned place to put it.",
        "1 - Σ_j A(i, j), mean over queries",
    ),
    _row(
        "sink_position",
        "place of the sink",
        "Where in the window the sink of a head stands, on average. 0 is the first token.",
        "mean over windows of argmax_k mean_(i≥k) A(i, k)",
        unit="tokens",
        bounds=_LENGTH,
    ),
    _row(
        "sink_at_first_share",
        "sink is the first token",
        "In how many windows the sink of a head is the first token.",
        "share of windows with argmax_k = 0",
    ),
    _row(
        "sink_count",
        "number of sinks",
        "How many keys of a window get more than the threshold of a head's attention each.",
        "#{k : mean_(i≥k) A(i, k) > ε}, mean over the sampled windows",
        unit="keys",
        bounds=_LENGTH,
    ),
    _row(
        "sink_rate",
        "share of sink heads",
        "How many heads of a layer rest on a sink.",
        "share of heads with sink mass > ε",
        dims=_LAYER,
        source=PAPER,
        summary="mean",
    ),
    _row(
        "diagonal_mass",
        "diagonal mass",
        "How much attention tokens give to themselves. Near 1 the head acts on each token alone, like a feed-forward "
        "network.",
        "mean_(i≥8) A(i, i)",
        source=PAPER,
        summary="median",
    ),
    _row(
        "diagonal_rate",
        "share of diagonal heads",
        "How many heads of a layer attend to the token itself.",
        "share of heads with diagonal mass > ε",
        dims=_LAYER,
        source=PAPER,
    ),
    _row(
        "previous_mass",
        "previous-token mass",
        "How much attention tokens give to the one before them.",
        "mean_(i≥8) A(i, i - 1)",
        source=PAPER,
    ),
)

_SWITCHES = (
    _row(
        "hard_switch_share",
        "share of queries resting on the sink",
        "At how many tokens a head is off: nearly all its attention is on the sink. Strictly between 0 and 1 the head "
        "switches.",
        "share of i ≥ 8 with A(i, sink) > 0.9",
        source=PAPER,
    ),
    _row(
        "soft_switch_share",
        "share of queries resting on themselves",
        "At how many tokens a head attends to the token itself alone.",
        "share of i ≥ 8 with A(i, i) > 0.9",
        source=PAPER,
    ),
    _row(
        "hard_switch_dependence",
        "how far the token decides the switch",
        "How much of a head's being off is decided by the token it reads. 0 is chance, 1 a switch that this token "
        "alone turns. A query before the sink is not off.",
        "adjusted η² = 1 - (1 - η²)(n - 1)/(n - k) of [A(i, sink) > 0.9] by token, i ≥ 8",
        bounds=_ANY,
    ),
    _row(
        "soft_switch_dependence",
        "how far the token decides the diagonal",
        "The same for attention to the token itself.",
        "adjusted η² of [A(i, i) > 0.9] by token",
        bounds=_ANY,
    ),
    _row(
        "example_layer",
        "layer of the example",
        "Which layer the head of an example is in.",
        "heads with the largest adjusted η²",
        dims=("example",),
        bounds=_ANY,
    ),
    _row(
        "example_head",
        "head of the example",
        "Which head of that layer is shown.",
        "heads with the largest adjusted η²",
        dims=("example",),
        bounds=_ANY,
    ),
    _row(
        "example_text",
        "tokens of the example",
        "A passage in which the head switches most often.",
        "tokens as text",
        dims=("example", "place"),
        bounds=_ANY,
    ),
    _row(
        "example_mass",
        "sink mass at a token",
        "How much attention the token of the passage gives to the sink.",
        "A(i, sink)",
        dims=("example", "place"),
    ),
    _row(
        "example_off_tokens",
        "tokens that turn the head off",
        "Tokens at which the head rests more often than elsewhere, of those seen at least twice.",
        "tokens with the largest share of A(i, sink) > 0.9",
        dims=("example",),
        bounds=_ANY,
    ),
    _row(
        "example_on_tokens",
        "tokens that turn the head on",
        "Tokens at which the head rests least often, of those seen at least twice.",
        "tokens with the least share of A(i, sink) > 0.9",
        dims=("example",),
        bounds=_ANY,
    ),
)

SINKS: tuple[Quantity, ...] = (*_MASSES, *_SWITCHES, *SINK_SAMPLES)
