"""Corpora of random tokens for the instruments: windows of several lengths, documents of several windows."""

import numpy as np

from rheoscope.corpus import Corpus
from rheoscope.corpus.tokens import Framing

LENGTHS = (29, 29, 17, 29, 23, 29, 29, 11, 29, 29, 29, 29)
DOCUMENTS = (0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8)  # nine, so that errors are taken over documents


def corpus_of(tokens, *, lengths=None, documents=None, n_bytes=None):
    """A corpus of the given windows [window, position]; by default all whole, each its own document."""
    tokens = np.array(tokens, np.int32)
    lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else np.array(lengths)
    documents = np.arange(len(tokens)) if documents is None else np.array(documents)
    return Corpus(
        tokens=tokens,
        lengths=lengths.astype(np.int32),
        documents=documents.astype(np.int64),
        starts=np.zeros(len(tokens), np.int64),
        n_bytes=3 * lengths.astype(np.int64) - 2 if n_bytes is None else np.array(n_bytes),
        framing=Framing((), (), 0),
        bos_id=None,
        sources=("random tokens",),
        document_names=tuple(f"document {number}" for number in range(documents.max() + 1)),
        first_tokens=("a",),
        tail="keep",
        packed=False,
        n_windows_asked=None,
        left_out={},
    )


def random_corpus(*, window=29, lengths=LENGTHS, documents=DOCUMENTS, seed=0):
    """Random windows, padded on the right with the token 0."""
    lengths = np.minimum(lengths, window)
    tokens = np.random.default_rng(seed).integers(3, 61, (len(lengths), window))
    tokens[np.arange(window) >= lengths[:, None]] = 0
    return corpus_of(tokens, lengths=lengths, documents=documents)
