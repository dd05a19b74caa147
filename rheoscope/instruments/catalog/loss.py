"""Catalogue rows of the loss dataset."""

from __future__ import annotations

from rheoscope.instruments.catalog.quantity import Quantity

_INF = float("inf")


def _row(
    name: str, dims: tuple[str, ...], unit: str, long_name: str, caption: str, equation: str, summary: str = ""
) -> Quantity:
    return Quantity(
        name, "loss", dims, unit, long_name, caption, (0.0, _INF), equation, "this project", summary=summary
    )


LOSS = (
    _row(
        "nll_mean",
        (),
        "nats/token",
        "loss",
        "How surprised the model is by each token of the text, on average. Lower is better; a model that guesses "
        "evenly among V tokens has log V.",
        "Σ_documents Σ_t -log p(x_t | x_<t)  /  number of scored tokens",
        "value",
    ),
    _row(
        "bits_per_byte",
        (),
        "bits/byte",
        "loss per byte",
        "The same surprise counted per byte of the original text, which compares models with different tokenizers.",
        "Σ -log2 p(x_t | x_<t)  /  UTF-8 bytes of the scored tokens",
        "value",
    ),
    _row(
        "perplexity",
        (),
        "1",
        "perplexity",
        "Among how many equally likely tokens the model in effect hesitates.",
        "exp(nll_mean)",
        "value",
    ),
    _row(
        "nll",
        ("document",),
        "nats/token",
        "loss of a document",
        "The average surprise per token within one document.",
        "Σ_t -log p(x_t | x_<t)  /  scored tokens of the document",
    ),
    _row(
        "tokens",
        ("document",),
        "tokens",
        "scored tokens of a document",
        "How many tokens of the document were predicted and counted.",
        "number of scored tokens",
    ),
    _row(
        "nll_by_position",
        ("position",),
        "nats/token",
        "loss at a position",
        "The average surprise at each place in the window. It falls as the model has more text before it to go by.",
        "mean over windows of -log p(x_t | x_<t) at place t of the window",
    ),
)
