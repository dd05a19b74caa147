"""The loss of a language model: nats per token, bits per byte, perplexity, by document and by position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from rheoscope.corpus import Batch, Corpus
from rheoscope.errors import Refused
from rheoscope.instruments.instrument import Instrument
from rheoscope.models.view import ModelView
from rheoscope.stats import ratio_of_sums

ROWS = 32  # rows of logits turned into probabilities at a time, so that no second copy of the logits is made


class Loss(Instrument):
    """Negative log-likelihood of every token but the first of each window, which has nothing before it.

    Keeps two numbers per window, so that losses before and after an edit can be paired.
    """

    name = "loss"
    reads_output = True
    kept: ClassVar = dict.fromkeys(("window_nll", "window_tokens", "position_nll", "position_tokens"), np.add)

    @dataclass(frozen=True)
    class Options:
        """Nothing to choose."""

    def __init__(self, view: ModelView, corpus: Corpus, options: Options | None = None):
        super().__init__(view, corpus, options)
        refuse_loss(view)
        self.window_nll = np.zeros(len(corpus.tokens))
        self.window_tokens = np.zeros(len(corpus.tokens), np.int64)
        self.position_nll = np.zeros(corpus.window)
        self.position_tokens = np.zeros(corpus.window, np.int64)

    def observe_output(self, output: Float[Tensor, "batch position vocabulary"], batch: Batch) -> None:
        nll = token_nll(output[:, :-1], batch.tokens[:, 1:].to(output.device)).cpu().numpy()
        scored = batch.valid[:, 1:].numpy()
        nll = np.where(scored, nll, 0.0)
        windows = batch.windows.numpy()
        places = slice(batch.first + 1, batch.first + batch.tokens.shape[1])
        self.window_nll[windows] += nll.sum(1)
        self.window_tokens[windows] += scored.sum(1)
        self.position_nll[places] += nll.sum(0)
        self.position_tokens[places] += scored.sum(0)

    def finalize(self) -> xr.Dataset:
        seen = self.window_tokens > 0
        nll, tokens, n_bytes = self.window_nll[seen], self.window_tokens[seen], self.corpus.n_bytes[seen]
        units = self.corpus.units[seen]
        nll_of_unit, tokens_of_unit, bytes_of_unit = (np.bincount(units, x) for x in (nll, tokens, n_bytes))
        mean, mean_se, n = (part.item() for part in ratio_of_sums(nll_of_unit, tokens_of_unit))
        per_byte, per_byte_se, _ = (part.item() for part in ratio_of_sums(nll_of_unit / math.log(2), bytes_of_unit))
        documents, place = np.unique(self.corpus.documents[seen], return_inverse=True)
        document_tokens = np.bincount(place, tokens)
        by_position = self.position_nll / np.where(self.position_tokens > 0, self.position_tokens, np.nan)
        with np.errstate(over="ignore"):
            perplexity = np.exp(mean)  # infinite beyond 709 nats
        return xr.Dataset(
            {
                "nll_mean": ((), mean),
                "nll_mean_se": ((), mean_se),
                "bits_per_byte": ((), per_byte),
                "bits_per_byte_se": ((), per_byte_se),
                "perplexity": ((), perplexity),
                "perplexity_se": ((), perplexity * mean_se),
                "nll": ("document", np.bincount(place, nll) / document_tokens),
                "tokens": ("document", document_tokens.astype(np.int64)),
                "nll_by_position": ("position", by_position),
            },
            coords={"document": documents, "position": np.arange(self.corpus.window)},
            attrs={"n": n},
        )


def refuse_loss(view: ModelView) -> None:
    """Raise Refused where the model does not predict the next token."""
    if not view.causal:
        raise Refused(
            f"loss asked for; {view.model_type} reads both ways and does not predict the next token: "
            "measure it without loss (--instruments routing)"
        )
    if not view.has_loss:
        raise Refused(
            f"loss asked for; {view.ref} has no output head: load the checkpoint with its head, or leave loss out"
        )


def token_nll(
    logits: Float[Tensor, "batch position vocabulary"], targets: Int[Tensor, "batch position"]
) -> Float[Tensor, "batch position"]:
    """Negative log-likelihood of every target in nats, float64, computed in float32 or better a few rows at a time."""
    flat_targets = targets.reshape(-1)
    nll = torch.empty(flat_targets.shape[0], dtype=torch.float64, device=logits.device)
    row = 0
    for window in logits:
        for rows in window.split(ROWS):
            exact = rows if rows.dtype == torch.float64 else rows.float()
            target = flat_targets[row : row + len(rows)]
            nll[row : row + len(rows)] = exact.logsumexp(-1).double() - exact.gather(1, target[:, None])[:, 0].double()
            row += len(rows)
    return nll.view(targets.shape)
