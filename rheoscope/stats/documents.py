"""Sums per document, where a document comes in several windows, several batches and several processes.

A document counts once, with the sums of all its windows. So every accumulator here is told how many windows each
document has (`np.bincount(corpus.documents)`), and a document stays *open*, its partial sums kept, until it has had
them all. In whatever order and parts the windows arrive, the outcome is the same. Windows in order leave one document
open per process; a merge of processes completes those that were split between them. More windows than a document has
means that data was counted twice: RheoscopeError.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int, Int64, Shaped, UInt
from torch import Tensor

from rheoscope.errors import RheoscopeError
from rheoscope.stats.accumulators import A, Accumulator
from rheoscope.stats.comoments import CoMoments
from rheoscope.stats.estimates import Estimate, float64, linearised_se, paired_rows, quotient

Documents = Int[np.ndarray | Tensor, " window"]
Counts = Int[np.ndarray, " document"] | UInt[np.ndarray, " document"]
Some = Int[np.ndarray, " some"] | UInt[np.ndarray, " some"]


class DocumentAccumulator(Accumulator):
    """Keeps count of the windows that have come of every document: for most texts one byte per document.

    The numbers of windows are shared by all accumulators that are given one array of `windows_of_documents`.
    """

    windows: UInt[np.ndarray, " document"]
    seen: UInt[np.ndarray, " document"]

    def __init__(self, windows_per_document: Counts) -> None:
        self.windows = _narrow(windows_per_document)
        self.seen = np.zeros_like(self.windows)

    def _tally(self, documents: Documents) -> Int64[np.ndarray, " window"]:
        """Document numbers as an array, after their windows have been counted."""
        numbers = np.asarray(documents.cpu() if isinstance(documents, Tensor) else documents, np.int64)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self.windows):
            raise RheoscopeError(
                f"windows of documents {numbers.min()} to {numbers.max()} came, of {len(self.windows)} documents; "
                "number documents from 0 and pass the number of windows of each."
            )
        self._see(*np.unique(numbers, return_counts=True))
        return numbers

    def _see(self, documents: Int64[np.ndarray, " some"], windows: Some) -> None:
        """Count windows of some documents, each named once."""
        seen, most = self.seen[documents] + windows.astype(np.int64), self.windows[documents]
        if (seen > most).any():
            first = int(np.argmax(seen > most))
            raise RheoscopeError(
                f"{seen[first]} windows of document {documents[first]} came, and it has {most[first]}; "
                "the same windows were counted twice: feed or merge them once."
            )
        self.seen[documents] = seen

    def _see_those_of(self, other: "DocumentAccumulator") -> None:
        documents = np.flatnonzero(other.seen)
        self._see(documents, other.seen[documents])


def windows_of_documents(documents: Int[np.ndarray, " window"], n: int = 0) -> UInt[np.ndarray, " document"]:
    """How many windows each document has, of `n` documents at least, to be shared by accumulators."""
    return _narrow(np.bincount(documents, minlength=n))


def _narrow(windows: Counts) -> UInt[np.ndarray, " document"]:
    """Whole numbers in the least room; the same array where it is so already."""
    return np.asarray(windows, np.min_scalar_type(int(np.max(windows, initial=0))))


class RatioOfSums(DocumentAccumulator):
    """Ratio Σn/Σd with its standard error over documents, in memory that grows by a byte or two with each.

    Of complete documents it keeps the number, the sums and the central products of (n, d), which is all that the
    linearised error needs. Open documents keep their sums; on `finalize` they count as they stand. A document whose
    sums are both 0 does not count (a short text and a long lag). For bootstrap or paired differences: PerDocument.
    """

    arrays = ("windows", "seen", "open_documents", "open_sums", "count", "sums", "products")

    def __init__(self, shape: tuple[int, ...], *, windows_per_document: Counts) -> None:
        super().__init__(windows_per_document)
        self.open_documents = np.zeros(0, np.int64)
        self.open_sums = np.zeros((0, 2, *shape))
        self.count, self.sums, self.products = CoMoments.empty(2, shape)

    def update(
        self,
        documents: Documents,
        numerators: Shaped[np.ndarray | Tensor, " window *shape"],
        denominators: Shaped[np.ndarray | Tensor, " ..."],
    ) -> None:
        """Add windows. Denominators: one per window or one per numerator."""
        rows = np.stack(paired_rows(numerators, denominators), 1)
        self._settle(self._tally(documents), rows)

    def finalize(self) -> Estimate:
        """The ratio over all documents, its standard error (NaN below two documents) and their number."""
        count, sums, products = self._closed().joined(_co_moments(self.open_sums))
        ratio = quotient(sums[0], sums[1])
        squares = products[0, 0] - 2 * ratio * products[0, 1] + ratio**2 * products[1, 1]
        return Estimate(ratio, linearised_se(squares, sums[1], count), count)

    def _settle(self, documents: Int64[np.ndarray, " row"], rows: Float64[np.ndarray, "row 2 *shape"]) -> None:
        """Add rows to the open documents, then close those that have had all their windows."""
        documents = np.concatenate([self.open_documents, documents])
        numbers, place = np.unique(documents, return_inverse=True)
        totals = np.zeros((len(numbers), *self.open_sums.shape[1:]))
        np.add.at(totals, place, np.concatenate([self.open_sums, rows]))
        complete = self.seen[numbers] == self.windows[numbers]
        self.count, self.sums, self.products = self._closed().joined(_co_moments(totals[complete]))
        self.open_documents, self.open_sums = numbers[~complete], totals[~complete]

    def _closed(self) -> CoMoments:
        return CoMoments(self.count, self.sums, self.products)

    def _layout(self) -> tuple:
        return (self.windows.tobytes(), self.count.shape)

    def _take_in(self: A, other: A) -> None:
        self._see_those_of(other)
        self.count, self.sums, self.products = self._closed().joined(other._closed())
        self._settle(other.open_documents, other.open_sums)


class DocumentSums(NamedTuple):
    """Sums of the documents that have come: their numbers, whether all their windows came, and the sums by name."""

    documents: Int64[np.ndarray, " document"]
    complete: Bool[np.ndarray, " document"]
    sums: dict[str, Float64[np.ndarray, " document *shape"]]


class PerDocument(DocumentAccumulator):
    """Named sums of every document: for per-document tables, bootstrap and paired differences.

    Memory: documents x names x shape float64, from the start. Keep the shape small; loss needs ().
    """

    arrays = ("windows", "seen", "names", "sums")

    def __init__(self, names: tuple[str, ...], shape: tuple[int, ...] = (), *, windows_per_document: Counts) -> None:
        super().__init__(windows_per_document)
        self.names = np.array(names)
        self.sums = np.zeros((len(names), len(self.windows), *shape))

    def update(self, documents: Documents, **sums: Shaped[np.ndarray | Tensor, " window *shape"]) -> None:
        """Add the sums of windows, one argument per name."""
        if sums.keys() != set(self.names.tolist()):
            raise RheoscopeError(
                f"sums of {sorted(sums)} came per document; {self.names.tolist()} are kept: pass these."
            )
        numbers = self._tally(documents)
        for total, name in zip(self.sums, self.names.tolist(), strict=True):
            np.add.at(total, numbers, float64(sums[name]))

    def finalize(self) -> DocumentSums:
        """Sums of the documents of which at least one window has come, by document number."""
        numbers = np.flatnonzero(self.seen)
        sums = {name: total[numbers] for name, total in zip(self.names.tolist(), self.sums, strict=True)}
        return DocumentSums(numbers, self.seen[numbers] == self.windows[numbers], sums)

    def _layout(self) -> tuple:
        return (*self.names.tolist(), self.windows.tobytes(), *self.sums.shape)

    def _take_in(self: A, other: A) -> None:
        self._see_those_of(other)
        self.sums = self.sums + other.sums


def _co_moments(totals: Float64[np.ndarray, "document 2 *shape"]) -> CoMoments:
    """Co-moments of (n, d) over documents whose sums are not both 0."""
    return CoMoments.of(totals, (totals != 0).any(1))
