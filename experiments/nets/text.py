"""The text of a finished network: the windows that were held out of its training, and what counting predicts there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from rheoscope.corpus import Corpus, read
from rheoscope.nets.folder import RECORD
from rheoscope.nets.recipe import Recipe
from rheoscope.nets.train import divided

SMOOTHING = 0.1  # added to every count; for bytes the bigram baseline is best near it


def record_in(folder: Path) -> dict:
    """What a run wrote beside its weights."""
    return json.loads((folder / RECORD).read_text(encoding="utf-8"))


def finished(runs: Path) -> dict[str, dict]:
    """Record of every finished network in a folder, by NAME-SEED."""
    records = {path.parent.name: record_in(path.parent) for path in sorted(runs.glob(f"*/{RECORD}"))}
    return {name: record for name, record in records.items() if "finished" in record}


def parted(folder: Path, text: str) -> tuple[Corpus, Corpus]:
    """The windows that a network was trained on, and those held out."""
    plan = dataclasses.replace(Recipe(**record_in(folder)["recipe"]), text=[text])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    corpus = read(text, tokenizer=tokenizer, window=plan.window, split=plan.split, pack=True)
    n_training = len(divided(corpus, plan)[0])
    return corpus.of_windows(np.arange(n_training)), corpus.of_windows(np.arange(n_training, corpus.n_windows))


def baselines(training: Corpus, held_out: Corpus) -> dict[str, float]:
    """Held-out loss of the token frequencies and of the token pairs counted in the training windows, nats per token."""
    vocabulary = int(max(training.tokens.max(), held_out.tokens.max())) + 1
    pairs = np.full((vocabulary, vocabulary), SMOOTHING)
    np.add.at(pairs, (training.tokens[:, :-1], training.tokens[:, 1:]), 1)
    single = pairs.sum(0) / pairs.sum()
    double = pairs / pairs.sum(1, keepdims=True)
    before, after = held_out.tokens[:, :-1], held_out.tokens[:, 1:]
    return {"unigram": float(-np.log(single[after]).mean()), "bigram": float(-np.log(double[before, after]).mean())}
