"""One text in two: what is fitted or chosen on some documents is judged on others."""

from __future__ import annotations

import numpy as np

from rheoscope.corpus import Corpus
from rheoscope.errors import RheoscopeError


def two_texts(corpus: Corpus, *, share: float = 0.5, seed: int = 0) -> tuple[Corpus, Corpus]:
    """Windows of two sets of documents that have none in common; the first has about `share` of the windows.

    Documents are drawn at random. Raises RheoscopeError where there are not two documents.
    """
    documents, sizes = np.unique(corpus.documents, return_counts=True)
    if len(documents) < 2:
        raise RheoscopeError(
            f"a text of {len(documents)} document asked to be parted in two; what is fitted on one document must be "
            "judged on another: give more files or windows, fewer windows of each document "
            "(--windows-per-document), or let headings or blank lines part it (--split)"
        )
    if not 0 < share < 1:
        raise RheoscopeError(f"a share of {share:g} of a text asked for: give a number between 0 and 1")
    order = np.random.default_rng(seed).permutation(len(documents))
    n_first = int(np.searchsorted(np.cumsum(sizes[order]), share * corpus.n_windows)) + 1
    first = documents[order[: min(n_first, len(documents) - 1)]]
    inside = np.isin(corpus.documents, first)
    return corpus.of_windows(np.flatnonzero(inside)), corpus.of_windows(np.flatnonzero(~inside))
