"""One text in two: what is fitted or chosen on some documents is judged on others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from rheoscope.corpus import Corpus
from rheoscope.errors import RheoscopeError

HASHED = 64  # tokens at the beginning of a document by which it is known again
FEWEST = 2  # documents to verify on


@dataclass(frozen=True)
class KnownDocuments:
    """Documents by hashes of their first `n_tokens` text tokens, whatever they are called and wherever they lie."""

    n_tokens: int
    hashes: frozenset[str]

    @classmethod
    def of(cls, corpus: Corpus) -> KnownDocuments:
        """All documents of a text; by no more tokens than a window holds, so that other windows show them too."""
        n_tokens = min(HASHED, corpus.window - corpus.framing.n_special)
        return cls(n_tokens, frozenset(_hashes(corpus, n_tokens).values()))

    def among(self, corpus: Corpus) -> list[int]:
        """The numbers of those documents of a text that are known."""
        return [number for number, known in _hashes(corpus, self.n_tokens).items() if known in self.hashes]


@dataclass(frozen=True)
class Parted:
    """A text to fit on and one to verify on. n_known: documents of the second that the plan was chosen on."""

    calibration: Corpus
    checking: Corpus
    n_known: int = 0


def two_texts(corpus: Corpus, *, share: float = 0.5, seed: int = 0) -> tuple[Corpus, Corpus]:
    """Windows of two sets of documents that have none in common; the first has about `share` of the windows.

    Documents are drawn at random. Raises RheoscopeError where there are not two documents.
    """
    _refuse_one_document(corpus)
    if not 0 < share < 1:
        raise RheoscopeError(f"a share of {share:g} of a text asked for: give a number between 0 and 1")
    return _divided(corpus, _drawn(corpus, seed), share)


def parted(corpus: Corpus, known: KnownDocuments | None, *, seed: int = 0) -> Parted:
    """The text in about two halves, with all known documents in the first, and more of the others as they fit.

    Where fewer than two others are left, they are verified on together with known ones.
    """
    documents = [] if known is None else known.among(corpus)
    if not documents:
        return Parted(*two_texts(corpus, seed=seed))
    _refuse_one_document(corpus)
    order = _drawn(corpus, seed)
    is_known = np.isin(order, documents)
    order = np.concatenate([order[is_known], order[~is_known]])
    n_new = len(order) - len(documents)
    calibration, checking = _divided(corpus, order, 0.5, least=len(documents) if n_new >= FEWEST else 1)
    return Parted(calibration, checking, len(set(documents) & set(checking.documents.tolist())))


def _divided(
    corpus: Corpus, order: Int[np.ndarray, " document"], share: float, least: int = 1
) -> tuple[Corpus, Corpus]:
    """The first documents in that order, at least so many, until they have their share, and the rest, at least one."""
    sizes = np.bincount(corpus.documents)[order]
    n_first = max(least, int(np.searchsorted(np.cumsum(sizes), share * corpus.n_windows)) + 1)
    inside = np.isin(corpus.documents, order[: min(n_first, len(order) - 1)])
    return corpus.of_windows(np.flatnonzero(inside)), corpus.of_windows(np.flatnonzero(~inside))


def _drawn(corpus: Corpus, seed: int) -> Int[np.ndarray, " document"]:
    """Its documents in random order."""
    documents = np.unique(corpus.documents)
    return documents[np.random.default_rng(seed).permutation(len(documents))]


def _refuse_one_document(corpus: Corpus) -> None:
    n = len(np.unique(corpus.documents))
    if n < 2:
        raise RheoscopeError(
            f"a text of {n} document asked to be parted in two; what is fitted on one document must be "
            "judged on another: give more files or windows, fewer windows of each document "
            "(--windows-per-document), or let headings or blank lines part it (--split)"
        )


def _hashes(corpus: Corpus, n_tokens: int) -> dict[int, str]:
    """A hash of the first text tokens of every document, special tokens left out; of all where it has fewer."""
    before, after = len(corpus.framing.prefix), len(corpus.framing.suffix)
    found = {}
    for document in np.unique(corpus.documents).tolist():
        windows = np.flatnonzero(corpus.documents == document)
        windows = windows[np.argsort(corpus.starts[windows], kind="stable")]
        rows = [corpus.tokens[window, before : corpus.lengths[window] - after] for window in windows]
        first = np.concatenate(rows)[:n_tokens]
        found[document] = hashlib.sha256(first.astype("<i8").tobytes()).hexdigest()[:16]
    return found
