"""Calibrations: the means of the tokens that are no padding, and written down as their hash."""

import numpy as np
import torch
from scored import fitted, passed, text, view_of

from rheoscope.surgery.edits_routing import TruncateRouting


def test_means_of_a_calibration_are_those_of_the_tokens_that_are_no_padding():
    view, totals, n = view_of("sd"), 0, 0
    corpus = text(view)
    calibration = fitted(view, corpus)
    for row, length in zip(corpus.tokens, corpus.lengths, strict=True):
        _, calls = passed(view, torch.tensor(row[:length], dtype=torch.int64)[None])
        totals = totals + np.stack([-call.bias.diagonal(dim1=-2, dim2=-1).sum((0, 2)).numpy() for call in calls])
        n += length
    assert calibration.n_tokens == n
    np.testing.assert_allclose(calibration.damping, totals / n, rtol=1e-12)
    assert (calibration.damping > 0).all()


def test_a_calibration_is_written_down_as_its_hash():
    view = view_of("llama")
    one, two = fitted(view), fitted(view)
    assert repr(one) == repr(two)
    assert repr(TruncateRouting(calibration=one)) == repr(TruncateRouting(calibration=two))
    assert repr(fitted(view, text(view, seed=5))) != repr(one)
    assert len(repr(one)) < 100
