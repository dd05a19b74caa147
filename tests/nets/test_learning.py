"""S-D attention without any norm learns: it beats the bigram baseline of its own text on three seeds."""

import numpy as np
import pytest
import torch

from rheoscope.corpus import read
from rheoscope.nets.recipe import Recipe
from rheoscope.nets.train import divided, train
from rheoscope.nets.vocabulary import tokenizer_named

TEXT = "builtin:manual"
SMOOTHING = 0.1  # added to every count; the baseline is best near it


def bigram_loss(training, held_out, vocabulary):
    """Mean -log p(token | token before) of the held-out windows under the counts of the training windows."""
    counts = np.full((vocabulary, vocabulary), SMOOTHING)
    np.add.at(counts, (training[:, :-1], training[:, 1:]), 1)
    probabilities = counts / counts.sum(1, keepdims=True)
    return -np.log(probabilities[held_out[:, :-1], held_out[:, 1:]]).mean()


def test_the_bigram_baseline_of_a_cycle_is_zero_and_of_coin_flips_log_two():
    cycle = np.tile([0, 1, 2], (200, 40))
    assert bigram_loss(cycle, cycle[:10], 3) == pytest.approx(0, abs=1e-3)
    coin = np.random.default_rng(0).integers(0, 2, (400, 100))
    assert bigram_loss(coin[:300], coin[300:], 2) == pytest.approx(np.log(2), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sd_without_norms_falls_below_the_bigram_baseline(seed, tmp_path):
    plan = Recipe(kind="sd", text=[TEXT], use_norm=False).filled()
    corpus = read(TEXT, tokenizer=tokenizer_named("bytes", [TEXT]), window=plan.window, pack=True)
    training, held_out = (windows.tokens.numpy() for windows in divided(corpus, plan))
    baseline = bigram_loss(training, held_out, 257)
    out = tmp_path / "run"
    run = train("sd", text=TEXT, out=out, use_norm=False, seed=seed, steps=400, save_every=400, precision="float32")
    assert run.held_out_loss < baseline
    assert torch.tensor(run.curve.loss.dropna().to_numpy()).isfinite().all()
