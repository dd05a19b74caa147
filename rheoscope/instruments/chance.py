"""What instruments read by chance: an untrained model of the same shape, in one pass for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from rheoscope.corpus import Corpus
from rheoscope.errors import Refused
from rheoscope.instruments.instrument import Instrument, Pass
from rheoscope.instruments.sampling import spread
from rheoscope.models.untrained import untrained
from rheoscope.models.view import ModelView


def untrained_readings(
    view: ModelView, corpus: Corpus, active: Mapping[str, Instrument], run_pass: Pass, seed: int
) -> dict[str, Instrument | Refused]:
    """By instrument, what has read an untrained model on a few windows of the text; why not, where it cannot be run.

    As many windows as the instrument asks for that wants most: all read all of them.
    """
    n_windows = max(instrument.n_null for instrument in active.values())
    if not n_windows:
        return {}
    few = corpus.of_windows(spread(corpus.n_windows, n_windows))
    made = {name: instrument.null(few) for name, instrument in active.items() if instrument.n_null}
    readers = {name: reader for name, reader in made.items() if reader is not None}
    if not readers:
        return {}
    try:
        with untrained(view, seed):
            run_pass(few, list(readers.values()), task="untrained null")
    except Refused as refusal:
        return dict.fromkeys(readers, refusal)
    return readers
