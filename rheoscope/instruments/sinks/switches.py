"""Switches: heads that are off at some tokens and on at others, and the tokens that flip them.

Read from the sampled windows: the mass on the sink and on the token itself, query by query.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rheoscope.corpus import Corpus
from rheoscope.instruments.sinks.patterns import SKIPPED
from rheoscope.models.view import ModelView
from rheoscope.stats import filled

N_EXAMPLES = 6  # heads shown with their text
PASSAGE = 48  # tokens of each passage
N_FLIPPING = 8  # tokens named on each side
RARE = 0.05  # share of queries at rest, or not, below which a head is no example of a switch
FEWEST = 2  # occurrences of a token before it says anything
OFF = 0.9


class Switches:
    """Masses of every query of the sampled windows, and what they say about the tokens."""

    kept: ClassVar = {"mass": filled}

    def __init__(self, view: ModelView, corpus: Corpus, sampled: np.ndarray):
        self.view, self.corpus, self.sampled = view, corpus, sampled
        shape = (2, len(sampled), view.n_layers, view.n_heads, corpus.window)
        self.mass = np.full(shape, np.nan, np.float32)  # sink, diagonal

    def add(
        self, layer: int, index: int, sink: Float[Tensor, "head query"], diagonal: Float[Tensor, "head query"]
    ) -> None:
        """Masses of one sampled window at one layer."""
        for kind, mass in enumerate((sink, diagonal)):
            self.mass[kind, index, layer, :, : mass.shape[-1]] = mass.float().cpu().numpy()

    def readings(self) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
        """How far the token decides whether a head is off, by head and kind; and examples in text."""
        tokens = self.corpus.tokens[self.sampled].copy()
        late = np.arange(tokens.shape[1]) >= SKIPPED
        counted = late & (np.arange(tokens.shape[1]) < self.corpus.lengths[self.sampled][:, None])
        off = self.mass > OFF
        dims = ("layer", "head")
        data = {}
        for kind, name in enumerate(("hard", "soft")):
            by_head = off[kind].transpose(1, 2, 0, 3)[:, :, counted]
            share = dependence(by_head, tokens[counted])
            data[f"{name}_switch_dependence"] = dims, share
        return data | self._examples(off[0], data["hard_switch_dependence"][1], counted)

    def _examples(
        self, off: Bool[np.ndarray, "sample layer head query"], share: np.ndarray, counted: np.ndarray
    ) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
        """Passages of the heads that switch most by token, and the tokens that turn them off and on."""
        tokenizer = self.view.tokenizer
        rest = off.transpose(1, 2, 0, 3)[:, :, counted].mean(-1)
        both = (share > 0) & (rest > RARE) & (rest < 1 - RARE)
        order = [place for place in np.argsort(-np.nan_to_num(share), axis=None) if both.flat[place]]
        if not order or tokenizer is None:
            return {}
        tokens = self.corpus.tokens[self.sampled]
        heads = [np.unravel_index(place, share.shape) for place in order[:N_EXAMPLES]]
        passages = [self._passage(off[:, layer, head], counted) for layer, head in heads]
        names = np.array([[tokenizer.decode([token]) for token in tokens[w, s].tolist()] for w, s in passages])
        mass = np.stack(
            [self.mass[0, w, layer, head, s] for (layer, head), (w, s) in zip(heads, passages, strict=True)]
        )
        flips = [flipping_tokens(off[:, layer, head][counted], tokens[counted]) for layer, head in heads]
        named = [[_named(tokenizer, tokens_of) for tokens_of in pair] for pair in flips]
        return {
            "example_layer": (("example",), np.array([layer for layer, _ in heads])),
            "example_head": (("example",), np.array([head for _, head in heads])),
            "example_text": (("example", "place"), names),
            "example_mass": (("example", "place"), mass.astype(np.float64)),
            "example_off_tokens": (("example",), np.array([pair[0] for pair in named])),
            "example_on_tokens": (("example",), np.array([pair[1] for pair in named])),
        }

    def _passage(self, off: Bool[np.ndarray, "sample query"], counted: np.ndarray) -> tuple[int, slice]:
        """The stretch of text with the most changes from off to on, among the sampled windows."""
        changes = (off[:, 1:] != off[:, :-1]) & counted[:, 1:]
        length = min(PASSAGE, off.shape[1])
        totals = np.pad(np.cumsum(changes, 1), ((0, 0), (1, 0)))
        windows = totals[:, length - 1 :] - totals[:, : off.shape[1] - length + 1]
        window, start = np.unravel_index(np.argmax(windows), windows.shape)
        return int(window), slice(int(start), int(start) + length)


def dependence(off: Bool[np.ndarray, "*head query"], tokens: Int[np.ndarray, " query"]) -> Float[np.ndarray, "*head"]:
    """Share of the variance of being off that the token at the query explains, corrected for chance.

    Adjusted η² = 1 - (1 - η²)(n - 1)/(n - k) over the k tokens that occur at least twice in n places; 0 is chance, 1
    a switch that the token alone decides, slightly negative values are noise. NaN where the head is never or always
    off, or no token occurs twice.
    """
    _, group, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    kept = counts[group] >= FEWEST
    n, k = int(kept.sum()), int((counts >= FEWEST).sum())
    if n <= k or k == 0:
        return np.full(off.shape[:-1], np.nan)
    values, place = off[..., kept].astype(np.float64), np.unique(group[kept], return_inverse=True)[1]
    onto = np.zeros((n, k))
    onto[np.arange(n), place] = 1.0
    mean = values.mean(-1, keepdims=True)
    between = ((values @ onto) ** 2 / onto.sum(0)).sum(-1) - n * mean[..., 0] ** 2
    total = ((values - mean) ** 2).sum(-1)
    share = between / np.where(total > 0, total, np.nan)
    return 1 - (1 - share) * (n - 1) / (n - k)


def flipping_tokens(
    off: Bool[np.ndarray, " query"], tokens: Int[np.ndarray, " query"]
) -> tuple[Int[np.ndarray, " off"], Int[np.ndarray, " on"]]:
    """Tokens at which a head is most often off, and those at which it is most often on; at least twice seen."""
    names, group, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    rate = np.bincount(group, off) / counts
    seen = counts >= FEWEST
    order = np.lexsort((-counts, -rate))
    turned_off = [i for i in order if seen[i] and rate[i] > off.mean()]
    turned_on = [i for i in np.lexsort((-counts, rate)) if seen[i] and rate[i] < off.mean()]
    return names[turned_off[:N_FLIPPING]], names[turned_on[:N_FLIPPING]]


def _named(tokenizer, tokens: np.ndarray) -> str:
    """Tokens as their texts between quotes, in one line."""
    return " ".join(repr(tokenizer.decode([token])) for token in tokens.tolist())
