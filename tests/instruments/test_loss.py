"""The loss equals that of plain transformers, window by window, and its sums are divided once."""

import math
from functools import cache

import numpy as np
import pytest
import torch

from rheoscope.corpus import batches
from rheoscope.errors import Refused
from rheoscope.instruments.engine import run_pass
from rheoscope.instruments.loss import ROWS, Loss, token_nll
from rheoscope.instruments.measure import measure
from rheoscope.instruments.outputs import PART_BYTES, outputs, separate_head
from rheoscope.models.view import ModelView
from tests.tiny import Float64Throughout, tiny

from . import plain
from .texts import corpus_of, random_corpus

# a plain one, tied weights, logits scaled and capped, learned sinks, a parallel block
FAMILIES = ("gpt2", "llama:tied", "gemma2", "cohere", "gpt_oss", "gpt_neox")
CORPUS = random_corpus()
CLOSE = {"rtol": 1e-10}  # float64 on both sides; one sum of a few hundred terms


@cache
def measured(family):
    view = ModelView(tiny(family))
    with Float64Throughout():
        return measure(view, CORPUS, instruments=["loss"], batch_size=5)["loss"]


@cache
def nll(family):
    """Nats of every scored token: [window][token - 1]."""
    logits = plain.every_window(tiny(family), CORPUS)[1]
    windows = zip(logits, CORPUS.tokens, CORPUS.lengths, strict=True)
    return [plain.nll_of(rows, window[:length]) for rows, window, length in windows]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_document_has_the_loss_that_transformers_gives_with_labels(family):
    model = tiny(family)
    sums, counts = np.zeros(9), np.zeros(9)
    for window, length, document in zip(CORPUS.tokens, CORPUS.lengths, CORPUS.documents, strict=True):
        ids = torch.tensor(window[None, :length].astype(np.int64))
        with torch.no_grad(), Float64Throughout():
            sums[document] += float(model(input_ids=ids, labels=ids).loss) * (length - 1)
        counts[document] += length - 1
    np.testing.assert_allclose(measured(family).nll, sums / counts, **CLOSE)
    np.testing.assert_array_equal(measured(family).tokens, counts)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mean_is_over_all_tokens_and_its_error_over_documents(family):
    sums, counts = (np.array([function(window) for window in nll(family)]) for function in (sum, len))
    mean, error = plain.ratio(sums, counts, CORPUS.documents)
    per_byte, per_byte_error = plain.ratio(plain.bits(sums), CORPUS.n_bytes, CORPUS.documents)
    expected = {
        "nll_mean": mean,
        "nll_mean_se": error,
        "bits_per_byte": per_byte,
        "bits_per_byte_se": per_byte_error,
        "perplexity": math.exp(mean),
        "perplexity_se": math.exp(mean) * error,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(measured(family)[name], value, err_msg=name, **CLOSE)
    assert measured(family).attrs["n"] == 9


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_at_a_position_is_the_mean_over_the_windows_that_reach_it(family):
    by_position = measured(family).nll_by_position.values
    assert np.isnan(by_position[0])  # nothing stands before the first token
    for position in range(1, CORPUS.window):
        reached = [window[position - 1] for window in nll(family) if len(window) >= position]
        np.testing.assert_allclose(by_position[position], sum(reached) / len(reached), **CLOSE)


def test_with_few_documents_the_error_is_taken_over_windows():
    corpus = random_corpus(documents=(0,) * 7 + (1,) * 5)
    view = ModelView(tiny("gpt2"))
    with Float64Throughout():
        loss = measure(view, corpus, instruments=["loss"])["loss"]
    sums, counts = (np.array([function(window) for window in nll("gpt2")]) for function in (sum, len))
    np.testing.assert_allclose(loss.nll_mean_se, plain.ratio(sums, counts, np.arange(12))[1], **CLOSE)
    np.testing.assert_array_equal(loss.document, [0, 1])


def test_parts_seen_by_two_processes_merge_to_the_whole():
    view = ModelView(tiny("gpt2"))
    whole, *parts = (Loss(view, CORPUS) for _ in range(3))
    one_by_one = list(batches(CORPUS, 1))
    with Float64Throughout():
        run_pass(view, one_by_one, [whole])
        for part, some in zip(parts, (one_by_one[::2], one_by_one[1::2]), strict=True):
            run_pass(view, some, [part])
    parts[0].merge(parts[1])
    merged = parts[0].finalize()
    for name, value in whole.finalize().items():
        np.testing.assert_allclose(merged[name], value, err_msg=name, **CLOSE)


@pytest.mark.parametrize(("family", "apart"), [("gpt2", True), ("llama", True), ("gemma2", False), ("granite", False)])
@pytest.mark.parametrize("rows", [2, 7, 29, 30])
def test_logits_made_a_few_rows_at_a_time_give_the_same_loss(family, apart, rows, monkeypatch):
    view = ModelView(tiny(family))
    vocabulary = view.model.get_output_embeddings().weight.shape[0]
    monkeypatch.setitem(PART_BYTES, "cpu", 4 * vocabulary * rows)
    with Float64Throughout():
        assert (separate_head(view) is not None) == apart  # Gemma 2 caps its logits, Granite scales them
        parts = [output.shape[:2] for output, _ in outputs(view, next(batches(CORPUS, 4)), separate_head(view))]
        assert max(a * b for a, b in parts) <= (rows if apart else 4 * CORPUS.window)
        found = measure(view, CORPUS, instruments=["loss"])["loss"]
    for name, value in measured(family).items():
        np.testing.assert_allclose(found[name], value, err_msg=name, **CLOSE)


def test_a_long_row_of_logits_is_scored_in_pieces_without_a_seam():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 2 * ROWS + 3, 11, generator=generator)
    targets = torch.randint(0, 11, logits.shape[:2], generator=generator)
    expected = -torch.log_softmax(logits.double(), -1).gather(-1, targets[..., None])[..., 0]
    # logsumexp of eleven float32 numbers of size 3
    torch.testing.assert_close(token_nll(logits, targets), expected, rtol=0, atol=1e-6)


def test_half_precision_logits_are_raised_before_their_exponentials_are_summed():
    logits = torch.full((1, 3, 50_000), 8.0, dtype=torch.float16)  # Σ exp = 1.5e8, beyond float16
    nll = token_nll(logits, torch.zeros(1, 3, dtype=torch.int64))
    torch.testing.assert_close(nll, torch.full((1, 3), math.log(50_000), dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_hopeless_model_has_an_infinite_perplexity_and_not_an_error():
    view = ModelView(tiny("gpt2"))
    with torch.no_grad():
        view.model.transformer.ln_f.weight.mul_(1e4)
    loss = measure(view, corpus_of(CORPUS.tokens[:2]), instruments=["loss"])["loss"]
    assert loss.nll_mean > 1000
    assert loss.perplexity == np.inf


def test_windows_without_a_scored_token_belong_to_no_document():
    corpus = random_corpus(lengths=(29, 1, 1, 29, 29, 29, 29, 29, 29, 29), documents=(0, 0, 1, 2, 3, 4, 5, 6, 7, 8))
    loss = measure(ModelView(tiny("gpt2")), corpus, instruments=["loss"])["loss"]
    np.testing.assert_array_equal(loss.document, [0, 2, 3, 4, 5, 6, 7, 8])
    assert loss.attrs["n"] == 8


def test_bytes_that_the_tokenizer_does_not_tell_leave_bits_per_byte_open():
    corpus = corpus_of(CORPUS.tokens, n_bytes=np.full(12, np.nan))
    loss = measure(ModelView(tiny("gpt2")), corpus, instruments=["loss"])["loss"]
    assert np.isnan(loss.bits_per_byte)
    assert np.isfinite(loss.nll_mean)


@pytest.mark.parametrize(("name", "reason"), [("bert", "reads both ways"), ("gpt2", "has no output head")])
def test_a_model_that_predicts_no_next_token_is_refused_with_the_reason(name, reason):
    view = ModelView(tiny(name, bare=name == "gpt2"))
    with pytest.raises(Refused, match=reason):
        Loss(view, CORPUS)
