"""Token windows with document numbers and a hash: what every instrument reads."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int, Int32, Int64
from torch import Tensor

from rheoscope.corpus.tokens import Framing, TokenText
from rheoscope.errors import RheoscopeError

FEWEST_DOCUMENTS = 8  # for a standard error over documents; with fewer, errors are taken over windows


@dataclass(frozen=True, eq=False)
class Corpus:
    """Windows of token ids, each inside one document, padded on the right; every text token is in at most one.

    `starts` counts text tokens from the beginning of the document. `n_bytes` are the UTF-8 bytes that the scored
    tokens of a window stand for, that is all but the one at position 0; NaN where the tokenizer does not tell them.
    `left_out` counts the tokens and the whole documents that were read and are in no window; text after the window
    number `n_windows_asked` was not read and is not counted. With `packed`, documents follow one another inside
    windows and a window carries the number of the document of its first text token.
    """

    tokens: Int32[np.ndarray, "window position"]
    lengths: Int32[np.ndarray, " window"]
    documents: Int64[np.ndarray, " window"]
    starts: Int64[np.ndarray, " window"]
    n_bytes: Int64[np.ndarray, " window"] | Float64[np.ndarray, " window"]
    framing: Framing
    bos_id: int | None
    sources: tuple[str, ...]
    document_names: tuple[str, ...]
    first_tokens: tuple[str, ...]
    tail: str
    packed: bool
    n_windows_asked: int | None
    left_out: dict[str, int]
    separator: int | None = None  # between packed documents
    split: str = "file"  # how the sources were read
    field: str = "text"

    @property
    def window(self) -> int:
        """Positions in a window, special tokens included."""
        return self.tokens.shape[1]

    @property
    def n_windows(self) -> int:
        """Number of windows."""
        return len(self.tokens)

    @property
    def n_documents(self) -> int:
        """Number of documents that have a window."""
        return len(self.document_names)

    @property
    def unit(self) -> str:
        """What errors are taken over: documents, or windows where there are fewer than FEWEST_DOCUMENTS of them.

        Windows of one document resemble one another, so errors over windows may be somewhat too small.
        """
        return "document" if self.n_documents >= FEWEST_DOCUMENTS else "window"

    @property
    def units(self) -> Int64[np.ndarray, " window"]:
        """The number of the unit that each window belongs to."""
        return self.documents if self.unit == "document" else np.arange(self.n_windows)

    def of_windows(self, windows: Int[np.ndarray, " chosen"]) -> "Corpus":
        """The corpus of some windows alone, in the given order; documents keep their numbers."""
        parts = ("tokens", "lengths", "documents", "starts", "n_bytes")
        return replace(self, **{part: getattr(self, part)[windows] for part in parts})

    @property
    def n_tokens(self) -> int:
        """Number of tokens in all windows, special tokens included and padding left out."""
        return int(self.lengths.sum())

    @property
    def hash(self) -> str:
        """SHA-256 over window length, lengths, document numbers and token ids, padding left out."""
        valid = np.arange(self.window) < self.lengths[:, None]
        digest = hashlib.sha256(f"{self.window} {self.n_windows}".encode())
        for array in (self.lengths, self.documents, self.tokens[valid]):
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()

    def provenance(self) -> dict[str, object]:
        """What a run records of its text, ready for JSON."""
        return {
            "sources": list(self.sources),
            "split": self.split,
            "field": self.field,
            "hash": self.hash,
            "n_documents": self.n_documents,
            "n_windows": self.n_windows,
            "n_windows_asked": self.n_windows_asked,
            "window": self.window,
            "tokens": self.n_tokens,
            "first_tokens": list(self.first_tokens),
            "error_unit": self.unit,
            "tail": self.tail,
            "packed": self.packed,
            "left_out": dict(self.left_out),
        }


class Piece(NamedTuple):
    """The text tokens of one window; `document` counts the documents read, `start` the text tokens before it."""

    ids: Int32[np.ndarray, " token"]
    n_bytes: np.ndarray
    document: int
    start: int


def document_pieces(
    texts: Iterator[TokenText], room: int, *, tail: str, most: int | None, left_out: Counter
) -> Iterator[Piece]:
    """Pieces of `room` tokens, at most `most` of each document; counts in `left_out` what is in none of them."""
    for number, text in enumerate(texts):
        n = len(text.ids)
        n_pieces = n // room if tail == "drop" else -(-n // room)
        starts = range(0, n_pieces * room, room)[:most]
        for start in starts:
            yield Piece(text.ids[start : start + room], text.n_bytes[start : start + room], number, start)
        left_out["tokens"] += max(0, n - len(starts) * room)
        left_out["documents"] += not starts


def packed_pieces(
    texts: Iterator[TokenText], room: int, *, separator: int, tail: str, left_out: Counter
) -> Iterator[Piece]:
    """Pieces of `room` tokens cut from all documents, joined by `separator`, which stands for no bytes."""
    waiting = np.zeros((0, 4))  # id, bytes, document, start; exact in float64, which has NaN for bytes unknown
    for number, text in enumerate(texts):
        ids, n_bytes = np.append(text.ids, separator), np.append(text.n_bytes, 0)
        rows = np.column_stack([ids, n_bytes, np.full(len(ids), number), np.arange(len(ids))])
        waiting = np.concatenate([waiting, rows])
        n_whole = len(waiting) // room * room
        yield from (_packed(waiting[i : i + room]) for i in range(0, n_whole, room))
        waiting = waiting[n_whole:]
    waiting = waiting[:-1]  # nothing follows the last document
    if tail == "keep" and len(waiting):
        yield _packed(waiting)
    elif len(waiting):
        left_out["tokens"] += len(waiting)


def _packed(rows: Float64[np.ndarray, "token 4"]) -> Piece:
    n_bytes = rows[:, 1] if np.isnan(rows[:, 1]).any() else rows[:, 1].astype(np.int64)
    return Piece(rows[:, 0].astype(np.int32), n_bytes, int(rows[0, 2]), int(rows[0, 3]))


class Filled(NamedTuple):
    """Arrays of a corpus, and the number of each document among those read."""

    tokens: Int32[np.ndarray, "window position"]
    lengths: Int32[np.ndarray, " window"]
    documents: Int64[np.ndarray, " window"]
    starts: Int64[np.ndarray, " window"]
    n_bytes: Int64[np.ndarray, " window"] | Float64[np.ndarray, " window"]
    document_numbers: list[int]


def filled_windows(pieces: Iterator[Piece], frame: Framing, window: int, n_windows: int | None) -> Filled:
    """Windows made of the frame and one piece each; documents numbered densely in the order of their first window."""
    rows, lengths, numbers, starts, n_bytes = [], [], [], [], []
    n_unscored = 0 if frame.prefix else 1
    for piece in islice(pieces, n_windows):
        row = np.full(window, frame.pad, dtype=np.int32)
        whole = np.concatenate([frame.prefix, piece.ids, frame.suffix]).astype(np.int32)
        row[: len(whole)] = whole
        rows.append(row)
        lengths.append(len(whole))
        numbers.append(piece.document)
        starts.append(piece.start)
        n_bytes.append(piece.n_bytes[n_unscored:].sum())
    document_numbers, documents = np.unique(np.array(numbers, dtype=np.int64), return_inverse=True)
    return Filled(
        tokens=np.stack(rows) if rows else np.zeros((0, window), dtype=np.int32),
        lengths=np.array(lengths, dtype=np.int32),
        documents=documents.astype(np.int64),
        starts=np.array(starts, dtype=np.int64),
        n_bytes=np.array(n_bytes),
        document_numbers=document_numbers.tolist(),
    )


@dataclass(frozen=True)
class Batch:
    """Some windows of a corpus as tensors; `windows` are their numbers in it, `first` the place where they begin."""

    tokens: Int[Tensor, "batch position"]
    valid: Bool[Tensor, "batch position"]
    documents: Int[Tensor, " batch"]
    windows: Int[Tensor, " batch"]
    first: int = 0


def batches(corpus: Corpus, batch_size: int) -> Iterator[Batch]:
    """All windows in order, `batch_size` at a time; the last batch may be smaller."""
    if batch_size < 1:
        raise RheoscopeError(f"a batch of {batch_size} windows was asked; it needs at least 1.")
    for begin in range(0, corpus.n_windows, batch_size):
        windows = torch.arange(begin, min(begin + batch_size, corpus.n_windows))
        chosen = slice(begin, begin + batch_size)
        lengths = torch.tensor(corpus.lengths[chosen])
        yield Batch(
            tokens=torch.tensor(corpus.tokens[chosen], dtype=torch.int64),
            valid=torch.arange(corpus.window) < lengths[:, None],
            documents=torch.tensor(corpus.documents[chosen]),
            windows=windows,
        )
